"""Messages between programs: channels in one order at both ends, receives dispatched where they are needed."""

import numpy as np

from ir.core.errors import PiperError
from ir.core.order import BoolArray, IntArray
from ir.core.waits import order_by, running_max, segments
from ir.graph.graph import COMPUTE, illegal
from ir.lower.plan_builder import STEP, Edges, PlanBuilder
from ir.lower.policy import MessageQueue
from ir.plan.plan import OpKind, OpShape


def transfers(draft: PlanBuilder) -> Edges:
    """Add receives and all local waits for data; returns the edges' instances that cross programs.

    Ops on one program's compute stream wait for one another by their order alone. Raises PiperError (illegal_plan): an
    action that no order holds, a reader ordered before its writer.
    """
    g, rows = draft.graph, draft.rows
    index = np.flatnonzero(g.data)
    src, dst, _ = g.ends[index].T
    _refuse_missing(draft, src, dst)
    stage = np.array([n.stage for n in g.nodes], dtype=np.int64)
    compute = np.array([n.stream == COMPUTE for n in g.nodes], dtype=np.bool_)
    inside: BoolArray = stage[src] == stage[dst]  # a stage is on one program for each microbatch
    quiet = inside & compute[src] & compute[dst]
    late = bool((draft.inst[src[quiet]] > draft.inst[dst[quiet]]).any())
    a, b = draft.inst[src[~quiet]], draft.inst[dst[~quiet]]
    cross = np.zeros(a.shape, dtype=np.bool_)
    far = ~inside[~quiet]
    cross[far] = rows.program[a[far]] != rows.program[b[far]]
    if late or (~cross & (a > b)).any():
        raise _late(draft, src, dst)
    near = ~cross & (a != b)
    draft.wait(b[near], a[near])
    edge, mb = np.nonzero(cross)
    index, reader = index[~quiet][edge], b[cross]
    received = _receive(draft, index, mb, a[cross], reader) if len(edge) else reader
    draft.wait(reader, received)
    return index, mb, received, reader


def _refuse_missing(draft: PlanBuilder, src: IntArray, dst: IntArray) -> None:
    lost: BoolArray = np.any(draft.inst < 0, axis=1)
    if (lost[src] | lost[dst]).any():
        g, a, b = draft.graph, draft.inst[src], draft.inst[dst]
        e, m = np.argwhere((a < 0) | (b < 0))[0].tolist()
        node = g.nodes[src[e] if a[e, m] < 0 else dst[e]]
        raise illegal(f"{node.text(m)} is in no program's order", "order every microbatch's F and backward once")


def _late(draft: PlanBuilder, src: IntArray, dst: IntArray) -> PiperError:
    """Of the first reader before its writer."""
    program, a, b = draft.rows.program, draft.inst[src].ravel(), draft.inst[dst].ravel()
    k = int(((program[a] == program[b]) & (a > b)).argmax())
    return illegal(
        f"program {int(program[b[k]])}: {draft.text(int(b[k]))} stands before {draft.text(int(a[k]))}, "
        "whose result it reads",
        "swap them in the order",
    )


def _receive(draft: PlanBuilder, edge: IntArray, mb: IntArray, a: IntArray, b: IntArray) -> IntArray:
    """One receive per (buffer, reading program); returns the receive row of each cross edge instance."""
    g, rows = draft.graph, draft.rows
    programs, mbs = len(draft.start) - 1, g.mbs
    slot_base = np.concatenate([[0], np.cumsum([len(n.writes) for n in g.nodes])])
    slot = np.array([slot_base[e.src] + e.slot for e in g.edges], dtype=np.int64)[edge]
    key = (slot * programs + rows.program[b]) * mbs + mb
    unique, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    consumer = np.full(len(unique), np.iinfo(np.int64).max)
    np.minimum.at(consumer, inverse, b)
    producer, to, frm = a[first], rows.program[b[first]], rows.program[a[first]]
    send = _sends(draft, slot_base, unique, programs)
    order, dispatch_before = _channel_order(draft, frm, to, producer, send, consumer)
    shape = _recv_shapes(draft, edge[first], frm)
    sub = np.empty(len(unique), dtype=np.int64)
    sub[order] = np.arange(len(order))
    ids = rows.extend(
        program=to, shape=shape, mb=mb[first], key=dispatch_before * STEP - STEP // 2, sub=sub, unit=rows.unit[consumer]
    )
    if draft.policy.p2p is MessageQueue.USE:
        _post_with_the_op_before(draft, consumer, ids, inverse, b)
    draft.messages = (send, ids)
    draft.recv_of = consumer
    out: IntArray = ids[inverse]
    return out


def _post_with_the_op_before(
    draft: PlanBuilder, consumer: IntArray, ids: IntArray, inverse: IntArray, reader: IntArray
) -> None:
    """A receive is posted when the compute op before its consumer starts: it waits for all that op waits for."""
    compute = np.flatnonzero(draft.kinds()[: draft.start[-1]] == OpKind.COMPUTE)
    first = np.searchsorted(compute, draft.start[draft.rows.program[consumer]])
    at = np.searchsorted(compute, consumer)
    two = at - 2 >= first
    draft.wait(ids[two], compute[at[two] - 2])
    one = at - 1 >= first
    before = np.where(one, compute[np.maximum(at - 1, 0)], -1)
    pairs = np.unique(np.stack([reader, ids[inverse]]), axis=1)
    lo, hi = np.searchsorted(pairs[0], before, "left"), np.searchsorted(pairs[0], before, "right")
    count = np.where(one, hi - lo, 0)
    row = np.repeat(ids, count)
    offset = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    draft.wait(row, pairs[1][np.repeat(lo, count) + offset])


def _sends(draft: PlanBuilder, slot_base: IntArray, wanted: IntArray, programs: int) -> IntArray:
    """The send row of each message key."""
    g, rows = draft.graph, draft.rows
    shapes = draft.templates.shapes
    base = np.full(len(shapes), -1, dtype=np.int64)
    for i, s in enumerate(shapes):
        if s.kind is OpKind.SEND and s.slot is not None:
            base[i] = (slot_base[s.slot[0]] + s.slot[1]) * programs + s.peer
    sends = np.flatnonzero(base[rows.shape] >= 0)
    keys = base[rows.shape[sends]] * g.mbs + rows.mb[sends]
    by = order_by(keys)
    at = np.searchsorted(keys[by], wanted)
    found: IntArray = sends[by[np.minimum(at, len(by) - 1)]]
    assert (keys[by][np.minimum(at, len(by) - 1)] == wanted).all(), "a message without its send"
    return found


def _channel_order(
    draft: PlanBuilder, frm: IntArray, to: IntArray, producer: IntArray, send: IntArray, consumer: IntArray
) -> tuple[IntArray, IntArray]:
    """Messages in channel order, and the local base position before which each receive is dispatched.

    channels: the sender's order; a receive stands before the earliest consumer at or behind it (suffix minimum).
    """
    rows, policy = draft.rows, draft.policy
    if policy.p2p is MessageQueue.USE:
        order = order_by(frm, to, consumer, send)
        segment = segments(frm[order], to[order])
        rows.key[send[order]] = np.maximum(rows.key[send[order]], running_max(rows.key[send[order]], segment))
        rows.sub[send[order]] = np.arange(len(order))
        use = draft.local(consumer)
        return order, _earlier(draft, consumer, use, 1)
    order = order_by(frm, to, producer, send)
    segment = segments(frm[order], to[order])
    position = draft.local(consumer)[order]
    hoisted = np.empty_like(position)
    hoisted[order] = -running_max(-position[::-1], segment[::-1][0] - segment[::-1])[::-1]
    base = hoisted + draft.start[to]
    return order, _earlier(draft, base, hoisted, policy.lookahead)


def _earlier(draft: PlanBuilder, row: IntArray, local: IntArray, by: int) -> IntArray:
    """The local position of the compute row `by` compute rows before `row`'s first compute row (not below 0)."""
    compute = np.flatnonzero(draft.kinds()[: draft.start[-1]] == OpKind.COMPUTE)
    if by == 0:
        return local
    at = np.searchsorted(compute, row) - by
    program = draft.rows.program[row]
    first = np.searchsorted(compute, draft.start[program])
    chosen = compute[np.maximum(at, first)]
    return np.minimum(local, draft.local(chosen))


def _recv_shapes(draft: PlanBuilder, edge: IntArray, frm: IntArray) -> IntArray:
    g = draft.graph
    code = edge * (len(draft.start)) + frm
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    out = []
    for i in first.tolist():
        e = g.edges[int(edge[i])]
        peer = int(frm[i])
        text = draft.templates.names.receive((e.src, e.slot), g.nodes[e.dst].stage)
        stream = "p2p" if draft.policy.p2p is MessageQueue.SINGLE else f"recv<{peer}"
        out.append(draft.templates.add(OpShape(OpKind.RECV, stream, text, slot=(e.src, e.slot), peer=peer)))
    return np.array(out, dtype=np.int64)[inverse]
