"""What the host of a program waits for by itself: to read numbers the device has made, and to execute compute."""

import numpy as np

from ir.core.order import IntArray
from ir.graph.graph import COMPUTE, COUNTS
from ir.plan.plan import OpKind, OpLists, Plan


def host_reads(plan: Plan) -> tuple[IntArray, IntArray]:
    """(ops, what the host must have read before it can dispatch each): exchanges of rows, and of their counts.

    Without the counts it cannot say how many rows go where. Other passes of a microbatch know them from its F.
    """
    nodes = plan.graph.nodes
    counting = {i for i, n in enumerate(nodes) if n.message is not None and n.part.endswith(f".{COUNTS}")}
    sized = (e for e in plan.graph.edges if e.src in counting and nodes[e.dst].stream != COMPUTE)
    of_node = np.full((2, len(nodes)), -1, dtype=np.int64)
    for k, e in enumerate(sized):
        of_node[0, e.src], of_node[1, e.dst] = k, k
    first = [s.covers[0][0] if s.kind is OpKind.COLLECTIVE and s.covers else -1 for s in plan.shapes]
    alone = np.array(first, dtype=np.int64)
    of_shape = np.where(alone >= 0, of_node[:, alone], -1)
    found = []
    for pair in of_shape[:, plan.shape]:  # by pair and microbatch; where programs have copies, these in order
        ops = np.flatnonzero(pair >= 0)
        found.append(ops[np.argsort(pair[ops] * plan.graph.mbs + plan.mb[ops], kind="stable")])
    return found[1], found[0]


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
