"""`lower`: join graph and orders, once, into a plan."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ir.core.order import IntArray, Order
from ir.core.waits import order_by, strongest
from ir.directives.rows import orders_from_rows
from ir.graph.graph import Graph, check, illegal
from ir.graph.per_step import with_sync
from ir.graph.sync import buckets
from ir.graph.zero import sharded_of
from ir.lower.frees import node_buffers
from ir.lower.global_comm_order import joint_order
from ir.lower.per_step_ops import collective_ids, once_rows
from ir.lower.plan_builder import PlanBuilder, producers, stamp
from ir.lower.policy import MessageQueue, PlanPolicy
from ir.lower.template import TAIL
from ir.lower.transfers import transfers
from ir.lower.zero import zero_rows
from ir.plan.plan import Buffers, OpKind, OpLists, Plan, first_use

_FIELDS = ("node", "slot", "mb", "bytes", "alloc", "alloc_cover", "free", "free_cover", "category")


def lower(graph: Graph, policy: PlanPolicy | None = None, header: Mapping[str, str] | None = None) -> Plan:
    """The plan of a placed and ordered graph. Programs without an order run by dataflow.

    Raises PiperError (illegal_plan) where an order leaves out, repeats or inverts actions.

    >>> from ir.graph.build import stage_graph
    >>> from ir.directives import PlaceDirective, SplitDirective, apply
    >>> from ir.core.filters import parse_filter as f
    >>> placed = [PlaceDirective(f({"PP": s}), s) for s in range(2)]
    >>> plan = lower(apply(stage_graph(2), [SplitDirective(f({}), "MB", 1), *placed]))
    >>> plan.texts
    ['0RECV_B0', '0F0', '0SEND_F0', '0B0', '1RECV_F0', '1F0', '1I0', '1SEND_B0', '1W0']
    """
    policy = policy or PlanPolicy()
    found = buckets(graph)
    full = with_sync(graph, policy.clip, found)
    check(full)
    draft = stamp(full, policy, _orders(graph), sharded_of(full, found))
    edges = transfers(draft)
    send, _ = draft.messages
    draft.wait(send, producers(draft, send))  # a send for the op that produced its buffer
    once_rows(draft)
    zero_rows(draft, found)
    if policy.p2p is MessageQueue.SINGLE or _mixed(draft):
        joint_order(draft, edges)
    if policy.p2p is not MessageQueue.USE:
        _after_dispatched(draft)
    if policy.blocking:
        _behind_sends(draft)
    node_buffers(draft, edges)
    return _finish(draft, {**policy.header(), **(header or {})})


def _orders(graph: Graph) -> dict[int, Order]:
    held = {s.group for n in graph.nodes for s in n.spans}
    empty = next((p for p in range(graph.programs) if p not in held), None)
    if empty is not None:
        raise illegal(f"nothing is placed on group {empty}, but on group {max(held)}", "number the groups without gaps")
    orders = dict(graph.orders)
    if len(orders) < graph.programs:
        if orders:
            missing = sorted(set(range(graph.programs)) - set(orders))
            raise illegal(f"programs {missing} have no order while others have", "order every program, or none")
        orders = orders_from_rows(graph, [])
    return orders


def _mixed(draft: PlanBuilder) -> bool:
    """Whether reductions between programs share a stream with collectives that compute waits for.

    Waiting there for another program would hold up this one: their place must be the same in time everywhere.
    """
    nodes = draft.graph.nodes
    meet = {n.stream for n in nodes if n.once and n.kind not in TAIL and len(n.groups) > 1}
    wires = [s for s in draft.templates.shapes if s.kind is OpKind.COLLECTIVE]
    return not meet.isdisjoint(s.stream for s in wires if not s.covers or not nodes[s.covers[0][0]].once)


def _after_dispatched(draft: PlanBuilder) -> None:
    """A communication op follows the compute op dispatched before it: its buffer may be that op's, recycled."""
    kinds = draft.kinds()
    rows = draft.rows
    order = order_by(rows.program, rows.key, rows.sub)
    compute = kinds[order] == OpKind.COMPUTE
    last = np.maximum.accumulate(np.where(compute, np.arange(len(order)), -1))
    comm = np.flatnonzero(~compute & (last >= 0))
    on = order[last[comm]]
    mine = rows.program[on] == rows.program[order[comm]]
    draft.wait(order[comm[mine]], on[mine])


def _behind_sends(draft: PlanBuilder) -> None:
    """A compute op waits for the send dispatched last before it, hence for what was sent to each peer before."""
    kinds, rows = draft.kinds(), draft.rows
    order = order_by(rows.program, rows.key, rows.sub)
    compute = kinds[order] == OpKind.COMPUTE
    after = np.where(compute, np.arange(len(order)), len(order))
    after = np.minimum.accumulate(after[::-1])[::-1]
    sends = np.flatnonzero((kinds[order] == OpKind.SEND) & (after < len(order)))
    on, row = order[sends], order[after[sends]]
    mine = rows.program[on] == rows.program[row]
    draft.wait(row[mine], on[mine])


def _finish(draft: PlanBuilder, header: Mapping[str, str]) -> Plan:
    """Sort rows into dispatch order, renumber everything, keep the waits that say something."""
    rows = draft.rows
    order = order_by(rows.program, rows.key, rows.sub)
    new = np.empty(len(order), dtype=np.int64)
    new[order] = np.arange(len(order))
    used, shape = first_use(rows.shape[order])
    meeting = collective_ids(draft)[order]
    met = meeting >= 0
    meeting[met] = first_use(meeting[met])[1]
    row = new[np.concatenate([r for r, _ in draft.waits] or [np.zeros(0, np.int64)])]
    on = new[np.concatenate([o for _, o in draft.waits] or [np.zeros(0, np.int64)])]
    bare = Plan(
        graph=draft.graph,
        header=header,
        shapes=tuple(draft.templates.shapes[i] for i in used.tolist()),
        program=rows.program[order],
        shape=shape,
        mb=rows.mb[order],
        mb2=rows.mb2[order],
        waits=OpLists.of(len(order), row[:0], on[:0]),
        partner=_partners(draft, new, order),
        collective=meeting,
        buffers=_buffers(draft, new),
        unit=rows.unit[order],
    )
    stream = bare.stream
    position = stream_positions(stream)
    row, on = strongest(row, on, stream, position, len(bare.streams))
    by = order_by(row, on)
    return replace(bare, waits=OpLists.of(len(order), row[by], on[by]))


def stream_positions(stream: IntArray) -> IntArray:
    """Position of each op within its stream (dispatch order)."""
    by = order_by(stream)
    counts = np.bincount(stream)
    first = np.concatenate([[0], np.cumsum(counts)[:-1]])
    out = np.empty(len(stream), dtype=np.int64)
    out[by] = np.arange(len(stream)) - first[stream[by]]
    return out


def _partners(draft: PlanBuilder, new: IntArray, order: IntArray) -> IntArray:
    out = np.full(len(order), -1, dtype=np.int64)
    send, recv = draft.messages
    out[new[send]] = new[recv]
    out[new[recv]] = new[send]
    return out


def _buffers(draft: PlanBuilder, new: IntArray) -> Buffers:
    empty = np.zeros(0, dtype=np.int64)
    columns = {f: np.concatenate([b[f] for b in draft.buffers] or [empty]) for f in _FIELDS}
    columns["alloc"] = new[columns["alloc"]]
    op_named = columns["node"] < 0
    columns["slot"][op_named] = new[columns["slot"][op_named]]
    columns["free"] = np.where(columns["free"] >= 0, new[columns["free"]], -1)
    after = np.flatnonzero(op_named)
    after = after[order_by(columns["slot"][after], columns["mb"][after])]
    by = np.append(np.flatnonzero(~op_named), after)  # those called after nodes are in the plan's order
    return Buffers(**{k: v[by] for k, v in columns.items()})
