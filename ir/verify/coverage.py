"""Every node of every microbatch runs exactly once, where it is placed; and who reads what, edge by edge, as ops."""

from dataclasses import dataclass

import numpy as np

from ir.core.order import BoolArray, IntArray
from ir.graph.graph import illegal
from ir.plan.plan import OpKind, Plan, cover_table


@dataclass(frozen=True, eq=False)
class OpInstances:
    """Where everything runs. op[node, mb] -> op, cover[node, mb] -> index into its covers.

    Once-per-step nodes have a column per program instead of one per microbatch.
    """

    op: IntArray
    cover: IntArray


def instances(plan: Plan) -> OpInstances:
    """From the plan's rows alone. Raises PiperError (illegal_plan): an op dropped, repeated, or on a wrong program."""
    graph = plan.graph
    wide = max(graph.mbs, plan.programs, 1)
    op = np.full((len(graph.nodes), wide), -1, dtype=np.int64)
    cover = np.zeros_like(op)
    once = np.array([n.once for n in graph.nodes] or [False])
    for c, (node, member) in enumerate(zip(*cover_table(plan.shapes), strict=True)):
        rows = np.flatnonzero(node[plan.shape] >= 0)
        shape = plan.shape[rows]
        n = node[shape]
        column = np.where(member[shape] == 0, plan.mb[rows], plan.mb2[rows])
        column = np.where(once[n], plan.program[rows], column)
        stray = (column < 0) | (column >= np.where(once[n], plan.programs, graph.mbs))
        if stray.any():
            raise illegal(f"{plan.where(int(rows[np.argmax(stray)]))} names a microbatch that does not exist")
        taken = op[n, column] >= 0
        op[n, column] = rows
        cover[n, column] = c
        _once(plan, rows, taken | (op[n, column] != rows))
    _bare_once(plan)
    _complete(plan, op, once)
    return OpInstances(op, cover)


def _once(plan: Plan, rows: IntArray, again: BoolArray) -> None:
    if again.any():
        raise illegal(f"{plan.where(int(rows[np.argmax(again)]))} runs twice", "keep one of them")


def _bare_once(plan: Plan) -> None:
    """Transfers, gathers and reductions of one microbatch stand for no node; each is there once all the same."""
    bare = np.array([not s.covers for s in plan.shapes] or [False])
    rows = np.flatnonzero(bare[plan.shape])
    stray = (plan.mb[rows] < 0) | (plan.mb[rows] >= plan.graph.mbs)
    if stray.any():
        raise illegal(f"{plan.where(int(rows[np.argmax(stray)]))} names a microbatch that does not exist")
    same: dict[object, int] = {}  # whatever it is called, and on whatever stream it stands
    number = np.zeros(len(plan.shapes), dtype=np.int64)
    for k in np.flatnonzero(bare).tolist():
        s = plan.shapes[k]
        number[k] = same.setdefault((int(s.kind), s.slot, s.peer, s.bucket, s.role, s.reads, s.again), k)
    key = (plan.program[rows] * len(plan.shapes) + number[plan.shape[rows]]) * plan.graph.mbs + plan.mb[rows]
    by = np.argsort(key, kind="stable")
    again = np.zeros(len(rows), dtype=bool)
    again[by[1:]] = np.diff(key[by]) == 0
    _once(plan, rows, again)


def _complete(plan: Plan, op: IntArray, once: BoolArray) -> None:
    expected = np.full_like(op, -1)
    for i, n in enumerate(plan.graph.nodes):
        for s in n.spans:
            if s.mbs is None:
                expected[i, s.group] = s.group
            else:
                expected[i, s.mbs.start : s.mbs.stop] = s.group
    got = np.where(op >= 0, plan.program[np.maximum(op, 0)], -1)
    wrong = np.argwhere(got != expected)
    if not len(wrong):
        return
    i, column = wrong[0].tolist()
    text = plan.graph.nodes[i].text(None if once[i] else column)
    home = int(expected[i, column])
    if got[i, column] < 0:
        raise illegal(f"program {home}: {text} is missing", f"add it to program {home}")
    where = f"it is placed on program {home}" if home >= 0 else "it has no place there"
    raise illegal(f"program {int(got[i, column])} runs {text}, but {where}")


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
        there = f"{plan.text(w)} of program {int(plan.program[w])}"
        raise illegal(f"{plan.where(r)} reads {there}, but nothing sends it", f"send it behind {plan.text(w)}")
    out.send[far] = send[order[at]]
