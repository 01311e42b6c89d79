"""A plan as a net of integers: streams, what is waited for, and who meets whom."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ir.order import BoolArray, IntArray
from ir.plan import Csr, OpKind, Plan
from piper_sim.engine.loop import Wire
from piper_sim.engine.steps import carried


class Net(NamedTuple):
    """What both kernels read. `x_at[k]:x_at[k + 1]` are the places of k's own in `x`.

    queue: ops by stream. lane: streams by program. member: ops by meeting; lone ops meet nobody but themselves.
    wait: by op, the ops it waits for; ops + j stands for op j of the step before.
    work: [meeting] the op whose duration counts: a transfer's send; -1 for a collective, whose longest member counts.
    gate: [op] the send whose message a buffered receive waits for, -1 for all others.
    """

    queue_at: IntArray
    queue: IntArray
    lane_at: IntArray
    lane: IntArray
    wait_at: IntArray
    wait: IntArray
    member_at: IntArray
    member: IntArray
    meeting: IntArray
    work: IntArray
    gate: IntArray
    stream: IntArray
    program: IntArray
    compute: BoolArray


def _rows(count: int, key: IntArray) -> tuple[IntArray, IntArray]:
    """Indices by key, each key's in rising order."""
    at = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(np.bincount(key, minlength=count), out=at[1:])
    return at, np.argsort(key, kind="stable").astype(np.int64)


def build(plan: Plan, wire: Wire) -> Net:
    """The net of a plan."""
    n, kind = len(plan), plan.kind
    leader, gate = np.arange(n), np.full(n, -1, dtype=np.int64)
    recv = kind == OpKind.RECV
    if wire is Wire.BUFFERED:
        gate[recv] = plan.partner[recv]
    else:
        leader[recv] = plan.partner[recv]
    grouped = np.flatnonzero(plan.collective >= 0)
    if len(grouped):
        first = np.full(int(plan.collective.max()) + 1, n, dtype=np.int64)
        np.minimum.at(first, plan.collective[grouped], grouped)
        leader[grouped] = first[plan.collective[grouped]]
    work, meeting = np.unique(leader, return_inverse=True)
    meeting = meeting.reshape(-1).astype(np.int64)
    stream_program = np.array([p for p, _ in plan.streams], dtype=np.int64)
    queue_at, queue = _rows(len(stream_program), plan.stream)
    lane_at, lane = _rows(plan.programs, stream_program)
    member_at, member = _rows(len(work), meeting)
    later, earlier = carried(plan)
    both = Csr.of(n, np.append(plan.waits.rows(), later), np.append(plan.waits.items, earlier + n))
    counts = np.where(plan.collective[work] >= 0, -1, work)
    return Net(
        queue_at, queue, lane_at, lane, both.at, both.items, member_at, member, meeting, counts, gate,
        plan.stream.astype(np.int64), plan.program.astype(np.int64), kind == OpKind.COMPUTE,
    )  # fmt: skip
