"""For whom the others wait: blocked time of a trace, followed from rank to rank until somebody is at work."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from executor.parallel.collective import Collective
from ir.plan.places import RankPlacement
from ir.plan.plan import OpKind, Plan
from ir.trace.trace import Trace

MOST_ROWS = 20_000
NOBODY = -1
Span = tuple[float, float, int]  # from, to, whom it waits for (itself: it works)


@dataclass(frozen=True)
class SlowestRank:
    """The rank that the others waited for most."""

    rank: int
    waited_s: float  # seconds of a step that each other rank waited for it, on average


def slowest(plan: Plan, trace: Trace) -> SlowestRank | None:
    """The rank that the others waited for most, over the last steps of a run; None where nobody waited.

    A rank that waits for one that waits itself waits for whoever the chain ends at.
    """
    places = RankPlacement.of(plan)
    rows = len(plan) * places.ranks // plan.programs
    steps = sorted(set(trace.step.tolist()))[-max(1, MOST_ROWS // max(1, rows)) :]
    spans: list[list[Span]] = [[] for _ in range(places.ranks)]
    for step in steps:
        table = _Step(plan, places, trace, step)
        for rank in range(places.ranks):
            spans[rank] += table.spans(rank)
    waited = _blame(spans)
    worst = max(range(len(waited)), key=lambda r: waited[r])
    if waited[worst] <= 0:
        return None
    return SlowestRank(worst, waited[worst] / ((places.ranks - 1) * len(steps)))


class _Step:
    """One step of a trace as a table: [position, op] when it was posted, started and ended."""

    def __init__(self, plan: Plan, places: RankPlacement, trace: Trace, step: int) -> None:
        self.plan, self.places = plan, places
        row = {key: i for i, key in enumerate(zip(plan.program.tolist(), plan.texts, strict=True))}
        at = np.flatnonzero(trace.step == step)
        ranks = [int(r) for r in trace.rank[at]]
        ops = [row[places.program(r), trace.op[k]] for r, k in zip(ranks, at.tolist(), strict=True)]
        where = [places.position(r) for r in ranks], ops
        self.post, self.start, self.end = (np.zeros((len(places.table[0]), len(plan))) for _ in range(3))
        self.post[where], self.start[where], self.end[where] = trace.post_s[at], trace.start_s[at], trace.end_s[at]
        self.members: dict[int, dict[int, int]] = {}  # collective → program → its op
        for i in np.flatnonzero(plan.collective >= 0).tolist():
            self.members.setdefault(int(plan.collective[i]), {})[int(plan.program[i])] = i

    def spans(self, rank: int) -> list[Span]:
        """What a rank's compute stream did, in order of time."""
        plan, program = self.plan, self.places.program(rank)
        post, start, end = (table[self.places.position(rank)] for table in (self.post, self.start, self.end))
        out: list[Span] = []
        for i in range(int(plan.bounds[program]), int(plan.bounds[program + 1])):
            if plan.kind[i] != OpKind.COMPUTE:
                continue
            comm = [w for w in plan.waits.row(i).tolist() if plan.kind[w] != OpKind.COMPUTE]
            if comm and start[i] > post[i]:
                out.append((float(post[i]), float(start[i]), self._other(rank, max(comm, key=lambda w: end[w]))))
            out.append((float(start[i]), float(end[i]), rank))
        return out

    def _other(self, rank: int, op: int) -> int:
        """The rank at the other end of a communication op: of a collective, the last to come."""
        plan, places = self.plan, self.places
        if plan.partner[op] >= 0:
            return places.peer(rank, int(plan.program[plan.partner[op]]))
        meeting = Collective.of(plan, places, rank, plan.shapes[int(plan.shape[op])], int(plan.mb[op]))
        rows = self.members.get(int(plan.collective[op]), {})

        def came(member: int) -> float:
            row = rows.get(places.program(member), op)
            return float(self.start[places.position(member), row])

        return max(meeting.members, key=came)


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
