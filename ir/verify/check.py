"""`check_plan`: every op once, orders equal at both ends, nothing read before it is there, no deadlock."""

import numpy as np

from ir.plan.plan import Plan
from ir.verify.buffers import check_buffers
from ir.verify.collectives import check_channels, check_collectives
from ir.verify.coverage import instances, reads
from ir.verify.deadlock import OpDispatch, check_progress
from ir.verify.held import held
from ir.verify.once import once_needs, tail
from ir.verify.waits import OpWaits, check_waits
from ir.verify.zero import check_room, zero_needs


def check_plan(plan: Plan, serial: bool = False, inline: bool = False) -> None:
    """Raise PiperError on the first broken rule, naming the op, its rank and the fix.

    serial: also prove that each program can run its dispatch order as one stream (a transport with one queue).
    inline: also prove it for a host that executes compute itself (gloo, CPU).
    Needed edges come from the plan's graph, not from the plan: a missing wait cannot hide. Who holds what comes from
    the graph's parts, not from who made buckets and lowered: what these get wrong cannot hide either.
    """
    holds = held(plan.graph)
    end = tail(plan.graph, holds)
    found = instances(plan)
    check_channels(plan)
    check_collectives(plan, found)
    read = reads(plan, found)
    zero = zero_needs(plan, found, holds, end)
    waits = OpWaits(plan)
    check_waits(plan, found, read, np.concatenate([once_needs(plan, found, holds, end), zero.needs]), waits)
    check_progress(plan)
    if inline:
        check_progress(plan, OpDispatch.INLINE)
    if serial:
        check_progress(plan, OpDispatch.SERIAL)
    check_buffers(plan, found, read, zero.uses, waits)
    check_room(plan, zero.read)
