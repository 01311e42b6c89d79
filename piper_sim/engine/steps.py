"""What one step leaves to the next: which op of a step waits for which op of the step before."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from ir.core.order import IntArray
from ir.graph.graph import PerStepOp
from ir.graph.sync import buckets
from ir.graph.zero import part_nodes
from ir.plan.plan import OpKind, Plan


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
    gathers = [i for i, n in enumerate(plan.graph.nodes) if n.kind is PerStepOp.GATHER]
    if not gathers:
        return row, on
    readers = {b.key: part_nodes(plan.graph, b) for b in buckets(plan.graph)}
    covered = _covered(plan)
    for i in gathers:
        n = plan.graph.nodes[i]
        reads, makes = (_rows(plan, covered, nodes) for nodes in (readers[n.bucket], [i]))
        for p in n.groups:
            row.append(int(reads[plan.program[reads] == p][0]))
            on.append(int(makes[plan.program[makes] == p][0]))
    return row, on


def _covered(plan: Plan) -> dict[int, list[int]]:
    """node -> the shapes that cover it."""
    out: dict[int, list[int]] = defaultdict(list)
    for k, s in enumerate(plan.shapes):
        for node in {n for n, _ in s.covers}:
            out[node].append(k)
    return out


def _rows(plan: Plan, covered: Mapping[int, list[int]], nodes: Sequence[int]) -> IntArray:
    """The ops that cover any of the nodes."""
    wanted = np.zeros(len(plan.shapes), dtype=np.bool_)
    wanted[[k for n in nodes for k in covered.get(n, ())]] = True
    return np.flatnonzero(wanted[plan.shape])
