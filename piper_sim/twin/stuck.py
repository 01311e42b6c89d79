"""Where every stream stands when none can move."""

from __future__ import annotations

import numpy as np

from ir.errors import ErrorKind, PiperError
from ir.order import BoolArray
from ir.plan import Plan

LINES = 40


def deadlock(plan: Plan, posted: BoolArray, ended: BoolArray) -> PiperError:
    """The error that says, stream by stream, what the op at its head waits for.

    posted, ended: [op] in the step that cannot be finished.
    """
    story = []
    for (rank, stream), queue in zip(plan.streams, plan.queues, strict=True):
        head = next((i for i in queue if not ended[i]), None)
        if head is None:
            continue
        missing = [plan.text(int(w)) for w in plan.waits.row(head) if not ended[w]]
        if not missing:
            missing = [f"{plan.text(j)} of rank {int(plan.program[j])}" for j in _absent(plan, head, posted)]
        story.append(f"  rank {rank} {stream} stands at {plan.text(head)}, which waits for {', '.join(missing)}")
    more = [f"  and {len(story) - LINES} more"] if len(story) > LINES else []
    return PiperError(ErrorKind.DEADLOCK, "\n".join(["no stream can move:", *story[:LINES], *more]))


def _absent(plan: Plan, i: int, posted: BoolArray) -> list[int]:
    """Who is to meet op i and has not come."""
    if plan.partner[i] >= 0:
        return [int(plan.partner[i])]
    if plan.collective[i] < 0:
        return []
    return np.flatnonzero((plan.collective == plan.collective[i]) & ~posted).tolist()
