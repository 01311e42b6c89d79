"""What ops take too long, and why: the same plan priced again without slow ranks, uneven routing, slow links."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from cost_models import DeviceHardware
from ir.core.order import BoolArray, FloatArray, IntArray
from ir.graph.graph import GraphNode
from ir.job import Job
from ir.plan.plan import OpKind, Plan
from piper_sim.compiled.choose import steady
from piper_sim.engine import EngineScenario
from piper_sim.pricing.costs import CostModel, CostShare, OpCosts
from piper_sim.pricing.prepare import hardware_of
from piper_sim.pricing.routing import price
from piper_sim.pricing.scenario import scenario_of
from piper_sim.study.explain.chain import OpChain, chain_of, ticks
from piper_sim.study.planned import PlannedJob

REMOVED = ("straggler", "expert_skew", "link")  # in the order in which they are taken away
INNER = [CostShare.TP, CostShare.CP]
_LINK_KEYS = ("nvlink_", "nic_", "dispatch_", "oversubscription", "collective_launch_us")


@dataclass(frozen=True, eq=False)
class OpExcess:
    """Ticks by op of the unfolded plan.

    over: cause of `REMOVED` -> what the op takes longer because of it, messages inside it too. inner: the same of its
    messages inside alone; rest: what these take anyway. load: [work, program] what a program has to do in a step with
    none of the causes; even: [item] what of that is this item's, work: which row. Items are ops and, behind them, their
    dispatches. recomputed: [op] share of an op that is forward done again.
    """

    over: dict[str, IntArray]
    inner: dict[str, IntArray]
    rest: IntArray
    load: IntArray
    even: IntArray
    work: IntArray
    recomputed: FloatArray

    def more(self, program: int) -> FloatArray:
        """[work, program] share of it that the program has more to do than this one; of its own, than the mean."""
        mine = np.repeat(self.load[:, program : program + 1].astype(np.float64), self.load.shape[1], axis=1)
        mine[:, program] = self.load.mean(axis=1)
        return np.divide(np.maximum(self.load - mine, 0), self.load, out=np.zeros_like(mine), where=self.load > 0)


def excess_of(p: PlannedJob, costs: OpCosts, scenario: EngineScenario, chain: OpChain) -> OpExcess:
    """Price the plan of a job again, each time with one cause less, and take differences."""
    job, plan = p.prepared.job, p.plan
    worlds = [costs]
    calm = _model(p, replace(job, cluster=replace(job.cluster, speed={})), p.hardware)
    if (p.model.ground.speed != 1).any():
        worlds.append(price(p.routing, plan, calm, p.classes))
    else:
        worlds.append(costs)
    worlds.append(worlds[-1] if p.routing is None else calm.price(plan, p.classes))
    usual, queued = usual_links(job), np.zeros(len(scenario.plan), dtype=np.int64)
    if usual == job:
        worlds.append(worlds[-1])
    else:
        quick = replace(usual, cluster=replace(usual.cluster, speed={}))
        model = _model(p, quick, hardware_of(quick))
        worlds.append(model.price(plan, p.classes))
        if scenario.links is not None:
            queued = np.maximum(_queued(chain, costs.duration) - _queued_in(p, model, worlds[-1].duration), 0)
    found = _differences(plan, p.classes.count, worlds, ticks(scenario.host.launch) if scenario.host else 0 * queued)
    return replace(found, over={**found.over, "link": found.over["link"] + queued})


def _queued_in(p: PlannedJob, model: CostModel, duration: FloatArray) -> IntArray:
    """`_queued` of the plan run at the costs of another model."""
    scenario = scenario_of(model, p.plan, p.classes, duration)
    ran, _ = steady(scenario, duration, p.prepared.policy.clip)
    return _queued(chain_of(scenario, ran, duration), duration)


def _queued(chain: OpChain, duration: FloatArray) -> IntArray:
    """[op] what messages take longer than alone, for others on their links."""
    took = (chain.hi[: len(chain.lead)] - chain.lo[: len(chain.lead)])[chain.now :]
    return np.where(chain.kind == OpKind.COMPUTE, 0, took - ticks(duration)[chain.main])


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


def _differences(plan: Plan, copies: int, worlds: list[OpCosts], launch: IntArray) -> OpExcess:
    whole = [ticks(w.duration) for w in worlds]
    inside = [ticks(w.shares[:, INNER].sum(axis=1)) for w in worlds]
    over = {c: np.maximum(whole[k] - whole[k + 1], 0) for k, c in enumerate(REMOVED)}
    inner, rest = {}, inside[0]
    for k, c in enumerate(REMOVED):
        inner[c] = np.clip(inside[k] - inside[k + 1], 0, rest)
        rest = rest - inner[c]
    compute, once = plan.kind == OpKind.COMPUTE, covering(plan, lambda n: n.once)
    sent = (plan.kind == OpKind.SEND) | (plan.kind == OpKind.RECV)
    kind = np.select([sent, compute & ~once], [-1, 0], 1)
    work = np.append(np.tile(kind, copies), np.full(len(launch), 2))
    # A late host at a rank with more to launch is two causes, each of which doubles the other: half of it is either's.
    even = np.append(np.where(work[: len(launch)] < 0, 0, whole[-1]), launch // 2)
    program = (plan.program + plan.programs * np.arange(copies)[:, None]).ravel()
    load = np.zeros((3, plan.programs * copies), dtype=np.int64)
    np.add.at(load, (work, np.tile(program, 2)), even)
    again = ticks(worlds[0].shares[:, CostShare.RECOMPUTE])
    recomputed = np.divide(again, whole[0], out=np.zeros(len(again)), where=whole[0] > 0)
    return OpExcess(over, inner, rest, load, even, work, recomputed)


def covering(plan: Plan, wanted: Callable[[GraphNode], bool]) -> BoolArray:
    """[op] whether it computes such a node."""
    nodes = plan.graph.nodes
    of = [s.kind is OpKind.COMPUTE and any(wanted(nodes[n]) for n, _ in s.covers) for s in plan.shapes]
    return np.array(of)[plan.shape]
