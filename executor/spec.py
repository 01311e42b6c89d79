"""A run as the launcher tells every rank, and the plan each builds from it again. Without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ir.errors import ErrorKind, PiperError
from ir.job import Job, load_job
from ir.job.build import Prepared, prepare
from ir.plan import Plan
from ir.plan_text import plan_digest


@dataclass(frozen=True)
class Spec:
    """A run as the launcher hands it to every rank: the job, the strategy that was judged, the digest it must have.

    dump: a folder for each rank's last gradients and parameters.
    """

    job: str
    sets: tuple[str, ...]
    strategy: str
    schedule: str
    digest: str
    steps: int
    dump: str | None = None


def rebuild(spec: Spec) -> tuple[Prepared, Plan]:
    """The plan that was judged and checked, built again from job and strategy. Raises PiperError: another digest."""
    job = load_job(spec.job, spec.sets)
    schedule = replace(job.schedule, name=None, directives=spec.strategy, builder=None, csv=None)
    prepared = replace(prepare(replace(job, schedule=schedule)), schedule=spec.schedule)
    plan = prepared.plan()
    if (found := plan_digest(plan)) != spec.digest:
        raise PiperError(ErrorKind.ILLEGAL_PLAN, f"the plan's digest is {found}, {spec.digest} was to be run")
    return prepared, plan


def source_name(job: Job) -> str:
    """`[data] source`; a path starts at the job's folder."""
    return job.data.source if job.data.source == "synthetic" else str(Path(job.file).parent / job.data.source)
