"""For whom the others wait: blocked time of a trace, followed from rank to rank until somebody is at work."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ir.plan import OpKind, Plan
from ir.trace import Trace

MOST_ROWS = 20_000
NOBODY = -1
Span = tuple[float, float, int]  # from, to, whom it waits for (itself: it works)


@dataclass(frozen=True)
class Slowest:
    """waited_s: seconds of a step that each other rank waited for it, on average; by_rank: the same of every rank."""

    rank: int
    waited_s: float
    by_rank: tuple[float, ...]


def slowest(plan: Plan, trace: Trace) -> Slowest | None:
    """The rank that the others waited for most, over the last steps of a run; None where nobody waited.

    A rank that waits for one that waits itself waits for whoever the chain ends at.
    """
    steps = sorted(set(trace.step.tolist()))[-max(1, MOST_ROWS // max(1, len(plan))) :]
    spans: list[list[Span]] = [[] for _ in range(plan.programs)]
    for step in steps:
        for rank, found in enumerate(_spans(plan, trace, step)):
            spans[rank] += found
    waited = _blame(spans)
    worst = max(range(len(waited)), key=lambda r: waited[r])
    if waited[worst] <= 0:
        return None
    others = (plan.programs - 1) * len(steps)
    by_rank = tuple(w / others for w in waited)
    return Slowest(worst, by_rank[worst], by_rank)


def _spans(plan: Plan, trace: Trace, step: int) -> list[list[Span]]:
    """What each rank's compute stream did in one step, in order of time."""
    row = {key: i for i, key in enumerate(zip(plan.program.tolist(), plan.texts, strict=True))}
    at = np.flatnonzero(trace.step == step)
    start, end, post = np.zeros(len(plan)), np.zeros(len(plan)), np.zeros(len(plan))
    for k in at.tolist():
        i = row[int(trace.rank[k]), trace.op[k]]
        start[i], end[i], post[i] = trace.start_s[k], trace.end_s[k], trace.post_s[k]
    members: dict[int, list[int]] = {}
    for i in np.flatnonzero(plan.collective >= 0).tolist():
        members.setdefault(int(plan.collective[i]), []).append(i)
    out: list[list[Span]] = []
    for rank in range(plan.programs):
        spans: list[Span] = []
        for i in range(int(plan.bounds[rank]), int(plan.bounds[rank + 1])):
            if plan.kind[i] != OpKind.COMPUTE:
                continue
            comm = [w for w in plan.waits.row(i).tolist() if plan.kind[w] != OpKind.COMPUTE]
            if comm and start[i] > post[i]:
                last = max(comm, key=lambda w: end[w])
                spans.append((float(post[i]), float(start[i]), _other(plan, last, members, start)))
            spans.append((float(start[i]), float(end[i]), rank))
        out.append(spans)
    return out


def _other(plan: Plan, op: int, members: dict[int, list[int]], start: np.ndarray) -> int:
    """The rank at the other end of a communication op: of a collective, the last to come."""
    if plan.partner[op] >= 0:
        return int(plan.program[plan.partner[op]])
    last = max(members[int(plan.collective[op])], key=lambda m: start[m])
    return int(plan.program[last])


def _blame(spans: list[list[Span]]) -> list[float]:
    """Seconds that others waited for each rank.

    >>> _blame([[(0.0, 4.0, 0)], [(0.0, 1.0, 1), (1.0, 4.0, 0)], [(1.0, 3.0, 1)]])
    [5.0, 0.0, 0.0]
    """
    moments = sorted({t for rank in spans for a, b, _ in rank for t in (a, b)})
    at, doing = [0] * len(spans), [NOBODY] * len(spans)
    waited = [0.0] * len(spans)
    for now, then in pairwise(moments):
        for r, rank in enumerate(spans):
            while at[r] < len(rank) and rank[at[r]][1] <= now:
                at[r] += 1
            active = at[r] < len(rank) and rank[at[r]][0] <= now
            doing[r] = rank[at[r]][2] if active else NOBODY
        for r, whom in enumerate(doing):
            if whom in (NOBODY, r):
                continue
            for _ in spans:
                if doing[whom] in (NOBODY, whom):
                    break
                whom = doing[whom]
            if doing[whom] == whom:
                waited[whom] += then - now
    return waited
