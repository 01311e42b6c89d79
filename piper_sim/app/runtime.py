"""A job in the user's own loop: judged as the command line does, run by torchrun's ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ir.core.errors import ErrorKind, PiperError, nearest, usage_error
from ir.job import Job, load_job
from ir.job.run_options import CheckpointOptions, JobRunOptions
from piper_sim.app.captured import with_graph
from piper_sim.pricing.prepare import hardware_of, prepare_priced

if TYPE_CHECKING:
    from executor.launch.plan_runtime import PlanRuntime
    from executor.runtime.given import Judged

BACKENDS = ("gloo", "nccl")  # between processes


def runtime(
    job: Job | str | Mapping[str, object],
    set: Sequence[str] = (),
    *,
    steps: int | None = None,
    save: str | None = None,
    resume: str | None = None,
    backend: str = "gloo",
    watchdog_s: float = 15.0,
) -> PlanRuntime:
    """This process as one rank of a job's plan; every process that torchrun has started calls it.

    steps: that the loop will end behind, which the learning rate's "wsd" asks for. save: a folder for checkpoints;
    resume: one to go on from. watchdog_s: a rank that makes no progress within a step for so long has failed.

    Raises PiperError: as `run` refuses; (usage): not under torchrun; (missing_dependency): there is no torch.
    """
    try:
        from executor.launch.plan_runtime import ENDLESS, PlanRuntime
        from executor.launch.torchrun import judged
    except ModuleNotFoundError as error:
        fix = "pip install 'piper-sim[exec]'"
        raise PiperError(ErrorKind.MISSING_DEPENDENCY, f"no {error.name}", key="runtime", suggestion=fix) from error

    if backend not in BACKENDS:
        raise usage_error("backend", f"backend {backend!r}", nearest(backend, BACKENDS), ", ".join(BACKENDS))

    if isinstance(job, Job) and set:
        message, fix = f"overrides of a job that is loaded: {set}", f"runtime(load_job(path, set={set!r}))"
        raise usage_error("set", message, fix, "with a path, or sections")

    def judge(ranks: int) -> Judged:
        found = with_graph(job if isinstance(job, Job) else load_job(job, set))
        if steps is None and found.optimizer.schedule == "wsd":
            message, fix = "wsd falls at the end of a loop whose end is not known", "runtime(job, steps=1000)"
            raise usage_error("steps", message, fix)
        return judged(prepare_priced(found, hardware_of(found)), options(ranks))

    def options(ranks: int) -> JobRunOptions:
        return JobRunOptions(ranks, ENDLESS if steps is None else steps, backend, watchdog_s, memory=False)

    return PlanRuntime(judge, options, CheckpointOptions(save, resume=resume))
