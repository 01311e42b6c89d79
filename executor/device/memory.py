"""Allocated bytes of a rank, storage by storage: exact to the byte on CPU, where the resident set is off by 10×.

What one kernel takes for itself and gives back before it returns is not seen; nor what another thread makes. `OpWatch`
is what those who follow storages, kernels or lanes are made of.
"""

import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import cache
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_RESOLVING = threading.Lock()


@cache
def resolve_operators() -> None:
    """Have torch make the Python objects of all operators (0.2 s), before several threads ask for the same one.

    Those that a mode is given are made when they are first asked for. Torch 2.13 keeps the one that was made last, and
    remembers the address of the one that was made first: of two threads that ask together one then reads what is freed
    (SIGSEGV in 1 of 200 runs of four virtual ranks on a busy machine).
    """
    for name in torch._C._dispatch_get_all_op_names():
        space, _, op = name.partition("::")
        op, _, overload = op.partition(".")
        with suppress(AttributeError, RuntimeError):
            getattr(getattr(getattr(torch.ops, space), op), overload or "default")


_ASIDE = threading.local()


def unfollowed() -> AbstractContextManager[object]:
    """What this thread does there is the host's own: neither memory nor work of a device, whoever follows its ops."""
    return patch.object(_ASIDE, "on", True, create=True)


class OpWatch(TorchDispatchMode, ABC):
    """A dispatch mode. Else torch would import its compiler at the first op, a second for every rank."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            with _RESOLVING:
                resolve_operators()
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {})) if getattr(_ASIDE, "on", False) else self.called(func, args, kwargs or {})

    @abstractmethod
    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What is done in place of a call, and gives its result."""


def tensors_of(value: Any) -> list[Tensor]:
    """Those that an op is given or gives, in a list or as they are: several times as quick as torch's `tree_leaves`.

    >>> x = torch.zeros(1)
    >>> [len(tensors_of(v)) for v in (x, [x, None], ([x], x), 3, {"a": x})]
    [1, 1, 2, 0, 1]
    """
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [x for part in value for x in tensors_of(part)]
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)] if isinstance(value, dict) else []


def named(func: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a call of an operator is given, by the names of its arguments."""
    return dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)


def overwritten(func: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What of that the operator writes to."""
    given, to = named(func, args, kwargs), func._schema.arguments
    return [given[a.name] for a in to if a.alias_info and a.alias_info.is_write and a.name in given]


def forget_peaks(device: torch.device) -> None:
    """The allocator of a GPU counts anew what it hands out."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def allocator_peaks(device: torch.device) -> dict[str, int] | None:
    """The most bytes that torch's allocator has handed out on a GPU, and has reserved, since then; None on a CPU.

    Kernels' own workspace is among them, and of all ranks that share the GPU.
    """
    if device.type != "cuda":
        return None
    stats = torch.cuda.memory_stats(device)
    return {kind: int(stats[f"{kind}_bytes.all.peak"]) for kind in ("allocated", "reserved")}


class PeakMemory(OpWatch):
    """The bytes of all storages that a thread's ops make while this is active, and the most there were at one time.

    held: tensors that are there already. A death is counted with the next birth, or when `now` is asked: so it does not
    matter which thread lets go of a storage last. One that has been resized has died and was born again, when the next
    op looks at it.

    >>> import torch
    >>> held = torch.zeros(4)
    >>> with PeakMemory([held, held[1:]]) as memory:
    ...     x = held + 1
    ...     x = x.double()
    ...     y = x.view(2, 2)
    >>> memory.now, memory.peak  # bytes: 16 held, 32 of x, and at the peak the 16 it was made from
    (48, 64)
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}  # by key, unique among the living
        self._gone: deque[int] = deque()
        self._now = self.peak = 0
        for tensor in held:
            self._see(tensor)

    @property
    def now(self) -> int:
        self._settle()
        return self._now

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        for tensor in tensors_of(out):
            self._see(tensor)
        return out

    def _see(self, tensor: Tensor) -> None:
        """Count a tensor's storage from now on, if it is a new one."""
        self._settle()
        storage = tensor.untyped_storage()
        key, size = int(storage._cdata), storage.nbytes()
        if (known := self._known.get(key)) is not None:
            if known[1] == size:
                return
            self._now -= self._known.pop(key)[1]
        if not size or tensor.is_meta:
            return
        gone = self._gone
        self._known[key] = weakref.ref(storage, lambda _: gone.append(key)), size
        self._now += size
        self.peak = max(self.peak, self._now)

    def _settle(self) -> None:
        """Count the deaths there were."""
        while self._gone:
            self._now -= self._known.pop(self._gone.popleft())[1]
