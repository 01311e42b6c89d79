"""Helpers of the tests of peak bytes: a job's plan, and its run's measured peaks."""

import atexit
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path

from executor.launch import run as cli
from ir.job import load_job
from ir.job.build import PreparedJob, prepare
from ir.job.run_options import JobRunOptions
from ir.plan.plan import Plan
from tests.executor import runs

JOB = runs.JOB.replace("seq_len = 8", "seq_len = 160").replace("microbatches", "microbatch_size = 2\nmicrobatches")


@lru_cache(maxsize=1)
def job_file() -> str:
    """The job as a file, which the ranks read too."""
    folder = tempfile.mkdtemp(prefix="piper-peak-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return str(runs.job_file(Path(folder), text=JOB))


def planned(*sets: str) -> tuple[PreparedJob, Plan]:
    """The job with these overrides."""
    prepared = prepare(load_job(job_file(), sets))
    return prepared, prepared.plan()


@lru_cache(maxsize=64)
def measured(*sets: str) -> tuple[int, ...]:
    """The peaks that a run's storage tracker saw, rank by rank."""
    prepared, plan = planned(*sets)
    found, _ = cli.run(prepared, plan, JobRunOptions(prepared.ranks, watchdog_s=60.0))
    return tuple(found["memory"]["peak_allocated_bytes"].values())
