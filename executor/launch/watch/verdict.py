"""From what ranks left behind to who failed first, at which op, and who waits for it. The same for any launcher."""

import math
import signal
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from executor.device.progress import RankRecord, RankState
from executor.runtime.target import NO_ROOM
from ir.core.errors import ErrorKind, PiperError

_HEADING = "Traceback (most recent call last):\n"
BEAT_S = 2.0  # a heartbeat older than this is none: they come ten times a second


class RankFailed(PiperError):
    """A run that failed: the rank that caused it, the op it was at, and the op every rank behind it waits at.

    >>> print(RankFailed("killed by SIGKILL", rank=1, op="1F0", waiting={0: "0B0"}))
    rank 1 failed at 1F0: killed by SIGKILL; rank 0 waits at 0B0
    """

    def __init__(
        self, reason: str, *, rank: int, op: str | None, waiting: Mapping[int, str], details: str = ""
    ) -> None:
        self.reason, self.rank, self.op, self.waiting = reason, rank, op, dict(waiting)
        at = f" at {op}" if op else " before its first op"
        behind = "".join(f"; rank {r} waits at {o}" for r, o in sorted(waiting.items()))
        super().__init__(ErrorKind.RANK_FAILED, f"rank {rank} failed{at}: {reason}{behind}")
        if details:
            self.details = details
            self.add_note(details)  # seen where nobody reports it but Python

    def __reduce__(self) -> tuple[object, ...]:
        again = partial(RankFailed, rank=self.rank, op=self.op, waiting=self.waiting, details=self.details)
        return again, (self.reason,)


@dataclass(frozen=True)
class RankFindings:
    """What is known when a run has failed.

    said: rank → what it wrote when it failed. codes: rank → exit code of those that ended, in the order they did.
    now_s: on the clock of the records. logs: rank → the end of what it printed.
    """

    records: list[RankRecord]
    said: Mapping[int, Mapping[str, Any]]
    codes: Mapping[int, int]
    now_s: float
    logs: Mapping[int, str] = field(default_factory=dict)


def stuck(
    live: Iterable[RankRecord], now_s: float, began_s: float, watchdog_s: float, startup_s: float
) -> tuple[int, float] | None:
    """The rank that has hung, if any, and since how many seconds: not the ones that wait for it."""
    watched = [r for r in live if r.state is not RankState.DONE]
    idle = {r.rank: now_s - max(r.changed_s, began_s) for r in watched}
    limits = {RankState.STARTING: startup_s, RankState.OUTSIDE: math.inf}
    late = [r for r in watched if idle[r.rank] >= limits.get(r.state, watchdog_s)]
    late += [r for r in watched if r.state is RankState.OUTSIDE and now_s - max(r.beat_s, began_s) >= startup_s]
    frozen = [r for r in late if now_s - max(r.beat_s, began_s) > min(watchdog_s, 5.0)]
    working = [r for r in late if r.state is not RankState.WAIT]
    if found := frozen or working:
        first = min(found, key=lambda r: r.changed_s)
        return first.rank, idle[first.rank]
    if late and len(late) == len(watched):
        # All wait. One may wait for what it has not given to its transport; else the one that has waited longest is as
        # near to the cause as can be told.
        first = min(late, key=lambda r: (not r.posting, r.changed_s))
        return first.rank, idle[first.rank]
    return None


def verdict(f: RankFindings) -> RankFailed:
    """Who was first: a rank dead without a word, else the earliest to fail on its own, else whom witnesses name."""
    fallen = [r for r, code in f.codes.items() if code]
    if silent := [r for r in fallen if r not in f.said]:
        # Ranks of one process die together: one that was at work is likelier to be the cause than one that waited.
        first = min(silent, key=lambda r: f.records[r].state is RankState.WAIT)
        return failed(f, first, _exit_reason(f.codes[first]))
    if own := [r for r, s in f.said.items() if not s["witness"]]:
        rank = min(own, key=lambda r: float(f.said[r]["time_s"]))
        said = f.said[rank]
        type_ = "" if said["kind"] else f"{said['type']}: "
        return failed(f, rank, f"{type_}{said['message']}", said["traceback"])
    witness = min(f.said, key=lambda r: float(f.said[r]["time_s"]))
    said = f.said[witness]
    if accused := [p for p in said["peers"] if p not in f.said]:
        return failed(f, accused[0], f"rank {witness} lost it: {said['message']}")
    return failed(f, witness, said["message"], said["traceback"])


def _exit_reason(code: int) -> str:
    if code == NO_ROOM:
        return f"no room is left in {tempfile.gettempdir()}, nor to say more: free space, or name another in TMPDIR"
    if code == -signal.SIGBUS:
        return "killed by SIGBUS: a file that it reads as memory, of data or weights, was cut short"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def failed(f: RankFindings, rank: int, reason: str, details: str = "") -> RankFailed:
    """The report. Who waits is who is blocked, or was when its peer went; a rank that shows no life does not wait."""
    waiting = {}
    for r in f.records:
        blocked = r.state is RankState.WAIT and f.now_s - r.beat_s < BEAT_S
        if r.rank != rank and r.op and ((r.rank in f.said and f.said[r.rank]["witness"]) or blocked):
            waiting[r.rank] = r.op
    mine, words = f.records[rank], (details or f.logs.get(rank, "")).replace(_HEADING, "").rstrip()
    details = words and f"rank {rank} left:\n{words}"
    return RankFailed(reason, rank=rank, op=mine.posting or mine.op or None, waiting=waiting, details=details)
