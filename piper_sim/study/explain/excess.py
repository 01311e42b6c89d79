"""What ops take too long, and why: the same plan priced again without slow ranks, uneven routing, slow links."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from cost_models import DeviceHardware
from ir.core.order import BoolArray, FloatArray, IntArray
from ir.graph.graph import GraphNode
from ir.job import Job
from ir.plan.plan import OpKind, Plan
from piper_sim.compiled.choose import steady
from piper_sim.engine import EngineScenario
from piper_sim.pricing.costs import CostModel, OpCosts
from piper_sim.pricing.prepare import hardware_of
from piper_sim.pricing.routing import price
from piper_sim.pricing.scenario import scenario_of
from piper_sim.pricing.structure import CostShare
from piper_sim.study.explain.chain import OpChain, chain_of, ticks
from piper_sim.study.planned import PlannedJob
from piper_sim.study.simulate import LINK_KEYS

REMOVED = ("straggler", "expert_skew", "link")  # in the order in which they are taken away
NOTHING, PASSES, STEP, HOST = range(4)  # what ranks divide: passes, what is once per step, launches
INNER = [CostShare.TP, CostShare.CP]


@dataclass(frozen=True, eq=False)
class OpExcess:
    """Ticks by op of the unfolded plan.

    over: cause of `REMOVED` -> what the op takes longer because of it, messages inside it too. inner: the same of its
    messages inside alone; rest: what these take anyway. even: [item] what it takes with none of the causes; items are
    ops and, behind them, their dispatches. work: [item] what it is part of; unit: [item] ticks of all of that; fair:
    [work, program] what a program has of it. recomputed: [op] share of an op that is forward done again.
    """

    over: dict[str, IntArray]
    inner: dict[str, IntArray]
    rest: IntArray
    even: IntArray
    work: IntArray
    unit: FloatArray
    fair: FloatArray
    recomputed: FloatArray

    def more(self, program: int) -> FloatArray:
        """[item] share of it that is more than this program has to do."""
        return self._beyond(self.fair[:, program])

    @cached_property
    def uneven(self) -> FloatArray:
        """[item] share of it that is more than programs have to do in the mean."""
        return self._beyond(self.fair.mean(axis=1))

    def _beyond(self, fair: FloatArray) -> FloatArray:
        rest = np.maximum(self.unit - fair[self.work], 0)
        return np.divide(rest, self.unit, out=np.zeros_like(rest), where=self.unit > 0)


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
    over, inner, rest = _differences(worlds)
    over["link"] += queued
    launch = ticks(scenario.host.launch) if scenario.host else 0 * queued
    work = np.append(np.tile(_works(plan), p.classes.count), np.full(len(launch), HOST))
    # A late host at a rank with more to launch is two causes, each of which doubles the other: half of it is either's.
    even = np.append(ticks(worlds[-1].duration), launch // 2) * (work != NOTHING)
    again, whole = ticks(costs.shares[:, CostShare.RECOMPUTE]), ticks(costs.duration)
    recomputed = np.divide(again, whole, out=np.zeros(len(again)), where=whole > 0)
    return OpExcess(over, inner, rest, even, work, *_divided(p, chain.program, work, even), recomputed)


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
    kept = {k: v for k, v in job.cluster.overrides.items() if not k.startswith(LINK_KEYS)}
    if len(kept) == len(job.cluster.overrides):
        return job
    return replace(job, cluster=replace(job.cluster, overrides=kept))


def _model(p: PlannedJob, job: Job, hardware: DeviceHardware) -> CostModel:
    return CostModel(replace(p.prepared, job=job), hardware)


def _differences(worlds: Sequence[OpCosts]) -> tuple[dict[str, IntArray], dict[str, IntArray], IntArray]:
    """`over`, `inner` and `rest` of `OpExcess`."""
    whole = [ticks(w.duration) for w in worlds]
    inside = [ticks(w.shares[:, INNER].sum(axis=1)) for w in worlds]
    over = {c: np.maximum(whole[k] - whole[k + 1], 0) for k, c in enumerate(REMOVED)}
    inner, rest = {}, inside[0]
    for k, c in enumerate(REMOVED):
        inner[c] = np.clip(inside[k] - inside[k + 1], 0, rest)
        rest = rest - inner[c]
    return over, inner, rest


def _works(plan: Plan) -> IntArray:
    """[op] what it is part of; transfers are of nothing."""
    nodes = plan.graph.nodes
    passes = [bool(s.covers) and not any(nodes[n].once for n, _ in s.covers) for s in plan.shapes]
    sent = (plan.kind == OpKind.SEND) | (plan.kind == OpKind.RECV)
    return np.select([sent, np.array(passes)[plan.shape]], [NOTHING, PASSES], STEP)


def _divided(p: PlannedJob, program: IntArray, work: IntArray, even: IntArray) -> tuple[FloatArray, FloatArray]:
    """`unit` and `fair`: passes are compared by a stage's microbatch, all else by what a program has in a step."""
    plan = p.plan
    stage = np.array([plan.graph.nodes[s.covers[0][0]].stage if s.covers else 0 for s in plan.shapes])[plan.shape]
    stages = program // plan.programs * plan.graph.stages + np.tile(stage, p.classes.count)
    program, stages = np.tile(program, 2), np.tile(stages, 2)
    whole = HOST + 1
    of = np.where(work == PASSES, stages, program) * whole + work
    unit = np.bincount(of, even)[of] / np.where(work == PASSES, p.prepared.mbs, 1)
    parts = np.divide(even, unit, out=np.zeros_like(unit), where=unit > 0)
    had, units = (np.bincount(program * whole + work, x, whole * (int(program[-1]) + 1)) for x in (even, parts))
    fair = np.divide(had, units, out=np.zeros_like(had), where=units > 0)
    return unit, fair.reshape(-1, whole).T


def covering(plan: Plan, wanted: Callable[[GraphNode], bool]) -> BoolArray:
    """[op] whether it computes such a node."""
    nodes = plan.graph.nodes
    of = [s.kind is OpKind.COMPUTE and any(wanted(nodes[n]) for n, _ in s.covers) for s in plan.shapes]
    return np.array(of)[plan.shape]
