"""What engines run of a priced plan: unfolded to replicas that differ, with host, slowdowns, and loads of links."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from cost_models import DeviceHardware, kernel_seconds
from cost_models.compute import interference
from cost_models.compute.host import HostCosts
from cost_models.compute.roofline import arithmetic_seconds, memory_seconds
from cost_models.links.loads import LinkBytes, link_bytes
from cost_models.profile.pairs import KernelPair
from ir.core.order import FloatArray, IntArray
from ir.core.work import Kernel, KernelKind, MessageKind
from ir.graph.graph import GraphNode, PerStepOp
from ir.plan.kept import once_per_plan
from ir.plan.plan import OpKind, OpShape, Plan
from piper_sim.engine import EngineScenario, KernelInterference, Links
from piper_sim.folding import DevicePlacement, RankClasses, RankSlot, RankSpread, carry, classes, unfold
from piper_sim.folding.uses import CollectiveUse, message_of
from piper_sim.pricing.costs import CostModel
from piper_sim.pricing.hosts import ahead, inline, one_queue
from piper_sim.pricing.routing import ExpertRouting
from piper_sim.pricing.structure import computed, different_nodes, shape_kinds


def classes_of(model: CostModel, plan: Plan, routing: ExpertRouting | None) -> RankClasses:
    """Which replicas of a plan are equal in all that its costs are made of."""
    more: list[IntArray] = [] if routing is None else [routing.colours()[None]]
    if model.job.costs.interference == "maxmin":
        more.append(leaves(model.ground, model.hardware.leaf_nodes))
    return classes(plan, model.ground, np.concatenate(more) if more else None)


def scenario_of(model: CostModel, plan: Plan, replicas: RankClasses, duration: FloatArray) -> EngineScenario:
    """The plan unfolded to `replicas`, with what the job asks for. duration: seconds of its ops, alone."""
    costs, whole = model.job.costs, unfold(plan, replicas, model.mesh)
    host = None
    if costs.host_model == "inline":
        host = inline(whole, 0.0 if "host" in costs.free else model.measured.host_s)
    elif "host" not in costs.free:
        host = ahead(whole, HostCosts.of(model.hardware, costs.cuda_graphs))
        host = one_queue(whole, host) if costs.host_model == "one-queue" else host
    slow = None if costs.interference == "none" else pairwise(whole, model.hardware, model.measured.pairs, model.kernel)
    found = links(plan, replicas, model, duration) if costs.interference == "maxmin" else None
    return EngineScenario(whole, *carry(plan, replicas), host=host, slow=slow, links=found)


def pairwise(
    plan: Plan,
    hw: DeviceHardware,
    pairs: Mapping[str, KernelPair] | None = None,
    seconds: Callable[[Kernel], float] | None = None,
) -> KernelInterference:
    """Compute ops in classes by the share of their time that is bound by arithmetic, in eighths; 0 is all memory.

    Communication ops in the classes of `COMM_KINDS`. A class between the ends is slowed in proportion. pairs: measured
    slowdowns, by `profile_pairs.pair_key`. seconds: of kernels, if they are known.
    """
    slow = interference.KernelSlowdown.of(hw, pairs)
    share = np.arange(interference.GRAIN + 1)[:, None] / interference.GRAIN

    def mixed(rows: interference.Rows) -> FloatArray:
        arithmetic, memory = (np.array(r) for r in rows)
        return np.asarray(share * arithmetic + (1 - share) * memory)

    return KernelInterference(
        _classes(plan, hw, seconds or (lambda k: kernel_seconds(k, hw))),
        mixed(slow.held),
        mixed(slow.moving),
        np.ascontiguousarray(mixed(slow.wire).T),
    )


def _classes(plan: Plan, hw: DeviceHardware, seconds: Callable[[Kernel], float]) -> IntArray:
    """[op] its class."""
    nodes, which = different_nodes(plan, named=False)
    bound = np.array([_bound(n, hw, seconds) for n in nodes])[which]
    shape, covered = computed(plan)
    arithmetic, total = (np.bincount(shape, bound[covered, k], len(plan.shapes)) for k in (0, 1))
    share = np.divide(arithmetic, total, out=np.zeros_like(total), where=total > 0)
    bound_by = np.rint(interference.GRAIN * share).astype(np.int64)
    return np.where(shape_kinds(plan) == OpKind.COMPUTE, bound_by, _comm_classes(plan))[plan.shape]


@once_per_plan
def _comm_classes(plan: Plan) -> IntArray:
    """[shape] class of a communication op."""
    comm = (s.kind is not OpKind.COMPUTE and interference.comm_class(message_of(plan, s).kind) for s in plan.shapes)
    return np.array([int(c) for c in comm], dtype=np.int64)


def _bound(n: GraphNode, hw: DeviceHardware, seconds: Callable[[Kernel], float]) -> tuple[float, float]:
    """(seconds bound by arithmetic, all seconds) of a node's kernels."""
    if n.kind is PerStepOp.UPDATE or n.message is not None:
        return 0.0, 0.0
    found = [(seconds(k), _arithmetic(k, hw)) for k in n.work]
    return sum(t * mine for t, mine in found), sum(t for t, _ in found)


def _arithmetic(k: Kernel, hw: DeviceHardware) -> float:
    """1: bound by arithmetic, 0: by memory; of attention, which starts block by block, what its lost SMs come to where
    products lose more.
    """
    if arithmetic_seconds(k, hw) < memory_seconds(k.bytes, hw):
        return 0.0
    held = interference.products_held(hw) if k.kind is KernelKind.ATTENTION else 0.0
    return interference.fewer_sms(hw) / held if held else 1.0


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
