"""A CPU that keeps a GPU's promises and no more: lanes are ordered by marks alone, freed memory goes back to its lane.

Arithmetic is real and done at once. What stands behind what is followed by vector clocks, one per lane, and every op is
asked of each storage it reads, writes or takes: was the last write before it, were all reads before this write, did
the lane that a freed block returns to know of every access? (The caching allocator gives it to that lane's next tensor
at once, and asks nobody.) Two accesses clash where their bytes overlap. What is made outside of any lane is the host's,
a microbatch as the loader has it: its memory is not the caching allocator's, and copies from it are done when the call
returns.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from executor.device.device import DeviceCopy, Lane
from executor.device.host_syncs import DeviceSyncCensus, tell_reads
from executor.device.race_watch import OpRaceWatch

Clock = dict[int, int]  # lane → how many of its ops had happened
MOST = 100  # races that are kept


@dataclass(frozen=True)
class DeviceRace:
    """Two accesses of the same bytes that nothing orders.

    first, second: what they are (`write by aten.mm.default on rank-0 compute`).
    bytes: of the storage.
    """

    first: str
    second: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.second}, not behind the {self.first} ({self.bytes} bytes)"


@dataclass
class _Access:
    """low, high: bytes. tick: of the lane. what: for people. over: the host has waited for it."""

    low: int
    high: int
    lane: int
    tick: int
    what: str
    over: bool = False


@dataclass
class _Block:
    """A storage: bytes, the lane it was taken on, its writes that nothing has covered, the reads since.

    host: it is memory of the host's, which no device reads by itself.
    """

    size: int
    lane: int
    alive: weakref.ref[Any]
    host: bool = False
    writes: list[_Access] = field(default_factory=list)
    reads: list[_Access] = field(default_factory=list)


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

    torch = torch.device("cpu")
    ahead = True

    def __init__(self, *, deaf: bool = False) -> None:
        self.deaf = deaf
        self.clocks: list[Clock] = []
        self.names: list[str] = []
        self.races: list[DeviceRace] = []
        self.syncs = DeviceSyncCensus()
        self.lock = threading.RLock()
        self._mine = threading.local()
        self._host_lanes: set[int] = set()
        self._blocks: dict[int, _Block] = {}
        self._freed: deque[_Block] = deque()

    # -- as a device --------------------------------------------------------------------------------------------------

    def bind(self) -> None:
        """This thread's ops are watched from now on, whatever other modes come and go above."""
        if not getattr(self._mine, "watched", False):
            self._mine.watched = True
            tell_reads(self._read)
            OpRaceWatch(self).__enter__()  # type: ignore[no-untyped-call]

    def at(self, op: str) -> None:
        """See `Device.at`."""
        self.syncs.begin(op)

    def lane(self, name: str) -> Lane:
        """A new queue; what runs in it without a mark of another lane is ordered by itself alone."""
        with self.lock:
            me = len(self.clocks)
            self.clocks.append({})
            self.names.append(f"{threading.current_thread().name} {name}")

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
            me, clock = self._tick()
            return DeviceRaceMark(self, me, dict(clock))

    def follow(self, mark: Any) -> None:
        if not self.deaf:
            with self.lock:
                _join(self.clocks[self._current()], mark.clock)

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
            _join(self._mine.__dict__.setdefault("host", {}), clock)

    # -- accesses -----------------------------------------------------------------------------------------------------

    def touch(self, what: str, read: list[Tensor], written: list[Tensor], *, host: bool = False) -> None:
        """An op of the active lane. host: it waits for the result."""
        with self.lock:
            me, clock = self._tick()
            tick, name = clock[me], f"{what} on {self.names[me]}"
            for tensor in written:
                if (span := self._span(tensor, me)) is not None:
                    block, low, high = span
                    access = _Access(low, high, me, tick, f"write by {name}")
                    self._ask(block, access, clock, [*block.writes, *block.reads])
                    block.reads = [a for a in block.reads if not low <= a.low < a.high <= high]
                    block.writes = [a for a in block.writes if not low <= a.low < a.high <= high] + [access]
            for tensor in read:
                if (span := self._span(tensor, me)) is not None:
                    block, low, high = span
                    access = _Access(low, high, me, tick, f"read by {name}", host)
                    self._ask(block, access, clock, block.writes)
                    old = [a for a in block.reads if (a.lane, a.low, a.high) != (me, low, high)]
                    block.reads = [*old, access]
            self._bury()
        if host:
            self.known(dict(clock))

    def seen(self, tensors: list[Tensor]) -> None:
        """Views were taken of them: that touches nothing, but shows a storage that was resized."""
        with self.lock:
            for tensor in tensors:
                self._block(tensor, self._current())
            self._bury()

    def lifted(self, tensors: list[Tensor]) -> None:
        """They are the host's."""
        with self.lock:
            for tensor in tensors:
                if (block := self._block(tensor, self._current())) is not None:
                    block.host = True

    def of_host(self, tensor: Tensor, *, taken: bool = False) -> bool:
        """Whether it lies in the host's memory. taken: the device has it from now on."""
        with self.lock:
            block = self._block(tensor, self._current())
            found = block is not None and block.host
            if block is not None and taken:
                block.host = False
            return found

    @property
    def in_lane(self) -> bool:
        """Whether what is launched now runs on a lane, and is not the host's own."""
        return self._current() not in self._host_lanes

    def _read(self, what: str, tensor: Tensor) -> None:
        """The host reads, unseen by torch's dispatcher."""
        if not self.of_host(tensor):
            self.syncs.note(what)
            self.touch(what, [tensor], [], host=True)

    def _ask(self, block: _Block, new: _Access, clock: Clock, others: list[_Access]) -> None:
        for a in others:
            if a.low < new.high and new.low < a.high and clock.get(a.lane, 0) < a.tick:
                self._found(a.what, new.what, block.size)

    def _found(self, first: str, second: str, size: int) -> None:
        if len(self.races) < MOST and (race := DeviceRace(first, second, size)) not in self.races:
            self.races.append(race)

    def _block(self, tensor: Tensor, lane: int) -> _Block | None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        block = self._blocks.get(key)
        if block is not None and block.size != size:  # resized in place: given back, and taken anew
            self._freed.append(self._blocks.pop(key))
            block = None
        if block is None and size:
            block = self._blocks[key] = _Block(size, lane, weakref.ref(storage, lambda _: self._gone(key)))
        return block

    def _span(self, tensor: Tensor, lane: int) -> tuple[_Block, int, int] | None:
        """The storage, and the bytes of it that a tensor spans."""
        block = self._block(tensor, lane)
        if block is None or not tensor.numel():
            return None
        width = tensor.element_size()
        low = int(tensor.storage_offset()) * width
        last = sum((int(n) - 1) * int(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        return block, low, low + (last + 1) * width

    def _gone(self, key: int) -> None:
        """Called wherever the last reference goes; judged with the next op."""
        block = self._blocks.pop(key, None)
        if block is not None:
            self._freed.append(block)

    def _bury(self) -> None:
        while self._freed:
            block = self._freed.popleft()
            clock = self.clocks[block.lane]
            if block.lane in self._host_lanes:
                continue
            for a in [*block.writes, *block.reads]:
                if not a.over and clock.get(a.lane, 0) < a.tick:
                    self._found(a.what, f"free, to {self.names[block.lane]}", block.size)

    def _tick(self) -> tuple[int, Clock]:
        me = self._current()
        clock = self.clocks[me]
        _join(clock, self._mine.__dict__.get("host", {}))
        clock[me] = clock.get(me, 0) + 1
        return me, clock

    def _current(self) -> int:
        if getattr(self._mine, "lane", None) is None:
            self.lane("outside of any lane")
            self._mine.lane = len(self.clocks) - 1
            self._host_lanes.add(self._mine.lane)
        return int(self._mine.lane)


@contextmanager
def _alone(device: RaceDevice) -> Iterator[None]:
    with _disable_current_modes(), OpRaceWatch(device):
        yield


def _join(clock: Clock, other: Clock) -> None:
    for lane, tick in other.items():
        if clock.get(lane, 0) < tick:
            clock[lane] = tick
