"""What a host that computes itself needs for each op beside the op's work, from a run in which ops take no time."""

from __future__ import annotations

from collections.abc import Sequence

from cost_models import Hardware
from ir.errors import PiperError
from ir.job import Job
from ir.job.build import Prepared
from piper_sim.validate.calibrating import elsewhere
from piper_sim.validate.runs import Executor, Options, Tools, ran
from piper_sim.validate.samples import host_seconds

STEPS = 5


def probe(
    executor: Executor, job: Job, prepared: Prepared, hardware: Hardware, sets: Sequence[str], watchdog_s: float
) -> float | None:
    """Run another plan of the job, never the job's own, without arithmetic. None: the executor has no such run."""
    try:
        other, more = elsewhere(job, prepared, hardware)
        plan, changed = other.plan(), (*sets, *more)
        executor.check(other, plan, changed, ranks=other.ranks, backend="gloo", real=False)
    except PiperError:
        return None
    options = Options(other.ranks, emulate=0.0, watchdog_s=watchdog_s)
    return host_seconds(ran(Tools(executor, lambda *_: {}), other, plan, changed, options, STEPS))
