"""The step that repeats: simulate until every stream's step lasts as long as every other's."""

from __future__ import annotations

import numpy as np

from ir.order import FloatArray
from ir.plan import Plan
from piper_sim.engine.loop import Run, Wire, run
from piper_sim.engine.steps import carried

MAX_STEPS = 24


def steady(plan: Plan, duration: FloatArray, clipped: bool) -> tuple[Run, int]:
    """The last two steps of a run long enough that further steps only repeat the last; and how many were simulated.

    What a step starts from are the ends of its streams' last ops and of what is carried over. Once all of these have
    moved by one and the same time, every later step is this one, shifted. With clipping, all ranks meet in every step
    and nothing but that meeting's time matters behind it, so the second step is already the one that repeats.
    """
    if clipped:
        return _last(run(plan, duration, Wire.RENDEZVOUS, 2)), 2
    state = np.unique(np.concatenate([[queue[-1] for queue in plan.queues], carried(plan)[1]]))
    steps = 3
    while True:
        ran = run(plan, duration, Wire.RENDEZVOUS, steps)
        moved = (ran.end[-1] - ran.end[-2])[state]
        if np.ptp(moved) == 0 or steps >= MAX_STEPS:
            return _last(ran), steps
        steps *= 2


def _last(ran: Run) -> Run:
    return Run(ran.start[-2:], ran.end[-2:])
