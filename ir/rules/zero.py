"""What ZeRO-2 and ZeRO-3 promise, checked on the final order: reductions reach the update, gathers reach their users."""

from __future__ import annotations

import numpy as np

from ir.graph import COMPUTE, Once, illegal
from ir.ops import Pass
from ir.order import IntArray
from ir.plan import OpKind, Plan
from ir.sync import Bucket, buckets


def sharded_buckets(plan: Plan) -> tuple[Bucket, ...]:
    """Buckets whose gradients are reduced per microbatch."""
    return tuple(b for b in buckets(plan.graph) if b.replica.zero >= 2 and b.ranks > 1)


def zero_needs(plan: Plan, inst: IntArray) -> tuple[IntArray, IntArray]:
    """(writer, reader) pairs: W -> RS -> update, AG -> compute. Raises where a reduction or gather is missing."""
    writer: list[int] = []
    reader: list[int] = []
    found = sharded_buckets(plan)
    if not found:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    at = {(int(plan.program[i]), plan.text(i)): i for i in np.flatnonzero(plan.kind == OpKind.COLLECTIVE).tolist()}
    g = plan.graph
    updates = {p: int(inst[i, p]) for i, n in enumerate(g.nodes) if n.kind is Once.UPDATE for p in n.groups}
    for b in found:
        parts = {(g.entries[k].stage, g.entries[k].name) for k in b.members}
        ws = [i for i, n in enumerate(g.nodes) if n.kind is Pass.W and (n.stage, n.part) in parts]
        for mb in range(g.mbs) if ws else ():
            last = int(inst[ws, mb].max())
            p = int(plan.program[last])
            row = at.get((p, f"{b.stage}RS{mb}/{b.name}"))
            if row is None:
                raise illegal(f"program {p}: {b.stage}RS{mb}/{b.name} is missing", f"reduce behind {plan.text(last)}")
            writer += [last, row]
            reader += [row, updates[p]]
        if b.replica.zero == 3:
            _gather_needs(plan, inst, b, parts, writer, reader)
    return np.array(writer, dtype=np.int64), np.array(reader, dtype=np.int64)


def _gather_needs(
    plan: Plan, inst: IntArray, b: Bucket, parts: set[tuple[int, str]], writer: list[int], reader: list[int]
) -> None:
    g = plan.graph
    nodes = [i for i, n in enumerate(g.nodes) if isinstance(n.kind, Pass) and n.stream == COMPUTE and (n.stage, n.part) in parts]
    shapes = [k for k, s in enumerate(plan.shapes) if s.text.startswith(f"{b.stage}AG_") and s.text.endswith(f"/{b.name}")]
    gathers = np.flatnonzero(np.isin(plan.shape, shapes))
    users = np.unique(inst[nodes, : g.mbs])
    for row in users.tolist():
        k = int(np.searchsorted(gathers, row)) - 1
        if k < 0 or plan.program[gathers[k]] != plan.program[row]:
            raise illegal(f"program {int(plan.program[row])}: nothing gathers {b.key} before {plan.text(row)}")
        writer.append(int(gathers[k]))
        reader.append(row)
