"""Editing plans by their columns: other rows, other waits, other buffers. What an edit breaks is left broken."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ir.core.order import IntArray
from ir.plan.plan import Buffers, OpLists, Plan


def rearranged(plan: Plan, rows: Sequence[int], program: Sequence[int] | None = None, **shapes: Any) -> Plan:
    """A plan of these rows in this order (old indices; one may be missing or there twice), on these programs.

    Waits, partners and buffers follow their ops to the first place where these stand now; those of missing ops go.
    """
    order = np.array(rows, dtype=np.int64)
    on = plan.program[order] if program is None else np.array(program, dtype=np.int64)
    by = np.argsort(on, kind="stable")
    order, on = order[by], on[by]
    new = np.full(len(plan), -1, dtype=np.int64)
    new[order[::-1]] = np.arange(len(order))[::-1]
    first = new[order] == np.arange(len(order))
    items = [[int(new[w]) for w in plan.waits.row(int(i)).tolist() if new[w] >= 0] for i in order]
    partner = np.where(plan.partner[order] >= 0, new[plan.partner[order]], -1)
    return Plan(
        graph=plan.graph,
        header=plan.header,
        shapes=shapes.get("shapes", plan.shapes),
        program=on,
        shape=plan.shape[order],
        mb=plan.mb[order],
        mb2=plan.mb2[order],
        waits=csr(items),
        partner=np.where(first, partner, -1),
        collective=np.where(first, plan.collective[order], -1),
        buffers=moved_buffers(plan.buffers, new),
        unit=plan.unit[order],
    )


def csr(rows: Sequence[Sequence[int]]) -> OpLists:
    """From lists."""
    row = np.repeat(np.arange(len(rows)), [len(r) for r in rows])
    item = np.array([x for r in rows for x in sorted(r)], dtype=np.int64)
    return OpLists.of(len(rows), row.astype(np.int64), item)


def moved_buffers(b: Buffers, new: IntArray) -> Buffers:
    """Buffers after their ops have moved; those whose op is gone are gone, and so are frees by ops that are gone."""
    slot = np.where(b.node < 0, new[b.slot * (b.node < 0)], b.slot)
    alloc = new[b.alloc]
    free = np.where(b.free >= 0, new[b.free], -1)
    keep = (alloc >= 0) & (slot >= 0)
    columns = {f: getattr(b, f) for f in b.__dataclass_fields__} | {"slot": slot, "alloc": alloc, "free": free}
    return Buffers(**{k: v[keep] for k, v in columns.items()})


def with_waits(plan: Plan, drop: tuple[int, int] | None = None, add: tuple[int, int] | None = None) -> Plan:
    """The plan with one wait less or more."""
    rows = [plan.waits.row(i).tolist() for i in range(len(plan))]
    if drop is not None:
        rows[drop[0]].remove(drop[1])
    if add is not None:
        rows[add[0]].append(add[1])
    return replace(plan, waits=csr(rows))


def with_buffers(plan: Plan, **columns: IntArray) -> Plan:
    """The plan with other buffer columns."""
    return replace(plan, buffers=replace(plan.buffers, **columns))


def doubled_buffer(plan: Plan, k: int) -> Plan:
    """The plan with one buffer listed twice: written twice, freed twice."""
    index = np.append(np.arange(len(plan.buffers)), k)
    return with_buffers(plan, **{f: getattr(plan.buffers, f)[index] for f in plan.buffers.__dataclass_fields__})


def differences(a: Plan, b: Plan) -> list[str]:
    """The columns in which two plans differ."""
    out = [f for f in ("program", "shape", "mb", "mb2", "partner", "collective", "unit") if _differ(a, b, f)]
    out += [f"waits.{f}" for f in ("at", "items") if _differ(a.waits, b.waits, f)]
    out += [f"buffers.{f}" for f in a.buffers.__dataclass_fields__ if _differ(a.buffers, b.buffers, f)]
    if a.shapes != b.shapes:
        out.append("shapes")
    if dict(a.header) != dict(b.header):
        out.append("header")
    return out


def _differ(a: object, b: object, column: str) -> bool:
    return not np.array_equal(getattr(a, column), getattr(b, column))
