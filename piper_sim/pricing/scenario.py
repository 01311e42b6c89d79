"""What engines run of a priced plan: unfolded to the replicas that differ, with its host, interference and links."""

import numpy as np

from cost_models.compute.host import HostCosts
from ir.core.order import FloatArray, IntArray
from ir.plan.plan import Plan
from piper_sim.engine import EngineScenario
from piper_sim.folding import RankClasses, carry, classes, unfold
from piper_sim.pricing.costs import CostModel
from piper_sim.pricing.hosts import ahead, inline, one_queue
from piper_sim.pricing.interference import pairwise
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
