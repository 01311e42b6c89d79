"""What a run on the racing device told its clocks, written down, to be played again with one ordering left out."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from executor.device.race_clocks import Clock, DeviceRaceClocks, Span


@dataclass
class RaceNotes(DeviceRaceClocks):
    """Clocks that write down what they are told; a clock that is handed back, by the number of the note that gave it.

    why: who asked for an ordering, by the number of its note: a follow, a host's wait, a read by the host.
    """

    calls: list[tuple[str, tuple[Any, ...], bool]] = field(default_factory=list)
    why: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self._given: dict[int, tuple[int, Clock]] = {}

    def some(self, count: int) -> list[int]:
        """So many orderings, evenly over the run."""
        found = sorted(self.why)
        return found[:: max(1, len(found) // count)]

    def lane(self, name: str, *, host: bool = False) -> int:
        self.calls.append(("lane", (name,), host))
        return super().lane(name, host=host)

    def mark(self, lane: int, host: int) -> Clock:
        clock = super().mark(lane, host)
        self._given[id(clock)] = len(self.calls), clock
        self.calls.append(("mark", (lane, host), False))
        return clock

    def follow(self, lane: int, clock: Clock) -> None:
        self._order("follow", lane, clock, self._kind(lane))
        super().follow(lane, clock)

    def known(self, host: int, clock: Clock) -> None:
        self._order("known", host, clock, "host")
        super().known(host, clock)

    def take(self, key: int, size: int, lane: int) -> None:
        self.calls.append(("take", (key, size, lane), False))
        super().take(key, size, lane)

    def free(self, key: int, host: int) -> None:
        self.calls.append(("free", (key, host), False))
        super().free(key, host)

    def touch(self, lane: int, host: int, what: str, spans: Iterable[Span], *, read_back: bool = False) -> None:
        spans = tuple(spans)
        if read_back:
            self.why[len(self.calls)] = f"{_asker()}: {self._kind(lane)}, host"
        self.calls.append(("touch", (lane, host, what, spans), read_back))
        super().touch(lane, host, what, spans, read_back=read_back)

    def _order(self, call: str, who: int, clock: Clock, behind: str) -> None:
        given, _ = self._given[id(clock)]
        self.why[len(self.calls)] = f"{_asker()}: {self._kind(self.calls[given][1][0])}, {behind}"
        self.calls.append((call, (who, given), False))

    def _kind(self, lane: int) -> str:
        return self.names[lane].partition(" ")[2]


def _asker() -> str:
    """Which function ordered something, and for whom: the first outside of transports."""
    found, frame = list[str](), sys._getframe(1)
    for never in (("device/race", "contextlib", "/torch/"), ("/transport/", "parallel/inline")):
        while frame.f_back is not None and any(part in frame.f_code.co_filename for part in never):
            frame = frame.f_back
        found.append(frame.f_code.co_qualname)
    return " for ".join(dict.fromkeys(found))


class AllPairs:
    """The same told otherwise, as an oracle: of each op the set of all ops before it, as bits, and nothing forgotten.

    races: whether two accesses of the same bytes, of which one writes, are in no order, or an access and what may have
    had its memory. before: of each op.
    """

    def __init__(self) -> None:
        self.races, self.before = False, list[int]()
        self._lanes: list[int] = []
        self._kept: list[bool] = []  # by lane, whether its memory goes back to it
        self._hosts: dict[int, int] = {}
        self._blocks: dict[int, tuple[int, int, dict[tuple[int, int], list[int]]]] = {}

    def lane(self, name: str, *, host: bool = False) -> None:
        self._lanes.append(0)
        self._kept.append(not host)

    def mark(self, lane: int, host: int) -> int:
        self._lanes[lane] |= self._hosts.get(host, 0)
        return self._lanes[lane]

    def follow(self, lane: int, ops: int) -> None:
        self._lanes[lane] |= ops

    def known(self, host: int, ops: int) -> None:
        self._hosts[host] = self._hosts.get(host, 0) | ops

    def take(self, key: int, size: int, lane: int) -> None:
        self._blocks[key] = lane, self._lanes[lane] if self._kept[lane] else 0, {}

    def free(self, key: int, host: int) -> None:
        lane, _, spans = self._blocks.pop(key)
        if self._kept[lane]:
            known = self._lanes[lane] | self._hosts.get(host, 0)
            self.races |= any((reads | writes) & ~known for reads, writes in spans.values())

    def touch(self, lane: int, host: int, what: str, spans: Iterable[Span], *, read_back: bool = False) -> None:
        before = self.mark(lane, host)
        op = 1 << len(self.before)
        for key, low, high, written in spans:
            home, taken, held = self._blocks[key]
            self.races |= bool(home != lane and taken & ~before & ~op)
            for (a, b), (reads, writes) in held.items():
                if a < high and low < b:
                    self.races |= bool((writes | (reads if written else 0)) & ~before & ~op)
            held.setdefault((low, high), [0, 0])[written] |= op
        self.before.append(before)
        self._lanes[lane] = before | op
        if read_back:
            self.known(host, self._lanes[lane])


def played(notes: RaceNotes, on: Any, left_out: int = -1) -> Any:
    """The notes told to other clocks, without one ordering, until the first race."""
    given: dict[int, Any] = {}
    for k, (call, args, flag) in enumerate(notes.calls):
        match call:
            case "lane":
                on.lane(*args, host=flag)
            case "mark":
                given[k] = on.mark(*args)
            case "touch":
                on.touch(*args, read_back=flag and k != left_out)
            case "follow" | "known" if k == left_out:
                continue
            case "follow" | "known":
                getattr(on, call)(args[0], given[args[1]])
            case _:
                getattr(on, call)(*args)
        if on.races:
            break
    return on


@dataclass
class Deletions:
    """Orderings left out one by one. found: the detector sees it. needed: without it two accesses that clash are in no
    order, by the oracle. kept: none do, but some op is no longer behind another; what is left others imply.
    """

    asked: int = 0
    found: set[int] = field(default_factory=set)
    needed: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)

    @classmethod
    def of(
        cls, notes: RaceNotes, which: Iterable[int], detector: type[DeviceRaceClocks] = DeviceRaceClocks
    ) -> "Deletions":
        whole, out = played(notes, AllPairs()), cls()
        assert not whole.races
        for k in which:
            out.asked += 1
            if played(notes, detector(), k).races:
                out.found.add(k)
            less = played(notes, AllPairs(), k)
            if less.races:
                out.needed.add(k)
            elif less.before != whole.before:
                out.kept.add(k)
        return out

    def __str__(self) -> str:
        numbers = len(self.found), len(self.needed), len(self.kept), self.asked
        return "found {} of {} needed; {} order what never clashes; {} left out".format(*numbers)
