"""What ops take too long, and why: the same plan priced again without slow ranks, uneven routing, slow links."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from cost_models import DeviceHardware
from ir.core.order import BoolArray, FloatArray, IntArray
from ir.graph.graph import GraphNode
from ir.job import Job
from ir.plan.plan import OpKind, Plan
from piper_sim.pricing.costs import KERNELS, CostModel, CostShare, OpCosts
from piper_sim.pricing.prepare import hardware_of
from piper_sim.pricing.routing import price
from piper_sim.study.explain.chain import ticks
from piper_sim.study.planned import PlannedJob

REMOVED = ("straggler", "expert_skew", "link")  # in the order in which they are taken away
INNER = [CostShare.TP, CostShare.CP]
_LINK_KEYS = ("nvlink_", "nic_", "dispatch_", "oversubscription", "collective_launch_us")


@dataclass(frozen=True, eq=False)
class OpExcess:
    """Ticks by op of the unfolded plan.

    over: cause of `REMOVED` -> what the op takes longer because of it, messages inside it too. inner: the same of its
    messages inside alone; rest: what these take anyway. load: [program] what its passes take in a step with none of
    the causes; even: [op] what of that is this op's. recomputed: [op] share of an op that is forward done again.
    """

    over: dict[str, IntArray]
    inner: dict[str, IntArray]
    rest: IntArray
    load: IntArray
    even: IntArray
    recomputed: FloatArray


def excess_of(p: PlannedJob, costs: OpCosts) -> OpExcess:
    """Price the plan of a job again, each time with one cause less, and take differences."""
    job, plan = p.prepared.job, p.plan
    worlds = [costs]
    calm = _model(p, replace(job, cluster=replace(job.cluster, speed={})), p.hardware)
    if (p.model.ground.speed != 1).any():
        worlds.append(price(p.routing, plan, calm, p.classes))
    else:
        worlds.append(costs)
    worlds.append(worlds[-1] if p.routing is None else calm.price(plan, p.classes))
    usual = usual_links(job)
    if usual == job:
        worlds.append(worlds[-1])
    else:
        quick = replace(usual, cluster=replace(usual.cluster, speed={}))
        worlds.append(_model(p, quick, hardware_of(quick)).price(plan, p.classes))
    return _differences(plan, p.classes.count, worlds)


def usual_links(job: Job) -> Job:
    """The job on the links of its hardware file as it stands.

    >>> from piper_sim import load_job
    >>> slow = load_job({"model": {"config": "tiny-llama"}, "cluster": {"nic_Gbps": 25, "hbm_GiB": 40}})
    >>> dict(usual_links(slow).cluster.overrides)
    {'hbm_GiB': 40}
    """
    kept = {k: v for k, v in job.cluster.overrides.items() if not k.startswith(_LINK_KEYS)}
    if len(kept) == len(job.cluster.overrides):
        return job
    return replace(job, cluster=replace(job.cluster, overrides=kept))


def _model(p: PlannedJob, job: Job, hardware: DeviceHardware) -> CostModel:
    return CostModel(replace(p.prepared, job=job), hardware)


def _differences(plan: Plan, copies: int, worlds: list[OpCosts]) -> OpExcess:
    whole = [ticks(w.duration) for w in worlds]
    inside = [ticks(w.shares[:, INNER].sum(axis=1)) for w in worlds]
    over = {c: np.maximum(whole[k] - whole[k + 1], 0) for k, c in enumerate(REMOVED)}
    inner, rest = {}, inside[0]
    for k, c in enumerate(REMOVED):
        inner[c] = np.clip(inside[k] - inside[k + 1], 0, rest)
        rest = rest - inner[c]
    last, passes = worlds[-1], np.tile((plan.kind == OpKind.COMPUTE) & ~covering(plan, lambda n: n.once), copies)
    even = ticks(last.shares[:, KERNELS].sum(axis=1)) * passes
    program = (plan.program + plan.programs * np.arange(copies)[:, None]).ravel()
    load = np.zeros(plan.programs * copies, dtype=np.int64)
    np.add.at(load, program, even)
    again = ticks(worlds[0].shares[:, CostShare.RECOMPUTE])
    recomputed = np.divide(again, whole[0], out=np.zeros(len(again)), where=whole[0] > 0)
    return OpExcess(over, inner, rest, load, even, recomputed)


def covering(plan: Plan, wanted: Callable[[GraphNode], bool]) -> BoolArray:
    """[op] whether it computes such a node."""
    nodes = plan.graph.nodes
    of = [s.kind is OpKind.COMPUTE and any(wanted(nodes[n]) for n, _ in s.covers) for s in plan.shapes]
    return np.array(of)[plan.shape]
