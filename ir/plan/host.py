"""What the host of a program waits for by itself: to read numbers the device has made, and to execute compute."""

import numpy as np

from ir.core.order import IntArray
from ir.graph.graph import COMPUTE, COUNTS, Graph
from ir.plan.plan import OpKind, OpLists, Plan


def host_reads(plan: Plan) -> tuple[IntArray, IntArray]:
    """(ops, what the host must have read before it can dispatch each): exchanges of rows, and of their counts.

    Without the counts it cannot say how many rows go where. Other passes of a microbatch know them from its F.
    """
    pairs = _pairs(plan.graph)
    of_node = np.full((2, len(plan.graph.nodes)), -1, dtype=np.int64)
    for k, (counts, rows) in enumerate(pairs):
        of_node[0, counts], of_node[1, rows] = k, k
    first = [s.covers[0][0] if s.kind is OpKind.COLLECTIVE and s.covers else -1 for s in plan.shapes]
    alone = np.array(first, dtype=np.int64)
    of_shape = np.where(alone >= 0, of_node[:, alone], -1)
    on, ops = (_sorted(plan, column[plan.shape]) for column in of_shape)
    return ops, on


def _pairs(graph: Graph) -> list[tuple[int, int]]:
    """(exchange of counts, exchange that is sized by them) of a graph, as nodes."""
    counts = {i for i, n in enumerate(graph.nodes) if n.message is not None and n.part.endswith(f".{COUNTS}")}
    return [(e.src, e.dst) for e in graph.edges if e.src in counts and graph.nodes[e.dst].stream != COMPUTE]


def _sorted(plan: Plan, pair: IntArray) -> IntArray:
    """The ops of some pair, by pair and microbatch; where programs have copies, these in order."""
    ops = np.flatnonzero(pair >= 0)
    return np.asarray(ops[np.argsort(pair[ops] * plan.graph.mbs + plan.mb[ops], kind="stable")])


def held(plan: Plan) -> OpLists:
    """The plan's waits, and for each op what holds a host that executes compute itself before it can post the op.

    That is the compute op dispatched before it in its program, and since then the last it had to read for an exchange.
    """
    ops = np.arange(len(plan))
    last = np.maximum.accumulate(np.where(plan.kind == OpKind.COMPUTE, ops, -1))
    before = np.concatenate([[-1], last])[:-1]
    at, on = host_reads(plan)
    read = np.full(len(plan), -1, dtype=np.int64)
    read[at] = on
    read = np.maximum.accumulate(read)
    read = np.where(read > before, read, -1)
    both = [np.flatnonzero((x >= 0) & (plan.program[x] == plan.program)) for x in (before, read)]
    rows = np.concatenate([plan.waits.rows(), *both])
    return OpLists.of(len(plan), rows, np.concatenate([plan.waits.items, before[both[0]], read[both[1]]]))
