"""When the ops of a plan run, said a second time and plainly: go round the streams, move whatever can move."""

from collections import defaultdict
from collections.abc import Sequence

from ir.plan.plan import OpKind, Plan


def replay(
    plan: Plan, duration: Sequence[float], buffered: bool = False, queues: Sequence[Sequence[int]] | None = None
) -> tuple[list[float], list[float]] | None:
    """(start, end) of every op, None on a deadlock. queues: the plan's streams, or others.

    A transfer or collective starts when its last member is there and ends on all at once; with `buffered`, a send
    starts alone and its message is there when it ends.
    """
    queues = plan.queues if queues is None else queues
    groups: dict[int, list[int]] = defaultdict(list)
    for i, c in enumerate(plan.collective.tolist()):
        if c >= 0:
            groups[c].append(i)
    meet = {i: g for g in groups.values() for i in g}
    for i, j in enumerate(plan.partner.tolist()):
        if j >= 0:
            meet[i] = [i, j]
    waits = [plan.waits.row(i).tolist() for i in range(len(plan))]
    sends = (plan.kind == OpKind.SEND).tolist()
    start: list[float] = [-1.0] * len(plan)
    end: list[float] = [-1.0] * len(plan)
    at, moved = [0] * len(queues), True
    while moved:
        moved = False
        for q, queue in enumerate(queues):
            while at[q] < len(queue):
                i = queue[at[q]]
                if start[i] < 0:
                    if any(end[w] < 0 for w in waits[i]):
                        break
                    free = end[queue[at[q] - 1]] if at[q] else 0.0
                    start[i] = max([free, *(end[w] for w in waits[i])])
                members = [i] if buffered and sends[i] else meet.get(i, [i])
                if any(start[m] < 0 for m in members):
                    break
                if end[i] < 0:
                    if buffered and len(members) == 2 and plan.partner[i] >= 0:
                        end[i] = max(start[i], end[int(plan.partner[i])])
                        if end[int(plan.partner[i])] < 0:
                            end[i] = -1.0
                            break
                    else:
                        end[i] = max(start[m] for m in members) + duration[i]
                at[q] += 1
                moved = True
    return None if any(x < 0 for x in end) else (start, end)


def serial(plan: Plan) -> list[list[int]]:
    """Each program's dispatch order as its only queue."""
    bounds = plan.bounds.tolist()
    return [list(range(bounds[p], bounds[p + 1])) for p in range(plan.programs)]
