"""What a host that computes itself needs for each op beside the op's work, from a run in which ops take no time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ir.core.errors import PiperError
from ir.job import Job
from piper_sim.pricing.prepare import hardware_of, prepare_priced
from piper_sim.study.validate.calibrating import elsewhere
from piper_sim.study.validate.runs import Executor, Options, Tools, ran
from piper_sim.study.validate.samples import host_seconds

STEPS = 5


def probe(executor: Executor, job: Job, sets: Sequence[str], watchdog_s: float) -> float | None:
    """Run another plan of the job, never the job's own, without arithmetic. None: the executor has no such run.

    Without the framework that a prediction may be of: the executor is none.
    """
    job = replace(job, costs=replace(job.costs, software=None))
    hardware = hardware_of(job)
    try:
        other, more = elsewhere(job, prepare_priced(job, hardware), hardware)
        plan, changed = other.plan(), (*sets, *more)
        executor.check(other, plan, changed, ranks=other.ranks, backend="gloo", real=False)
    except PiperError:
        return None
    options = Options(other.ranks, emulate=0.0, watchdog_s=watchdog_s)
    return host_seconds(ran(Tools(executor, lambda *_: {}), other, plan, changed, options, STEPS))
