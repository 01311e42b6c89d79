"""Predict one job: plan, classes of replicas, costs, scenario, engine, metrics."""

from cost_models import DeviceHardware
from ir.core.errors import job_error
from ir.job import Job
from ir.job.cache import PLANS
from ir.job.load import no_job
from piper_sim.compiled.choose import TRIED, steady
from piper_sim.engine.scenario import EngineScenario
from piper_sim.pricing.costs import OpCosts
from piper_sim.pricing.prepare import hardware_of, prepare_priced
from piper_sim.pricing.routing import price
from piper_sim.pricing.scenario import scenario_of
from piper_sim.study.breakdown import breakdown, step_seconds
from piper_sim.study.planned import PlannedJob, fits
from piper_sim.study.prediction import Prediction
from piper_sim.study.slow_nodes import with_likely

MOST_OPS = 12_000_000  # unfolded, about 650 bytes each


def predict(job: Job) -> Prediction:
    """Build, check, price and run the plan of a job: its step time, its memory, and where both go.

    Seconds and bytes are those of the step that repeats. `[history]` is not asked: `backtest` and `applied` are.
    `layers = "balanced"` evens out modelled seconds. Where that does not fit in memory, no stage may hold more layers
    than an even split would give it, and the second try counts if it fits.

    Raises PiperError (job, model, hardware, directive): what cannot be built; (illegal_plan, deadlock): what its plan
    shows. A job that does not fit raises nothing: `Prediction.fits` says so.

    >>> from piper_sim import load_job, predict
    >>> p = predict(load_job({"model": {"config": "tiny-llama", "seq_len": 64}, "parallel": {"pp": 2}}))
    >>> p.fits, list(p.breakdown.index), list(p.memory.columns[:3])
    (True, [0, 1], ['parameters', 'gradients', 'optimizer'])
    """
    if not isinstance(job, Job):
        raise no_job(job)
    return simulated(planned(job, hardware_of(job)))


def planned(job: Job, hardware: DeviceHardware) -> PlannedJob:
    """The plan of a job, with the layers that fit, and with the slow node that its median step has.

    Raises PiperError as `predict`, but for what only a check shows.
    """
    p = _fitting(job, hardware)
    return p if job.cluster.slow_nodes is None else with_likely(p, step_of)


def _fitting(job: Job, hardware: DeviceHardware) -> PlannedJob:
    first = PlannedJob.of(prepare_priced(job, hardware), hardware)
    even = -(-sum(first.prepared.layers) // first.prepared.stages)
    if job.parallel.layers != "balanced" or max(first.prepared.layers) <= even or fits(first):
        return first
    second = PlannedJob.of(prepare_priced(job, hardware, even), hardware)
    return second if fits(second) else first


def simulated(p: PlannedJob) -> Prediction:
    """Check, price and run a plan."""
    PLANS.check(p.plan, inline=p.prepared.job.costs.host_model == "inline")
    return timed(p)


def timed(p: PlannedJob) -> Prediction:
    """Price and run a plan that is not checked. Raises PiperError (deadlock) where the engine cannot go on."""
    costs, scenario = _priced(p)
    return played(p, costs, scenario)


def step_of(p: PlannedJob) -> float:
    """`timed(p).iteration_s` alone: not where the step went."""
    costs, scenario = _priced(p)
    ran, _ = steady(scenario, costs.duration, p.prepared.policy.clip, TRIED)
    return step_seconds(scenario.plan, ran)


def _priced(p: PlannedJob) -> tuple[OpCosts, EngineScenario]:
    _refuse_large(p)
    costs = price(p.routing, p.plan, p.model, p.classes)
    return costs, scenario_of(p.model, p.plan, p.classes, costs.duration)


def played(p: PlannedJob, costs: OpCosts, scenario: EngineScenario) -> Prediction:
    """A plan run at these costs. Raises PiperError (deadlock) where the engine cannot go on."""
    ran, steps = steady(scenario, costs.duration, p.prepared.policy.clip)
    return Prediction(p, costs, ran, breakdown(scenario, ran, costs, p.classes), steps)


def _refuse_large(p: PlannedJob) -> None:
    ops = len(p.plan) * p.classes.count
    if ops > MOST_OPS:
        raise job_error(
            "schedule.microbatches",
            f"{p.classes.count} of {len(p.classes.of)} replicas differ, which makes {ops:,} ops",
            f"schedule.microbatches = {max(1, p.prepared.mbs * MOST_OPS // ops)}",
            f"{MOST_OPS:,} ops",
        )
