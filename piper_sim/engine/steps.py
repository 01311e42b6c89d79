"""What one step leaves to the next: which op of a step waits for which op of the step before."""

from __future__ import annotations

import numpy as np

from ir.graph import Once
from ir.lower.zero import part_nodes
from ir.order import IntArray
from ir.plan import OpKind, Plan
from ir.sync import buckets


def carried(plan: Plan) -> tuple[IntArray, IntArray]:
    """(ops, ops of the step before that they wait for).

    The first op that reads a bucket's weights waits for their gather. Communication dispatched before a program's first
    compute op follows the last compute op of the step before, as it follows the compute op before it elsewhere.
    """
    row, on = _weights(plan)
    compute = np.flatnonzero(plan.kind == OpKind.COMPUTE)
    first = np.searchsorted(compute, plan.bounds)
    for p, (a, b) in enumerate(zip(first.tolist(), first[1:].tolist(), strict=False)):
        if a < b:
            early = range(int(plan.bounds[p]), int(compute[a]))
            row += early
            on += [int(compute[b - 1])] * len(early)
    return np.array(row, dtype=np.int64), np.array(on, dtype=np.int64)


def _weights(plan: Plan) -> tuple[list[int], list[int]]:
    row: list[int] = []
    on: list[int] = []
    gathers = [i for i, n in enumerate(plan.graph.nodes) if n.kind is Once.GATHER]
    if not gathers:
        return row, on
    readers = {b.key: part_nodes(plan.graph, b) for b in buckets(plan.graph)}
    for i in gathers:
        n = plan.graph.nodes[i]
        own = readers.get(f"{n.stage}/{n.part}") or readers[f"{n.stage}/{n.part.rpartition('.')[0]}"]
        reads, makes = (_rows(plan, nodes) for nodes in (set(own), {i}))
        for p in n.groups:
            row.append(int(reads[plan.program[reads] == p][0]))
            on.append(int(makes[plan.program[makes] == p][0]))
    return row, on


def _rows(plan: Plan, nodes: set[int]) -> IntArray:
    """The ops that cover any of the nodes."""
    covers = np.array([any(node in nodes for node, _ in s.covers) for s in plan.shapes])
    return np.flatnonzero(covers[plan.shape])
