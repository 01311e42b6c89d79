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
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from executor.device.device import DeviceCopy, Lane
from executor.device.host_syncs import LIFTED, DeviceSyncCensus, copies, shaped_by_values
from executor.device.memory import OpWatch, resolve_operators, tensors_of
from executor.device.race_clocks import Clock, DeviceRace, DeviceRaceClocks, Span
from executor.device.race_watch import HOST, operands, to_host
from ir.core.errors import ErrorKind, PiperError


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
        self.device.syncs.note("a mark")
        self.device.known(self.clock)

    def seconds(self) -> float:
        return self.at_s

    def behind(self, other: DeviceRaceMark) -> bool:
        """Whether it stands behind another, so that whatever is here has seen what is there."""
        return self.clock.get(other.lane, 0) >= other.clock[other.lane]


class RaceDevice:
    """The device. All ranks of a process share one. deaf: it forgets what it is told to follow, as a control."""

    torch = torch.device("cpu", 0)  # the host's is "cpu": who moves a tensor there reads it
    ahead, host_threads = True, 1

    def __init__(self, clocks: DeviceRaceClocks | None = None, *, deaf: bool = False) -> None:
        self.deaf, self.clocks = deaf, clocks or DeviceRaceClocks()
        self.syncs, self.lock = DeviceSyncCensus(), threading.RLock()
        self._mine = threading.local()
        self._keys: dict[int, tuple[int, int, weakref.ref[Any]]] = {}  # of a storage: its block, its bytes
        self._lifted: set[int] = set()  # blocks that are the host's
        self._freed: deque[tuple[int, int]] = deque()  # block, who let it go
        self._taken = self._hosts = 0
        resolve_operators()  # the threads of its streams are watched, too

    @property
    def races(self) -> list[DeviceRace]:
        return self.clocks.races

    # -- as a device --------------------------------------------------------------------------------------------------

    def bind(self) -> None:
        """This thread's ops are watched from now on, whatever other modes come and go above."""
        if not getattr(self._mine, "watched", False):
            self._mine.watched = True
            OpRaceWatch(self).__enter__()
            DeviceReadWatch(self).__enter__()  # type: ignore[no-untyped-call]

    def at(self, op: str) -> None:
        """See `Device.at`."""
        self.syncs.begin(op)

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

    def fetch(self, tensors: Sequence[Tensor]) -> DeviceCopy:
        """See `Device.fetch`."""
        found = [t.clone() for t in tensors]
        self.lifted(found)
        return DeviceCopy(self.mark(), tuple(found))

    def known(self, clock: Clock) -> None:
        """The host of this thread has waited for all that."""
        if not self.deaf:
            with self.lock:
                self._bury()
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

    def lifted(self, tensors: list[Tensor]) -> None:
        """They are the host's."""
        with self.lock:
            for tensor in tensors:
                if (block := self._block(tensor, self._here()[0])) is not None:
                    self._lifted.add(block)

    def of_host(self, tensor: Tensor, *, taken: bool = False) -> bool:
        """Whether it lies in the host's memory. taken: the device has it from now on."""
        with self.lock:
            block = self._block(tensor, self._here()[0])
            found = block in self._lifted
            if block is not None and taken:
                self._lifted.discard(block)
            return found

    @property
    def in_lane(self) -> bool:
        """Whether what is launched now runs on a lane, and is not the host's own."""
        return self._here()[0] != getattr(self._mine, "outside", None)

    def _spans(self, tensors: list[Tensor], lane: int, *, written: bool) -> Iterator[Span]:
        for tensor in tensors:
            block = self._block(tensor, lane)
            if block is not None and tensor.numel():
                width = tensor.element_size()
                low = int(tensor.storage_offset()) * width
                last = tensor.numel() - 1
                if not tensor.is_contiguous():
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
            self._freed.append((known[0], getattr(self._mine, "host", 0)))

    def _bury(self) -> None:
        while self._freed:
            block, host = self._freed.popleft()
            self._lifted.discard(block)
            self.clocks.free(block, host)

    def _here(self) -> tuple[int, int]:
        """The active lane, and this thread, by numbers."""
        mine = self._mine
        if not hasattr(mine, "host"):
            self._hosts += 1
            mine.host = self._hosts
        if getattr(mine, "lane", None) is None:
            name = f"{threading.current_thread().name} outside of any lane"
            mine.lane = mine.outside = self.clocks.lane(name, host=True)
        return int(mine.lane), int(mine.host)


@contextmanager
def _alone(device: RaceDevice) -> Iterator[None]:
    with _disable_current_modes(), OpRaceWatch(device):
        yield


class OpRaceWatch(OpWatch):
    """Tells a device what each op of a thread reads and writes. Neither a view nor who asks for a shape touches any."""

    def __init__(self, device: RaceDevice) -> None:
        super().__init__()
        self.device = device

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `OpWatch`. Raises PiperError: an operand's memory was given back."""
        read, written, aliased = operands(func, args, kwargs)
        if not aliased and any(t.numel() and not t.untyped_storage().nbytes() for t in (*read, *written)):
            # Here it would end the process.
            message = f"{func} on {self.device.place()} touches memory that was given back"
            raise PiperError(ErrorKind.ILLEGAL_PLAN, message, suggestion="free it behind the last op that reads it")
        out = func(*args, **kwargs)
        fresh = tensors_of(out)
        if aliased and not written:
            (self.device.lifted if func is LIFTED else self.device.seen)(read)
            return out
        waits = self._waits(func, args, kwargs, read)
        inputs = {t.untyped_storage()._cdata for t in (*read, *written)}
        made = [x for x in fresh if x.untyped_storage()._cdata not in inputs]
        self.device.touch(str(func), read, [*written, *made], read_back=waits)
        return out

    def _waits(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], read: list[Tensor]) -> bool:
        """Whether the host would wait for a GPU here, which is noted."""
        device, (copy, behind) = self.device, copies(func, args, kwargs)
        ours = [t for t in read if device.of_host(t)]
        if shaped_by_values(func, args, kwargs):
            waits = len(ours) < len(read)
        else:  # what is given to an op as it is was copied where it was made
            waits = bool(ours) and device.in_lane and not behind
            for t in ours if waits and not copy else ():
                device.of_host(t, taken=True)
        if waits:
            device.syncs.note(str(func))
        return waits


class DeviceReadWatch(TorchFunctionMode):
    """Tells a device where the host takes a tensor's values unseen by torch's dispatcher, for which on a GPU it waits:
    `tolist`, `numpy`, `cpu`, and `to` the host. The last two give copies; one that is not waited for is no wait.

    The device is a CPU, too, so a tensor's is told by its index, which the host's has not.
    """

    def __init__(self, device: RaceDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, copied, behind = kwargs or {}, func is Tensor.cpu, False
        if func == Tensor.device.__get__:
            found = func(*args)
            return self.device.torch if found == HOST and not self.device.of_host(args[0]) else found
        if func is Tensor.to:
            copied, behind = to_host(*args[1:], **kwargs)
            args = tuple(HOST if x == self.device.torch else x for x in args)
            kwargs = {k: HOST if x == self.device.torch else x for k, x in kwargs.items()}
        if not (copied or func in (Tensor.tolist, Tensor.numpy)) or self.device.of_host(args[0]):
            return func(*args, **kwargs)
        out, what = func(*args, **kwargs), f"Tensor.{func.__name__}"
        if copied and out.untyped_storage()._cdata == args[0].untyped_storage()._cdata:
            out = out.clone()
        if not behind:
            self.device.syncs.note(what)
        self.device.touch(what, [out if copied else args[0]], [], read_back=not behind)
        if copied:
            self.device.lifted([out])
        return out
