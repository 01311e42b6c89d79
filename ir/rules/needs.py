"""Every data edge of the graph is kept by stream order or by a wait; communication follows what it may overwrite."""

from __future__ import annotations

import numpy as np

from ir.graph import illegal
from ir.lower.lower import stream_positions
from ir.lower.waits import proven
from ir.order import BoolArray, IntArray
from ir.plan import OpKind, Plan


def check_waits(plan: Plan, inst: IntArray) -> None:
    """Raise on the first op that could start before something it reads is there."""
    writer, reader = needed(plan, inst)
    stream = plan.stream
    position = stream_positions(stream)
    row, on = plan.waits.rows(), plan.waits.items
    _local_waits(plan, row, on)
    ok = proven(row, on, reader, writer, stream, position, len(plan.streams))
    bad = np.flatnonzero(~ok)
    if not len(bad):
        return
    k = int(bad[np.argmin(reader[bad])])
    r, w = int(reader[k]), int(writer[k])
    where = f"program {int(plan.program[r])}"
    if stream[r] == stream[w] and r < w:
        raise illegal(f"{where}: {plan.text(r)} stands before {plan.text(w)}, whose result it reads", "swap them")
    raise illegal(f"{where}: {plan.text(r)} does not wait for {plan.text(w)}, which it needs", f"wait {plan.text(w)}")


def _local_waits(plan: Plan, row: IntArray, on: IntArray) -> None:
    stray = np.flatnonzero(plan.program[row] != plan.program[on])
    if len(stray):
        r, w = int(row[stray[0]]), int(on[stray[0]])
        raise illegal(
            f"program {int(plan.program[r])}: {plan.text(r)} waits for {plan.text(w)} of program {int(plan.program[w])}",
            "a wait is local; another program's result comes by a receive",
        )


def needed(plan: Plan, inst: IntArray) -> tuple[IntArray, IntArray]:
    """(writer, reader) pairs of ops on one program, from the graph's edges and the plan's transfers."""
    pairs = [_per_microbatch(plan, inst), _joins(plan, inst), _after_dispatched(plan), _gathered(plan, inst)]
    writer = np.concatenate([a for a, _ in pairs])
    reader = np.concatenate([b for _, b in pairs])
    return writer, reader


def _per_microbatch(plan: Plan, inst: IntArray) -> tuple[IntArray, IntArray]:
    g = plan.graph
    index = [i for i, e in enumerate(g.edges) if not e.join and not g.nodes[e.src].once and not g.nodes[e.dst].once]
    src = np.array([g.edges[i].src for i in index], dtype=np.int64)
    dst = np.array([g.edges[i].dst for i in index], dtype=np.int64)
    a, b = inst[src, : g.mbs].ravel(), inst[dst, : g.mbs].ravel()
    cross = plan.program[a] != plan.program[b]
    near = ~cross & (a != b)
    writer, reader = [a[near]], [b[near]]
    send = np.flatnonzero(plan.kind == OpKind.SEND)
    if cross.any():
        keys, order = _message_keys(plan, send)
        base = np.concatenate([[0], np.cumsum([len(n.writes) for n in g.nodes])])
        slot = np.repeat(np.array([base[g.edges[i].src] + g.edges[i].slot for i in index], dtype=np.int64), g.mbs)
        mb = np.tile(np.arange(g.mbs), len(index))
        want = (slot[cross] * plan.programs + plan.program[b[cross]]) * g.mbs + mb[cross]
        at = np.searchsorted(keys, want)
        found: BoolArray = (at < len(keys)) & (keys[np.minimum(at, len(keys) - 1)] == want) if len(keys) else want < 0
        if not found.all():
            k = int(np.flatnonzero(cross)[np.argmin(found)])
            raise illegal(
                f"program {int(plan.program[b[k]])}: {plan.text(int(b[k]))} reads {plan.text(int(a[k]))} of program "
                f"{int(plan.program[a[k]])}, but nothing sends it"
            )
        s = send[order[at]]
        writer += [plan.partner[s], a[cross]]
        reader += [b[cross], s]
    return np.concatenate(writer), np.concatenate(reader)


def _message_keys(plan: Plan, send: IntArray) -> tuple[IntArray, IntArray]:
    """Sorted keys of what each send carries where, and the permutation."""
    g = plan.graph
    base = np.concatenate([[0], np.cumsum([len(n.writes) for n in g.nodes])])
    slot = np.array([base[s.slot[0]] + s.slot[1] if s.slot else 0 for s in plan.shapes], dtype=np.int64)
    key = (slot[plan.shape[send]] * plan.programs + plan.program[plan.partner[send]]) * g.mbs + plan.mb[send]
    order = np.argsort(key, kind="stable")
    return key[order], order


def _joins(plan: Plan, inst: IntArray) -> tuple[IntArray, IntArray]:
    """A once-op follows every contribution of its own program."""
    g = plan.graph
    writer: list[int] = []
    reader: list[int] = []
    for e in g.edges:
        if not e.join:
            continue
        for p in g.nodes[e.dst].groups:
            row = int(inst[e.dst, p])
            if g.nodes[e.src].once:
                if p in g.nodes[e.src].groups:
                    writer.append(int(inst[e.src, p]))
                    reader.append(row)
                continue
            mine = inst[e.src, : g.mbs]
            mine = mine[plan.program[mine] == p]
            if len(mine):
                writer.append(int(mine.max()))
                reader.append(row)
    return np.array(writer, dtype=np.int64), np.array(reader, dtype=np.int64)


def _after_dispatched(plan: Plan) -> tuple[IntArray, IntArray]:
    """A communication op follows the compute op dispatched before it, whose memory it may be given."""
    none = np.zeros(0, dtype=np.int64)
    if plan.header.get("p2p") == "use":
        return none, none
    compute = plan.kind == OpKind.COMPUTE
    last = np.maximum.accumulate(np.where(compute, np.arange(len(plan)), -1))
    comm = np.flatnonzero(~compute & (last >= 0))
    comm = comm[plan.program[last[comm]] == plan.program[comm]]
    return last[comm], comm


def _gathered(plan: Plan, inst: IntArray) -> tuple[IntArray, IntArray]:
    """ZeRO-2/3: update follows every reduction; each compute op of a gathered chunk follows its latest gather."""
    from ir.rules.zero import zero_needs

    return zero_needs(plan, inst)
