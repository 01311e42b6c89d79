"""What of a plan has a price, each different thing once: nodes, messages, ops. The same for all costs of one plan."""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from ir.core.order import IntArray
from ir.core.work import Message
from ir.graph.graph import GraphNode
from ir.plan.kept import once_per_plan
from ir.plan.plan import OpKind, Plan, covers_of
from piper_sim.folding import DevicePlacement, RankSlot, RankSpread
from piper_sim.folding.uses import joined, message_of, uses


class CostShare(IntEnum):
    """What a compute op's seconds are spent on."""

    COMPUTE = 0
    RECOMPUTE = 1
    TP = 2
    CP = 3
    OPTIMIZER = 4


KERNELS = [CostShare.COMPUTE, CostShare.RECOMPUTE, CostShare.OPTIMIZER]


@once_per_plan
def different_nodes(plan: Plan, named: bool) -> tuple[list[GraphNode], IntArray]:
    """(nodes that differ in what they take, [node] which of them). named: all do, as they were measured by name."""
    # The very same work, as layers repeat.
    keys = [
        i if named else (n.kind, id(n.work), id(n.inline), n.numel, n.matrices, n.others, n.message is None)
        for i, n in enumerate(plan.graph.nodes)
    ]
    return _different(plan, keys)


@once_per_plan
def different_messages(plan: Plan) -> tuple[list[GraphNode], IntArray]:
    """(nodes that differ in the message they are, [node] which of them): one that is none stands for all such."""
    keys = [None if n.message is None else (n.message, joined(n)) for n in plan.graph.nodes]
    return _different(plan, keys)


def _different(plan: Plan, keys: Sequence[object]) -> tuple[list[GraphNode], IntArray]:
    first = dict(zip(reversed(keys), reversed(plan.graph.nodes), strict=True))
    number = {key: k for k, key in enumerate(first)}
    return list(first.values()), np.array([number[k] for k in keys], dtype=np.int64)


@once_per_plan
def different_ops(plan: Plan) -> tuple[IntArray, IntArray, IntArray]:
    """(program, shape) of all ops that differ in more than their microbatch, and [op] which of them."""
    key = plan.program * len(plan.shapes) + plan.shape
    found = np.flatnonzero(np.bincount(key))
    which = np.zeros(int(key.max(initial=0)) + 1, dtype=np.int64)
    which[found] = np.arange(len(found))
    program, shape = np.divmod(found, len(plan.shapes))
    return program, shape, which[key]


@once_per_plan
def different_seats(plan: Plan, ground: DevicePlacement, first: tuple[int, ...]) -> tuple[list[RankSlot], IntArray]:
    """(ranks whose groups lie differently, [class, program] as which of them): one where all groups lie alike.

    first: the position that stands for each class.
    """
    found = uses(plan, ground.positions.programs)
    joint, own = ([u for u in found if bool(u.programs) is j] for j in (True, False))
    number: dict[tuple[RankSpread, ...], int] = {}
    seats: list[RankSlot] = []
    which = np.empty((len(first), plan.programs), dtype=np.int64)
    for k, q in enumerate(first):
        lie = [ground.spread(u, RankSlot(0, q)) for u in joint]
        for p in range(plan.programs):
            seat = RankSlot(p, q)
            key = (*lie, *(ground.spread(u, seat) for u in own))
            if key not in number:
                number[key] = len(seats)
                seats.append(seat)
            which[k, p] = number[key]
    return seats, which


@once_per_plan
def shape_kinds(plan: Plan) -> IntArray:
    """[shape] its `OpKind`."""
    return np.array([s.kind for s in plan.shapes], dtype=np.int64)


@once_per_plan
def transfers(plan: Plan) -> tuple[IntArray, IntArray, list[Message], IntArray]:
    """(of `different_ops` the sends and receives, their peers, messages that differ, which of these each carries)."""
    _, shape, _ = different_ops(plan)
    kinds = shape_kinds(plan)[shape]
    ops = np.flatnonzero((kinds == OpKind.SEND) | (kinds == OpKind.RECV))
    carried = [message_of(plan, plan.shapes[s]) for s in shape[ops]]
    number = {m: k for k, m in enumerate(dict.fromkeys(carried))}
    peer = np.array([plan.shapes[s].peer for s in shape[ops]], dtype=np.int64)
    return ops, peer, list(number), np.array([number[m] for m in carried], dtype=np.int64)


@once_per_plan
def collectives(plan: Plan) -> tuple[IntArray, IntArray, IntArray, list[Message], IntArray]:
    """(shapes of collectives that are nodes, the first node of each, those of messages of their own, messages that
    differ, which of these each carries)."""
    shapes = [(i, s) for i, s in enumerate(plan.shapes) if s.kind is OpKind.COLLECTIVE]
    nodes = [(i, s.covers[0][0]) for i, s in shapes if s.covers]
    own = [(i, s.message) for i, s in shapes if s.message is not None and not s.covers]
    number = {m: k for k, m in enumerate(dict.fromkeys(m for _, m in own))}
    alone = [(i, number[m]) for i, m in own]
    columns = (np.array(pairs, dtype=np.int64).reshape(-1, 2).T for pairs in (nodes, alone))
    (of_nodes, first), (of_messages, carried) = columns
    return of_nodes, first, of_messages, list(number), carried


@once_per_plan
def computed(plan: Plan) -> tuple[IntArray, IntArray]:
    """(shape, node) of all that compute ops cover, shape by shape."""
    shape, _, node, _ = covers_of(plan.shapes).T
    mine = shape_kinds(plan)[shape] == OpKind.COMPUTE
    return shape[mine], node[mine]
