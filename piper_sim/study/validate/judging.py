"""A plan predicted from a profile, as `simulate` predicts it; and the same without communication, and replayed."""

from dataclasses import replace

import numpy as np

from cost_models.profile.profile import Profile
from ir.core.grid import quantised
from ir.core.order import FloatArray
from ir.plan.plan import OpKind
from piper_sim.compiled.choose import steady
from piper_sim.engine import EngineScenario
from piper_sim.folding import RankClasses
from piper_sim.pricing.costs import CostModel
from piper_sim.pricing.scenario import scenario_of
from piper_sim.study.planned import PlannedJob
from piper_sim.study.predict import simulated
from piper_sim.study.prediction import Prediction
from piper_sim.study.validate.runs import MeasuredSteps
from piper_sim.study.validate.times import alone, dispatch


def predicted(p: PlannedJob, profile: Profile, *, inline: bool) -> Prediction:
    """The planned job at measured seconds. inline: the host computes itself, else it is what the job says.

    Nothing is slowed down beyond what was measured while the other ranks ran.
    """
    job = p.prepared.job
    host = "inline" if inline else job.costs.host_model
    prepared = replace(p.prepared, job=replace(job, costs=replace(job.costs, interference="none", host_model=host)))
    return simulated(replace(p, prepared=prepared, model=CostModel(prepared, p.hardware, profile)))


def without_communication(p: Prediction) -> float:
    """Seconds of a step in which messages take no time and the host neither: what knows only compute would say."""
    scenario = scenario_of(p.planned.model, p.plan, p.planned.classes, p.costs.duration)
    if scenario.host is not None:
        scenario = replace(scenario, host=replace(scenario.host, launch=np.zeros_like(scenario.host.launch)))
    compute = scenario.plan.kind == OpKind.COMPUTE
    return _period(scenario, np.where(compute, p.costs.duration, 0.0), p.prepared.policy.clip)


def replayed(p: Prediction, r: MeasuredSteps, *, inline: bool) -> tuple[float, float]:
    """(simulated, measured) seconds of a step, means over a run's steps: every op takes what it took in each.

    What an op waited for is not in what it took: so this tests order, waits and messages, and predicts nothing.
    """
    each = RankClasses.each(len(p.planned.classes.of))
    scenario = scenario_of(p.planned.model, p.plan, each, p.costs.duration)
    took, host = alone(r.whole, r.times), dispatch(r.whole, r.times)
    found = []
    for step in range(1, len(took)):
        if inline and scenario.host is not None:
            scenario = replace(scenario, host=replace(scenario.host, launch=quantised(host[step])))
        found.append(_period(scenario, quantised(took[step]), p.prepared.policy.clip))
    return float(np.mean(found)), float(np.mean(r.step_s[1:]))


def _period(scenario: EngineScenario, duration: FloatArray, clip: bool) -> float:
    run, _ = steady(scenario, duration, clip)
    return float(run.end[-1].max() - run.end[-2].max())
