"""A scenario as a net of integers: streams, what is waited for, and who meets whom."""

from typing import NamedTuple

import numpy as np

from cost_models.jit import jit
from ir.core.order import BoolArray, FloatArray, IntArray
from ir.plan.plan import OpKind, OpLists, Plan
from piper_sim.engine.scenario import EngineScenario, MessageMode


class OpNet(NamedTuple):
    """What both kernels read. `x_at[k]:x_at[k + 1]` are the places of k's own in `x`.

    A host is one more stream behind the plan's own; its ops are dispatches, op `ops + i` that of op i. An op waits for
    its dispatch, a dispatch for what holds the host, and a dispatch's end is `post`.

    queue: ops by stream. lane: the plan's streams by program. member: ops by meeting; lone ops meet but themselves.
    Meetings stand in the order of their least op.
    wait: by op, the ops it waits for, its dispatch last; `len(stream) + j` stands for op j of the step before.
    work: [meeting] the op whose duration counts: a transfer's send; -1 for a collective, whose longest member counts.
    gate: [op] the send whose message a buffered receive waits for, -1 for all others.
    ops: how many ops there are without dispatches.
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
    ops: int


def build(scenario: EngineScenario) -> OpNet:
    """The net of a scenario."""
    plan, n = scenario.plan, len(scenario.plan)
    owner = np.array([p for p, _ in plan.streams], dtype=np.int64)
    ops, stream = n, plan.stream
    if scenario.host is not None:
        _, host = np.unique(plan.program, return_inverse=True)
        ops, stream = 2 * n, np.append(stream, len(owner) + host)
    dispatches = np.arange(n, ops)
    gate = np.full(ops, -1)
    if scenario.wire is MessageMode.BUFFERED:
        recv = np.flatnonzero(plan.kind == OpKind.RECV)
        gate[recv] = plan.partner[recv]
    least = np.append(_least(plan, scenario.wire), dispatches)
    first, meeting = np.unique(least, return_inverse=True)
    member_at, member = _rows(len(first), meeting.reshape(-1))
    waits = _waits(scenario, ops)
    return OpNet(
        *_rows(int(stream.max(initial=-1)) + 1, stream), *_rows(plan.programs, owner), waits.at, waits.items,
        member_at, member, meeting.reshape(-1), _work(plan, scenario.wire, first), gate,
        stream, np.append(plan.program, plan.program[: len(dispatches)]),
        np.append(plan.kind == OpKind.COMPUTE, np.zeros(len(dispatches), dtype=np.bool_)), n,
    )  # fmt: skip


def _rows(count: int, key: IntArray) -> tuple[IntArray, IntArray]:
    """Indices by key, each key's in rising order."""
    rows = OpLists.of(count, key, np.arange(len(key)))
    return rows.at, rows.items


def _least(plan: Plan, wire: MessageMode) -> IntArray:
    """[op] the least op of its meeting."""
    n = len(plan)
    least = np.arange(n)
    if wire is MessageMode.RENDEZVOUS:
        least = np.where(plan.partner >= 0, np.minimum(least, plan.partner), least)
    grouped = np.flatnonzero(plan.collective >= 0)
    first = np.full(int(plan.collective.max(initial=-1)) + 1, n)
    np.minimum.at(first, plan.collective[grouped], grouped)
    least[grouped] = first[plan.collective[grouped]]
    return least


def _work(plan: Plan, wire: MessageMode, first: IntArray) -> IntArray:
    """[meeting] whose duration counts, from each meeting's least op."""
    op = first[first < len(plan)]
    received = (plan.kind[op] == OpKind.RECV) & (wire is MessageMode.RENDEZVOUS)
    counts = np.where(plan.collective[op] >= 0, -1, np.where(received, plan.partner[op], op))
    return np.append(counts, first[len(op) :])


def _waits(scenario: EngineScenario, ops: int) -> OpLists:
    """What each op and dispatch waits for, within the step and from the one before."""
    plan, n = scenario.plan, len(scenario.plan)
    dispatches = np.arange(n, ops)
    rows = [plan.waits.rows(), scenario.late, dispatches - n]
    items = [plan.waits.items, scenario.before + ops, dispatches]
    if scenario.host is not None:
        hold = scenario.host.hold
        rows.append(hold.rows() + n)
        items.append(np.where(hold.items < n, hold.items, hold.items - n + ops))
    return OpLists.of(ops, np.concatenate(rows), np.concatenate(items))


@jit
def missing(net: OpNet, end: FloatArray, step: int, i: int, seek: int) -> int:
    """The first of op i's waits, from `seek` on, whose end is not known: a place in `net.wait`, or the waits' end."""
    n, w, last = len(net.stream), seek, net.wait_at[i + 1]
    while w < last:
        j = net.wait[w]
        if j < n:
            if end[step, j] < 0:
                break
        elif step > 0 and end[step - 1, j - n] < 0:
            break
        w += 1
    return w
