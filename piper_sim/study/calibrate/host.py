"""What a host that computes itself needs for each op beside the op's work, from a run in which ops take no time."""

from __future__ import annotations

from dataclasses import replace

from ir.core.errors import PiperError
from ir.job import Job
from ir.job.run_options import JobRunOptions
from piper_sim.pricing.prepare import hardware_of, prepare_priced
from piper_sim.study.validate.calibrating import elsewhere
from piper_sim.study.validate.runs import PlanExecutor, ran
from piper_sim.study.validate.samples import host_seconds

STEPS = 5


def probe(executor: PlanExecutor, job: Job, watchdog_s: float) -> float | None:
    """Run another plan of the job, never the job's own, without arithmetic. None: the executor has no such run.

    Without the framework that a prediction may be of: the executor is none.
    """
    job = replace(job, costs=replace(job.costs, software=None))
    hardware = hardware_of(job)
    try:
        other = elsewhere(job, prepare_priced(job, hardware), hardware)
        plan = other.plan()
        options = JobRunOptions(other.ranks, emulate=0.0, watchdog_s=watchdog_s)
        executor.check(other, plan, options)
    except PiperError:
        return None
    return host_seconds(ran(executor, other, plan, options, STEPS))
