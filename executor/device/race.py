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
from torch.utils._python_dispatch import _disable_current_modes

from executor.device.device import DeviceCopy, Lane
from executor.device.host_syncs import DeviceSyncCensus
from executor.device.memory import resolve_operators
from executor.device.race_clocks import Clock, DeviceRace, DeviceRaceClocks, Span
from executor.device.race_watch import DeviceReadWatch, OpRaceWatch


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
