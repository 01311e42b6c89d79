"""Allocated bytes of a rank, storage by storage: exact to the byte on CPU, where the resident set is off by 10×.

What one kernel takes for itself and gives back before it returns is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active in a thread, follows the storages its ops make. held: tensors that are there already.

    >>> import torch
    >>> held = torch.zeros(4)
    >>> with PeakMemory([held, held[1:]]) as memory:
    ...     x = held + 1
    ...     x = x.double()
    ...     y = x.view(2, 2)
    >>> memory.now, memory.peak  # bytes: 16 held, 32 of x, and at the peak the 16 it was made from
    (48, 64)
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler at the first op, a second for every rank

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}
        for tensor in held:
            self._see(tensor)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return out

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or not size:
            return
        self._known[key] = weakref.ref(storage, lambda _: self._gone(key, size))
        self.now += size
        self.peak = max(self.peak, self.now)

    def _gone(self, key: int, size: int) -> None:
        del self._known[key]
        self.now -= size
