"""Where the host waits for a device, found on a CPU: what torch does on a GPU with the same calls.

The host waits where it reads what the device has made (`item`, `tolist`, `bool`, `cpu`), for a mark, where a result's
shape depends on values (a mask as an index, `nonzero`, `bincount`), and where the device is given what lies in
memory that it cannot read by itself: a list, a microbatch, unless `executor.device.device.upload` does.
"""

import threading
from collections import Counter
from functools import cache
from typing import Any

import torch

from executor.device.memory import tensors_of

aten = torch.ops.aten
LIFTED = aten.lift_fresh.default  # every tensor of a list, or of an array of numpy's, goes through it
_COPIES = {aten._to_copy.default: 6, aten.copy_.default: 2}  # → where `non_blocking` stands, if not by name
_SHAPED = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # what torch.export cannot go through
_MASKED = {aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


class DeviceSyncCensus:
    """How often the host waited, by (thread, op, what it called). The op is "" between steps."""

    def __init__(self) -> None:
        self.found: Counter[tuple[str, str, str]] = Counter()
        self._lock, self._at = threading.Lock(), threading.local()

    def begin(self, op: str) -> None:
        """What this thread does from now on is that op's."""
        self._at.op = op

    def note(self, what: str) -> None:
        with self._lock:
            self.found[threading.current_thread().name, getattr(self._at, "op", ""), what] += 1

    def by_op(self) -> dict[str, int]:
        """All threads' within steps."""
        out: Counter[str] = Counter()
        for (_, op, _), count in sorted(self.found.items()):
            out[op] += count
        del out[""]
        return dict(out)


def shaped_by_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the host must know values before an op returns."""
    if func in _MASKED or func is aten.index.Tensor:
        return any(x.dtype in (torch.bool, torch.uint8) for x in tensors_of(args[1]))
    if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None:
        return False
    return _tagged(func)


@cache
def _tagged(func: Any) -> bool:
    return not _SHAPED.isdisjoint(func.tags)


def copies(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, bool]:
    """(whether an op only copies, whether the host goes on meanwhile)."""
    if (at := _COPIES.get(func)) is None:
        return False, False
    return True, bool(kwargs.get("non_blocking", args[at] if at < len(args) else False))
