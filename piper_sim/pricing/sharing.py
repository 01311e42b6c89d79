"""The links of a plan: every rank's NVLink port and NIC, each way, and the uplinks of leaf switches."""

from dataclasses import dataclass

import numpy as np

from cost_models.links.loads import LinkBytes, link_bytes
from ir.core.order import FloatArray, IntArray
from ir.core.work import MessageKind
from ir.plan.plan import OpKind, OpShape, Plan
from piper_sim.engine import Links
from piper_sim.folding import DevicePlacement, RankClasses, RankSlot, RankSpread
from piper_sim.folding.uses import CollectiveUse, message_of
from piper_sim.pricing.costs import CostModel

PORT_OUT, PORT_IN, NIC_OUT, NIC_IN, OWN = range(5)
Row = tuple[tuple[int, float], ...]


def leaves(ground: DevicePlacement, leaf_nodes: int | None) -> IntArray:
    """[program, position] leaf of each rank; as attributes, they tell positions of different leaves apart."""
    return ground.node // leaf_nodes if leaf_nodes else np.zeros_like(ground.node)


def links(plan: Plan, classes: RankClasses, model: CostModel, duration: FloatArray) -> Links:
    """What each op of the unfolded plan loads. duration: seconds of its ops, alone.

    Links of program p of class k: four of its own, (k * programs + p) * OWN onwards; behind all these two per leaf, up
    and down, which all ranks under it share. Messages inside compute ops load nothing.
    """
    found = _Finder(plan, classes, model)
    n, shapes = len(plan), len(plan.shapes)
    key = plan.program * shapes + plan.shape
    first = np.full(int(key.max(initial=0)) + 1, -1, dtype=np.int64)
    first[key[::-1]] = np.arange(n)[::-1]
    rows: dict[Row, int] = {}
    which = np.full((classes.count, len(first)), -1, dtype=np.int64)
    for x in np.flatnonzero(first >= 0).tolist():
        program, shape = divmod(x, shapes)
        if plan.shapes[shape].kind is not OpKind.COMPUTE:
            for k in range(classes.count):
                row = found.row(k, program, plan.shapes[shape], float(duration[k * n + first[x]]))
                if row:
                    which[k, x] = rows.setdefault(row, len(rows))
    at = np.concatenate([[0], np.cumsum([len(r) for r in rows])]).astype(np.int64)
    entries = [e for r in rows for e in r]
    resource = np.array([r for r, _ in entries], dtype=np.int64)
    load = np.array([x for _, x in entries], dtype=np.float64)
    return Links(which[:, key].ravel(), at, resource, load, found.count)


@dataclass(frozen=True)
class _Way:
    """Which directions a message uses, and which part of what crosses a rank's NIC leaves its leaf."""

    out: bool
    into: bool
    away: float


class _Finder:
    """Rows of loads."""

    def __init__(self, plan: Plan, classes: RankClasses, model: CostModel) -> None:
        hw = model.hardware
        self.plan, self.classes, self.model = plan, classes, model
        self.leaf = leaves(model.ground, hw.leaf_nodes)
        self.uplinks = classes.count * plan.programs * OWN
        self.count = self.uplinks + 2 * (int(self.leaf.max()) + 1)
        nics = (hw.leaf_nodes or 0) * model.per_node
        self.uplink = nics * model.fabric.nic / hw.oversubscription if nics else float("inf")

    def row(self, k: int, program: int, s: OpShape, seconds: float) -> Row:
        """(link, load) of an op of a shape, for the ranks of class k that run a program."""
        seat = RankSlot(program, int(self.classes.first[k]))
        if s.kind in (OpKind.SEND, OpKind.RECV):
            moved, pair, way = self._transfer(s, seat)
        else:
            moved, pair, way = self._collective(s, seat)
        port, nic = moved.loads(seconds, self.model.fabric, pair)
        own = (k * self.plan.programs + program) * OWN
        out = [(own + PORT_OUT, port), (own + NIC_OUT, nic)] if way.out else []
        out += [(own + PORT_IN, port), (own + NIC_IN, nic)] if way.into else []
        away = moved.nic * way.away * float(self.classes.size[k])
        if away and seconds > 0:
            up = self.uplinks + 2 * int(self.leaf[program, seat.position])
            load = away / seconds / self.uplink
            out += [(up, load)] if way.out else []
            out += [(up + 1, load)] if way.into else []
        return tuple((r, x) for r, x in out if x > 0)

    def _transfer(self, s: OpShape, seat: RankSlot) -> tuple[LinkBytes, bool, _Way]:
        near = bool(self.model.ground.near(seat.program, s.peer)[seat.position])
        away = self.leaf[seat.program, seat.position] != self.leaf[s.peer, seat.position]
        send = s.kind is OpKind.SEND
        return link_bytes(message_of(self.plan, s), 2, 2 if near else 1), True, _Way(send, not send, float(away))

    def _collective(self, s: OpShape, seat: RankSlot) -> tuple[LinkBytes, bool, _Way]:
        message, use = message_of(self.plan, s), CollectiveUse.of_op(self.plan, s, self.plan.programs)
        spread = self.model.ground.spread(use, seat)
        moved = link_bytes(message, spread.ranks, spread.per_node, self.model.fabric.deduplicate)
        return moved, False, _Way(True, True, self._away(use, seat, spread, message.kind))

    def _away(self, use: CollectiveUse, seat: RankSlot, spread: RankSpread, kind: MessageKind) -> float:
        """The part of a rank's network traffic that leaves its leaf: a ring crosses once, an all-to-all goes evenly."""
        ground = self.model.ground
        label = ground.positions.group(use.axes)
        mine = np.flatnonzero(label == label[seat.position])
        programs = list(use.programs) or [seat.program]
        home = self.leaf[seat.program, seat.position]
        near = len(np.unique(ground.node[programs][:, mine][self.leaf[programs][:, mine] == home]))
        if near == spread.nodes:
            return 0.0
        return (spread.nodes - near) / (spread.nodes - 1) if kind is MessageKind.ALL_TO_ALL else 1.0 / near
