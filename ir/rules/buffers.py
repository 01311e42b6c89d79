"""Every buffer is written before it is read and freed once, on a compute op whose waits prove every reader done."""

from __future__ import annotations

import numpy as np

from ir.graph import illegal
from ir.lower.lower import stream_positions
from ir.lower.waits import proven
from ir.order import IntArray
from ir.plan import OpKind, Plan


def check_buffers(plan: Plan, inst: IntArray) -> None:
    """Raise on a free that comes too early, stands on a communication op, or frees twice."""
    b = plan.buffers
    freed = np.flatnonzero(b.free >= 0)
    if not len(freed):
        return
    stray = freed[plan.program[b.free[freed]] != plan.program[b.alloc[freed]]]
    if len(stray):
        raise _early(plan, int(stray[0]), "on another program than the one that holds it")
    comm = freed[(plan.kind[b.free[freed]] != OpKind.COMPUTE) & (b.free[freed] != b.alloc[freed])]
    if len(comm):
        raise _early(plan, int(comm[0]), "on a communication op; frees stand on compute ops")
    before = freed[b.free[freed] < b.alloc[freed]]
    if len(before):
        raise _early(plan, int(before[0]), "before it is written")
    reader, buffer = readers(plan, inst)
    use = b.free[buffer] >= 0
    reader, buffer = reader[use], buffer[use]
    at = b.free[buffer]
    other = reader != at
    stream = plan.stream
    ok = proven(
        plan.waits.rows(), plan.waits.items, at[other], reader[other], stream, stream_positions(stream), len(plan.streams)
    )
    if not ok.all():
        k = int(np.argmin(ok))
        raise _early(plan, int(buffer[other][k]), f"while {plan.text(int(reader[other][k]))} may still read it")


def readers(plan: Plan, inst: IntArray) -> tuple[IntArray, IntArray]:
    """(op, buffer) pairs: who reads which buffer on the program that holds it. A send reads what it carries."""
    g, b = plan.graph, plan.buffers
    mbs = g.mbs
    base = np.concatenate([[0], np.cumsum([len(n.writes) for n in g.nodes])]).astype(np.int64)
    of = np.full((int(base[-1]), mbs), -1, dtype=np.int64)
    own = np.flatnonzero(b.node >= 0)
    of[base[b.node[own]] + b.slot[own], b.mb[own]] = own
    received = np.full(len(plan), -1, dtype=np.int64)
    named = np.flatnonzero(b.node < 0)
    received[b.slot[named]] = named
    edges = [e for e in g.edges if not e.join and not g.nodes[e.src].once and not g.nodes[e.dst].once]
    slot = np.array([base[e.src] + e.slot for e in edges], dtype=np.int64)
    writer = inst[np.array([e.src for e in edges], dtype=np.int64), :mbs]
    reader = inst[np.array([e.dst for e in edges], dtype=np.int64), :mbs]
    held = of[slot]
    local = (plan.program[writer] == plan.program[reader]) & (held >= 0)
    rows, bufs = [reader[local]], [held[local]]
    far = (plan.program[writer] != plan.program[reader]) & (held >= 0)
    if far.any():
        carried = np.array([base[s.slot[0]] + s.slot[1] if s.slot else -1 for s in plan.shapes], dtype=np.int64)
        send = np.flatnonzero((plan.kind == OpKind.SEND) & (plan.partner >= 0))
        rows.append(send)
        bufs.append(of[carried[plan.shape[send]], plan.mb[send]])
        mb = np.broadcast_to(np.arange(mbs), writer.shape)
        recv = plan.partner[send]
        key = (carried[plan.shape[send]] * plan.programs + plan.program[recv]) * mbs + plan.mb[send]
        by = np.argsort(key, kind="stable")
        want = (np.broadcast_to(slot[:, None], writer.shape)[far] * plan.programs + plan.program[reader[far]]) * mbs + mb[far]
        rows.append(reader[far])
        bufs.append(received[recv[by[np.searchsorted(key[by], want)]]])
    row, buf = np.concatenate(rows), np.concatenate(bufs)
    return row[buf >= 0], buf[buf >= 0]


def _early(plan: Plan, buffer: int, why: str) -> Exception:
    row = int(plan.buffers.free[buffer])
    return illegal(
        f"program {int(plan.program[row])}: {plan.text(row)} frees {plan.buffer_name(buffer)} {why}",
        "free it on a compute op that waits for all its readers",
    )
