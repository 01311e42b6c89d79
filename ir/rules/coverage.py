"""Every node of every microbatch runs exactly once, on the program it is placed on."""

from __future__ import annotations

import numpy as np

from ir.graph import illegal
from ir.order import IntArray
from ir.plan import Plan


def instances(plan: Plan) -> IntArray:
    """[node, mb] -> op, from the plan's rows alone (once-nodes: [node, program] in the same array's columns).

    Raises PiperError (illegal_plan): an op dropped, repeated, or on another program than its placement.
    """
    graph = plan.graph
    wide = max(graph.mbs, plan.programs)
    inst = np.full((len(graph.nodes), wide), -1, dtype=np.int64)
    once = np.array([n.once for n in graph.nodes] or [False])
    widest = max((len(s.covers) for s in plan.shapes), default=0)
    for c in range(widest):
        node = np.array([s.covers[c][0] if len(s.covers) > c else -1 for s in plan.shapes], dtype=np.int64)
        member = np.array([s.covers[c][1] if len(s.covers) > c else 0 for s in plan.shapes], dtype=np.int64)
        rows = np.flatnonzero(node[plan.shape] >= 0)
        n = node[plan.shape[rows]]
        column = np.where(member[plan.shape[rows]] == 0, plan.mb[rows], plan.mb2[rows])
        column = np.where(once[n], plan.program[rows], column)
        if (column < 0).any() or (column >= wide).any():
            row = int(rows[np.argmax((column < 0) | (column >= wide))])
            raise illegal(f"program {int(plan.program[row])}: {plan.text(row)} names a microbatch that does not exist")
        taken = inst[n, column] >= 0
        inst[n, column] = rows
        again = taken | (inst[n, column] != rows)
        if again.any():
            row = int(rows[np.argmax(again)])
            raise illegal(f"program {int(plan.program[row])}: {plan.text(row)} runs twice", "keep one of them")
    _complete(plan, inst, once)
    return inst


def _complete(plan: Plan, inst: IntArray, once: np.ndarray) -> None:  # type: ignore[type-arg]
    expected = np.full_like(inst, -1)
    for i, n in enumerate(plan.graph.nodes):
        for s in n.spans:
            if s.mbs is None:
                expected[i, s.group] = s.group
            else:
                expected[i, s.mbs.start : s.mbs.stop] = s.group
    got = np.where(inst >= 0, plan.program[np.maximum(inst, 0)], -1)
    wrong = np.argwhere(got != expected)
    if not len(wrong):
        return
    i, column = wrong[0].tolist()
    text = plan.graph.nodes[i].text(None if once[i] else column)
    if got[i, column] < 0:
        raise illegal(
            f"program {int(expected[i, column])}: {text} is missing", f"add it to program {int(expected[i, column])}"
        )
    where = f"it is placed on {int(expected[i, column])}" if expected[i, column] >= 0 else "it has no place there"
    raise illegal(f"program {int(got[i, column])} runs {text}, but {where}")
