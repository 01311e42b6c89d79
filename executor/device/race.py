"""A CPU that keeps a GPU's promises and no more: lanes are ordered by marks alone, freed memory goes back to its lane.

Arithmetic is real and done at once; `executor.device.race_clocks` is told of every op what it reads, writes and takes.
What is made outside of any lane is the host's, a microbatch as the loader has it: its memory is not the caching
allocator's, and copies from it are done when the call returns.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from executor.device.device import Lane
from executor.device.memory import OpWatch
from executor.device.race_clocks import Clock, DeviceRace, DeviceRaceClocks, Span
from ir.core.errors import ErrorKind, PiperError

_READS_ON_HOST = {torch.ops.aten._local_scalar_dense.default}
_READS_SHAPES = {"zeros_like", "ones_like", "empty_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full"}


class DeviceRaceMark:
    """A point of a lane, and what had happened before it on all lanes. It is done once somebody has waited for it."""

    def __init__(self, device: RaceDevice, lane: int, clock: Clock) -> None:
        self.device, self.lane, self.clock = device, lane, clock
        self.at_s, self.waited = time.monotonic(), False

    def done(self) -> bool:
        return self.waited

    def wait(self) -> None:
        """Whatever this host launches from now on is behind it, on any lane."""
        self.waited = True
        self.device.known(self.clock)

    def seconds(self) -> float:
        return self.at_s

    def behind(self, other: DeviceRaceMark) -> bool:
        """Whether it stands behind another, so that whatever is here has seen what is there."""
        return self.clock.get(other.lane, 0) >= other.clock[other.lane]


class RaceDevice:
    """The device. All ranks of a process share one. deaf: it forgets what it is told to follow, as a control."""

    torch = torch.device("cpu")
    ahead = True

    def __init__(self, clocks: DeviceRaceClocks | None = None, *, deaf: bool = False) -> None:
        self.deaf, self.clocks = deaf, clocks or DeviceRaceClocks()
        self.lock = threading.RLock()
        self._mine = threading.local()
        self._keys: dict[int, tuple[int, int, weakref.ref[Any]]] = {}  # of a storage: its block, its bytes
        self._freed: deque[int] = deque()
        self._taken = self._hosts = 0

    @property
    def races(self) -> list[DeviceRace]:
        return self.clocks.races

    # -- as a device --------------------------------------------------------------------------------------------------

    def bind(self) -> None:
        """This thread's ops are watched from now on, whatever other modes come and go above."""
        if not getattr(self._mine, "watched", False):
            self._mine.watched = True
            OpRaceWatch(self).__enter__()  # type: ignore[no-untyped-call]
            _HostReadWatch(self).__enter__()  # type: ignore[no-untyped-call]

    def lane(self, name: str) -> Lane:
        """A new queue; what runs in it without a mark of another lane is ordered by itself alone."""
        with self.lock:
            me = self.clocks.lane(f"{threading.current_thread().name} {name}")

        @contextmanager
        def active() -> Iterator[None]:
            before = getattr(self._mine, "lane", None)
            self._mine.lane = me
            try:
                yield
            finally:
                self._mine.lane = before

        return active

    def mark(self) -> DeviceRaceMark:
        with self.lock:
            lane, host = self._here()
            return DeviceRaceMark(self, lane, self.clocks.mark(lane, host))

    def follow(self, mark: Any) -> None:
        if not self.deaf:
            with self.lock:
                self.clocks.follow(self._here()[0], mark.clock)

    def unseen(self) -> AbstractContextManager[Any]:
        """See `Device.unseen`: all but this device's own look away."""
        return _alone(self)

    def known(self, clock: Clock) -> None:
        """The host of this thread has waited for all that."""
        if not self.deaf:
            with self.lock:
                self.clocks.known(self._here()[1], clock)

    def place(self) -> str:
        """The active lane, for people."""
        with self.lock:
            return self.clocks.names[self._here()[0]]

    # -- accesses -----------------------------------------------------------------------------------------------------

    def touch(self, what: str, read: list[Tensor], written: list[Tensor], *, read_back: bool = False) -> None:
        """An op of the active lane. read_back: the host waits for the result."""
        with self.lock:
            lane, host = self._here()
            spans = [*self._spans(written, lane, written=True), *self._spans(read, lane, written=False)]
            self.clocks.touch(lane, host, what, spans, read_back=read_back and not self.deaf)
            self._bury()

    def seen(self, tensors: list[Tensor]) -> None:
        """Views were taken of them: that touches nothing, but shows a storage that was resized."""
        with self.lock:
            for tensor in tensors:
                self._block(tensor, self._here()[0])
            self._bury()

    def _spans(self, tensors: list[Tensor], lane: int, *, written: bool) -> Iterator[Span]:
        for tensor in tensors:
            block = self._block(tensor, lane)
            if block is not None and tensor.numel():
                width = tensor.element_size()
                low = int(tensor.storage_offset()) * width
                last = sum((int(n) - 1) * int(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
                yield block, low, low + (last + 1) * width, written

    def _block(self, tensor: Tensor, lane: int) -> int | None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._keys and self._keys[key][1] != size:  # resized in place: given back, and taken anew
            self._gone(key)
        if key not in self._keys:
            if not size:
                return None
            self._taken += 1
            self._keys[key] = self._taken, size, weakref.ref(storage, lambda _: self._gone(key))
            self.clocks.take(self._taken, size, lane)
        return self._keys[key][0]

    def _gone(self, key: int) -> None:
        """Called wherever the last reference goes; judged with the next op."""
        if (known := self._keys.pop(key, None)) is not None:
            self._freed.append(known[0])

    def _bury(self) -> None:
        while self._freed:
            self.clocks.free(self._freed.popleft())

    def _here(self) -> tuple[int, int]:
        """The active lane, and this thread, by numbers."""
        mine = self._mine
        if not hasattr(mine, "host"):
            self._hosts += 1
            mine.host = self._hosts
        if getattr(mine, "lane", None) is None:
            mine.lane = self.clocks.lane(f"{threading.current_thread().name} outside of any lane", host=True)
        return int(mine.lane), int(mine.host)


class OpRaceWatch(OpWatch):
    """Tells a device what each op of a thread reads and writes. Neither a view nor who asks for a shape touches any."""

    def __init__(self, device: RaceDevice) -> None:
        super().__init__()
        self.device = device

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `OpWatch`. Raises PiperError: an operand's memory was given back."""
        read, written, aliased = _operands(func, args, kwargs)
        if not aliased and any(t.numel() and not t.untyped_storage().nbytes() for t in (*read, *written)):
            # Here it would end the process.
            message = f"{func} on {self.device.place()} touches memory that was given back"
            raise PiperError(ErrorKind.ILLEGAL_PLAN, message, suggestion="free it behind the last op that reads it")
        out = func(*args, **kwargs)
        fresh = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if aliased and not written:
            self.device.seen(read)
            return out
        inputs = {t.untyped_storage()._cdata for t in (*read, *written)}
        made = [x for x in fresh if x.untyped_storage()._cdata not in inputs]
        self.device.touch(str(func), read, [*written, *made], read_back=func in _READS_ON_HOST)
        return out


class _HostReadWatch(TorchFunctionMode):
    """Tells a device where the host takes a tensor's values, which on a GPU waits for the lane: `tolist`, `cpu`, and
    `to("cpu")`, by this word, as the device is a CPU, too. What they give is a copy, as from a GPU.
    """

    def __init__(self, device: RaceDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in (Tensor.tolist, Tensor.cpu) and not (func is Tensor.to and args[1:2] == ("cpu",)):
            return func(*args, **(kwargs or {}))
        own = [args[0]] if func is Tensor.tolist else [args[0].clone()]
        self.device.touch(func.__name__, own, [], read_back=True)
        return func(*own, *args[1:], **(kwargs or {}))


def _operands(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor], bool]:
    """(read, written, whether the result may be a view of an operand), by the op's own signature."""
    read, written, aliased = list[Tensor](), list[Tensor](), False
    for k, argument in enumerate(func._schema.arguments):
        value = args[k] if k < len(args) else kwargs.get(argument.name)
        tensors = [x for x in tree_leaves(value) if isinstance(x, Tensor)]
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            written += tensors
        else:
            read += tensors
        aliased |= alias is not None and not alias.is_write
    return ([] if func.overloadpacket.__name__ in _READS_SHAPES else read), written, aliased


@contextmanager
def _alone(device: RaceDevice) -> Iterator[None]:
    with _disable_current_modes(), OpRaceWatch(device):
        yield
