"""Who reads what: every data edge of the graph in every microbatch, as ops of the plan."""

from dataclasses import dataclass

import numpy as np

from ir.core.order import IntArray
from ir.graph.graph import illegal
from ir.plan.plan import OpKind, Plan
from ir.verify.coverage import OpInstances


@dataclass(frozen=True, eq=False)
class BufferReads:
    """One entry per data edge and microbatch.

    slot: index of the buffer among all nodes' writes (`base[node] + slot`). writer, reader: ops; *_cover: where inside
    them. send: the op that carries the buffer to the reader's program, -1 where writer and reader share one.
    """

    base: IntArray
    slot: IntArray
    mb: IntArray
    writer: IntArray
    writer_cover: IntArray
    reader: IntArray
    reader_cover: IntArray
    send: IntArray


def reads(plan: Plan, found: OpInstances) -> BufferReads:
    """All of them. Raises PiperError (illegal_plan) where a buffer is read on a program that nothing sends it to."""
    g = plan.graph
    once = [n.once for n in g.nodes]
    edges = [(e.src, e.dst, e.slot) for e in g.edges if not (e.join or once[e.src] or once[e.dst])]
    src, dst, written = np.array(edges, dtype=np.int64).reshape(-1, 3).T
    base = np.concatenate([[0], np.cumsum([len(n.writes) for n in g.nodes])]).astype(np.int64)
    slot = np.repeat(base[src] + written, g.mbs)
    mb = np.tile(np.arange(g.mbs), len(edges))
    writer, reader = found.op[src, : g.mbs].ravel(), found.op[dst, : g.mbs].ravel()
    covers = found.cover[src, : g.mbs].ravel(), found.cover[dst, : g.mbs].ravel()
    send = np.full(len(writer), -1, dtype=np.int64)
    far = np.flatnonzero(plan.program[writer] != plan.program[reader])
    out = BufferReads(base, slot, mb, writer, covers[0], reader, covers[1], send)
    if len(far):
        _carried(plan, out, far)
    return out


def carried(plan: Plan, base: IntArray) -> IntArray:
    """Index of the buffer that each send or receive carries, -1 for other ops."""
    of = np.array([base[s.slot[0]] + s.slot[1] if s.slot else -1 for s in plan.shapes], dtype=np.int64)
    return of[plan.shape]


def _carried(plan: Plan, out: BufferReads, far: IntArray) -> None:
    send = np.flatnonzero(plan.kind == OpKind.SEND)
    mbs, programs = plan.graph.mbs, plan.programs
    keys = (carried(plan, out.base)[send] * programs + plan.program[plan.partner[send]]) * mbs + plan.mb[send]
    order = np.argsort(keys, kind="stable")
    want = (out.slot[far] * programs + plan.program[out.reader[far]]) * mbs + out.mb[far]
    at = np.minimum(np.searchsorted(keys[order], want), max(len(keys) - 1, 0))
    ok = keys[order[at]] == want if len(keys) else np.zeros(len(far), dtype=bool)
    if not ok.all():
        k = int(far[np.argmin(ok)])
        r, w = int(out.reader[k]), int(out.writer[k])
        raise illegal(
            f"program {int(plan.program[r])}: {plan.text(r)} reads {plan.text(w)} of program {int(plan.program[w])}, "
            "but nothing sends it",
            f"send it behind {plan.text(w)}",
        )
    out.send[far] = send[order[at]]
