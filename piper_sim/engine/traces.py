"""A run of the simulator as a trace."""

from collections.abc import Mapping

import numpy as np

from ir.plan.plan import Plan
from ir.trace.trace import MemorySamples, Trace
from piper_sim.engine import EngineRun


def trace_of(plan: Plan, run: EngineRun, header: Mapping[str, object], memory: MemorySamples | None = None) -> Trace:
    """The last step of a run as a trace, times counted from that step's first start.

    post_s is when the op's stream reached it, which in simulated time is when it started.
    """
    start, end = run.start[-1], run.end[-1]
    zero = 0.0 if len(run.start) == 1 else float(start.min())
    names = [name for _, name in plan.streams]
    return Trace(
        header={"writer": "simulator", "clock_offset_s": 0.0, "clock_uncertainty_s": 0.0, **header},
        step=np.full(len(plan), len(run.start) - 1),
        rank=plan.program,
        stream=[names[i] for i in plan.stream.tolist()],
        op=plan.texts,
        post_s=start - zero,
        start_s=start - zero,
        end_s=end - zero,
        memory=memory,
    ).sorted()
