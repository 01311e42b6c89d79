"""What engines run of a priced plan: unfolded to the replicas that differ, with host, slowdowns and links."""

from collections.abc import Mapping

import numpy as np

from cost_models import DeviceHardware, kernel_seconds
from cost_models.compute.host import HostCosts
from cost_models.compute.interference import GRAIN, KernelSlowdown, Rows, comm_class
from cost_models.compute.roofline import arithmetic_seconds, memory_seconds
from cost_models.profile.pairs import KernelPair
from ir.core.order import FloatArray, IntArray
from ir.core.work import Kernel, Work
from ir.graph.graph import GraphNode, PerStepOp
from ir.plan.plan import OpKind, OpShape, Plan
from piper_sim.engine import EngineScenario, KernelInterference
from piper_sim.folding import RankClasses, carry, classes, unfold
from piper_sim.folding.uses import message_of
from piper_sim.pricing.costs import CostModel
from piper_sim.pricing.hosts import ahead, inline, one_queue
from piper_sim.pricing.routing import ExpertRouting
from piper_sim.pricing.sharing import leaves, links


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
    slow = None if costs.interference == "none" else pairwise(whole, model.hardware, model.measured.pairs)
    found = links(plan, replicas, model, duration) if costs.interference == "maxmin" else None
    return EngineScenario(whole, *carry(plan, replicas), host=host, slow=slow, links=found)


def pairwise(plan: Plan, hw: DeviceHardware, pairs: Mapping[str, KernelPair] | None = None) -> KernelInterference:
    """Compute ops in classes by the share of their time that is bound by arithmetic, in eighths; 0 is all memory.

    Communication ops in the classes of `COMM_KINDS`. A class between the ends is slowed in proportion. pairs: measured
    slowdowns, by `profile_pairs.pair_key`.
    """
    slow = KernelSlowdown.of(hw, pairs)
    share = np.arange(GRAIN + 1)[:, None] / GRAIN

    def mixed(rows: Rows) -> FloatArray:
        arithmetic, memory = (np.array(r) for r in rows)
        return np.asarray(share * arithmetic + (1 - share) * memory)

    return KernelInterference(
        _classes(plan, hw), mixed(slow.held), mixed(slow.moving), np.ascontiguousarray(mixed(slow.wire).T)
    )


def _classes(plan: Plan, hw: DeviceHardware) -> IntArray:
    """[op] its class."""
    known: dict[Work, tuple[float, float]] = {}
    bound = [_bound(n, hw, known) for n in plan.graph.nodes]
    out = [_class(plan, s, bound) for s in plan.shapes]
    return np.array(out, dtype=np.int64)[plan.shape]


def _class(plan: Plan, s: OpShape, bound: list[tuple[float, float]]) -> int:
    if s.kind is OpKind.COMPUTE:
        arithmetic, total = (sum(bound[n][k] for n, _ in s.covers) for k in (0, 1))
        return round(GRAIN * arithmetic / total) if total else 0
    return comm_class(message_of(plan, s).kind)


def _bound(n: GraphNode, hw: DeviceHardware, known: dict[Work, tuple[float, float]]) -> tuple[float, float]:
    """(seconds bound by arithmetic, all seconds) of a node's kernels."""
    if n.kind is PerStepOp.UPDATE or n.message is not None:
        return 0.0, 0.0
    if n.work not in known:
        seconds = [(kernel_seconds(k, hw), _arithmetic(k, hw)) for k in n.work]
        known[n.work] = sum(t for t, mine in seconds if mine), sum(t for t, _ in seconds)
    return known[n.work]


def _arithmetic(k: Kernel, hw: DeviceHardware) -> bool:
    return arithmetic_seconds(k, hw) >= memory_seconds(k.bytes, hw)
