"""What stands behind what, by vector clocks, one per lane; and who touches bytes that nothing keeps from another.

Every op is asked of each storage it reads, writes or takes: was the last write before it, were all reads before this
write, did the lane that a freed block returns to know of every access? (The caching allocator gives it to that lane's
next tensor at once, and asks nobody.) So a block's first use on another lane must be behind all that the lane it was
taken on knew. Two accesses clash where their bytes overlap.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

Clock = dict[int, int]  # lane → how many of its ops had happened
Span = tuple[int, int, int, bool]  # key of a block, first byte and the one behind the last, whether it is written
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
    """low, high: bytes. tick: of the lane. what: for people."""

    low: int
    high: int
    lane: int
    tick: int
    what: str


@dataclass
class _Block:
    """A storage: bytes, the lane it was taken on, its writes that nothing has covered, the reads since.

    taken: what that lane knew then, None of the host's own memory. users: lanes that are behind it.
    """

    size: int
    lane: int
    taken: Clock | None
    users: set[int] = field(default_factory=set)
    writes: list[_Access] = field(default_factory=list)
    reads: list[_Access] = field(default_factory=list)


class DeviceRaceClocks:
    """Lanes, hosts (threads that launch) and blocks, by number. Nothing here is a tensor: it can be played back."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.races: list[DeviceRace] = []
        self._clocks: list[Clock] = []
        self._hosts: dict[int, Clock] = {}
        self._news: dict[int, int] = {}  # of a host: how often it has learnt something
        self._told: dict[tuple[int, int], int] = {}  # lane, host: of how much of that the lane is behind
        self._unmanaged: set[int] = set()
        self._blocks: dict[int, _Block] = {}

    def lane(self, name: str, *, host: bool = False) -> int:
        """A new queue. host: of what is made outside of any, whose memory is not the caching allocator's."""
        self._clocks.append({})
        self.names.append(name)
        if host:
            self._unmanaged.add(len(self.names) - 1)
        return len(self.names) - 1

    def mark(self, lane: int, host: int) -> Clock:
        """This point of a lane, as a host tells it."""
        return dict(self._launch(lane, host))

    def follow(self, lane: int, clock: Clock) -> None:
        """The lane goes on behind all that."""
        _join(self._clocks[lane], clock)

    def known(self, host: int, clock: Clock) -> None:
        """Whatever this host launches from now on is behind all that, on any lane."""
        self._news[host] = self._news.get(host, 0) + 1
        _join(self._hosts.setdefault(host, {}), clock)

    def take(self, key: int, size: int, lane: int) -> None:
        """A block of memory."""
        self._blocks[key] = _Block(size, lane, None if lane in self._unmanaged else dict(self._clocks[lane]), {lane})

    def free(self, key: int, host: int) -> None:
        """A host lets its lane have it again: what is launched there from now on is behind all that this host knows."""
        block = self._blocks.pop(key)
        if block.taken is not None:
            lane, own = self._clocks[block.lane], self._hosts.get(host, {})
            unknown = [a for a in (*block.writes, *block.reads) if own.get(a.lane, 0) < a.tick]
            self._ask(block, f"free, to {self.names[block.lane]}", lane, unknown)

    def touch(self, lane: int, host: int, what: str, spans: Iterable[Span], *, read_back: bool = False) -> None:
        """An op of a lane. read_back: its host waits for the result."""
        clock = self._launch(lane, host)
        tick, name = clock[lane], f"{what} on {self.names[lane]}"
        for key, low, high, written in spans:
            block = self._blocks[key]
            access = _Access(low, high, lane, tick, f"{'write' if written else 'read'} by {name}")
            if lane not in block.users and block.taken is not None:
                block.users.add(lane)
                if any(clock.get(other, 0) < past for other, past in block.taken.items()):
                    self._found(f"use of its memory on {self.names[block.lane]}", access.what, block)
            others = [*block.writes, *block.reads] if written else block.writes
            self._ask(block, access.what, clock, [a for a in others if a.low < high and low < a.high])
            if written:
                block.reads = [a for a in block.reads if not low <= a.low < a.high <= high]
                block.writes = [a for a in block.writes if not low <= a.low < a.high <= high] + [access]
            else:
                old = [a for a in block.reads if (a.lane, a.low, a.high) != (lane, low, high)]
                block.reads = [*old, access]
        if read_back:
            DeviceRaceClocks.known(self, host, clock)

    def _ask(self, block: _Block, what: str, clock: Clock, others: Iterable[_Access]) -> None:
        for a in others:
            if clock.get(a.lane, 0) < a.tick:
                self._found(a.what, what, block)

    def _found(self, first: str, second: str, block: _Block) -> None:
        if len(self.races) < MOST and (race := DeviceRace(first, second, block.size)) not in self.races:
            self.races.append(race)

    def _launch(self, lane: int, host: int) -> Clock:
        clock = self._clocks[lane]
        if (news := self._news.get(host, 0)) != self._told.get((lane, host), 0):
            self._told[lane, host] = news
            _join(clock, self._hosts[host])
        clock[lane] = clock.get(lane, 0) + 1
        return clock


def _join(clock: Clock, other: Clock) -> None:
    for lane, tick in other.items():
        if clock.get(lane, 0) < tick:
            clock[lane] = tick
