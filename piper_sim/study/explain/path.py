"""The critical path: what went on, back to back, from the begin of the step that repeats to its end."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ir.plan.plan import OpKind
from piper_sim.study.explain.blame import OpBlame
from piper_sim.study.explain.excess import REMOVED

MUCH = 0.05  # of an op: what names it on the path


@dataclass(frozen=True)
class PathOp:
    """An op on the path, or the host's dispatch of one. Ticks from the step's begin."""

    op: int
    begin: int
    end: int
    cause: str


def critical_path(asked: OpBlame) -> tuple[PathOp, ...]:
    """Without a gap, from tick 0 to the step's period, first op first."""
    return tuple(reversed(list(_backwards(asked))))


def last_node(asked: OpBlame) -> int:
    """What the path ends with: the op that ends last, or its dispatch where hosts set the pace."""
    c = asked.chain
    closing = np.array([q[-1] for q in c.queue]) + c.now if asked.closing < 0 else np.array([asked.closing])
    ends = c.hi[closing]
    node = int(closing[np.argmax(ends)])
    if (
        asked.closing < 0 and len(c.hi) > len(c.start) and int((ends - c.opened).max()) < c.period
    ):  # a host's dispatches set the pace
        node += len(c.start)
    return node


def _backwards(asked: OpBlame) -> Iterator[PathOp]:
    c, before = asked.chain, asked.chain.before
    node = last_node(asked)
    now, zero = int(c.hi[node]), int(c.hi[node]) - c.period
    while now > zero:
        following = int(before[node])
        begin = int(c.lo[node])
        if following < 0 or begin < zero:
            begin = zero
        elif c.hi[following] < begin:  # not kept, or not settled: nothing else is known to have gone on
            begin = max(zero, int(c.hi[following]))
        if begin < now:
            yield PathOp(int(c.main[node % c.ops]), begin - zero, now - zero, _cause(asked, node))
        now, node = begin, following


def _cause(asked: OpBlame, node: int) -> str:
    """What an op on the path is there for: what makes it too long, else what it is."""
    c, e = asked.chain, asked.excess
    if node >= len(c.start):
        return "host"
    op = int(c.main[node % c.ops])
    over = {x: int(e.over[x][op]) for x in REMOVED}
    over["split"] = int(e.even[op] * e.uneven[op])
    over["memory"] = int(asked.own[op] * e.recomputed[op])
    worst = max(over, key=lambda x: over[x])
    if over[worst] > MUCH * max(1, int(asked.own[op])):
        return worst
    kinds = {OpKind.COMPUTE: "compute", OpKind.COLLECTIVE: "collective"}
    return kinds.get(OpKind(int(c.kind[op])), "link")


def words(path: Sequence[tuple[int, str, str, float]]) -> list[str]:
    """A path of (rank, op, cause, seconds) as stretches: ops of one rank and cause that follow each other are one.

    >>> words([(0, "0F0", "compute", 1.0), (0, "0F1", "compute", 1.0), (0, "0SEND_F1", "link", 0.5)])
    ['rank 0 computes 0F0 … 0F1: 2 s', 'link from rank 0 carries 0SEND_F1: 500 ms']
    """
    from piper_sim.report.units import duration

    out, stretch = list[str](), list[tuple[int, str, str, float]]()
    for row in [*path, (-1, "", "", 0.0)]:
        if stretch and (row[0], row[2]) != (stretch[0][0], stretch[0][2]):
            first, last = stretch[0][1], stretch[-1][1]
            ops = first if len(stretch) == 1 else f"{first} … {last}"
            said = _SAID.get(stretch[0][2], "rank {rank} computes {ops}, too long because of {cause}")
            text = said.format(rank=stretch[0][0], ops=ops, cause=stretch[0][2].replace("_", " "))
            out.append(f"{text}: {duration(sum(x[3] for x in stretch))}")
            stretch = []
        stretch.append(row)
    return out


_SAID = {
    "compute": "rank {rank} computes {ops}",
    "link": "link from rank {rank} carries {ops}",
    "collective": "rank {rank} meets others in {ops}",
    "host": "host of rank {rank} dispatches {ops}",
    "straggler": "rank {rank} is slow at {ops}",
    "expert_skew": "rank {rank} has the fullest experts at {ops}",
    "split": "rank {rank} has more layers to do at {ops}",
    "memory": "rank {rank} computes again for lack of memory at {ops}",
}
