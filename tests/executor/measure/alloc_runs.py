"""Helpers of the alloc list tests: a job's plan, its run's measured peaks, and lists taken on another plan."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path

from executor.launch import run as cli
from executor.measure.alloc import take_lists
from ir.core.alloc import AllocList
from ir.job import load_job
from ir.job.build import Prepared, prepare
from ir.job.run_options import RunOptions
from ir.plan.plan import Plan

JOB = """
[model]
config = "tiny-llama"
num_hidden_layers = 4
seq_len = 160
[cluster]
gpu = "h100-sxm"
[parallel]
pp = 2
[schedule]
name = "1f1b"
microbatches = 4
microbatch_size = 2
[precision]
compute = "fp64"
"""
OF_THE_PLAN = ("schedule.name", "schedule.microbatches", "parallel.", "schedule.stages_per_rank")
TAKEN_ON = ("schedule.name=gpipe", "schedule.microbatches=1", "parallel.pp=1")


@lru_cache(maxsize=1)
def job_file() -> str:
    """The job as a file, which the ranks read too."""
    folder = tempfile.mkdtemp(prefix="piper-alloc-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / "job.toml"
    path.write_text(JOB)
    return str(path)


def planned(*sets: str) -> tuple[Prepared, Plan]:
    """The job with these overrides."""
    prepared = prepare(load_job(job_file(), sets))
    return prepared, prepared.plan()


@lru_cache(maxsize=64)
def _lists(sets: tuple[str, ...]) -> dict[str, AllocList]:
    return take_lists(*planned(*sets))


def lists_from_elsewhere(*sets: str) -> dict[str, AllocList]:
    """The lists of the job's model, sizes and formats, taken on one rank and one microbatch."""
    return _lists((*(s for s in sets if not s.startswith(OF_THE_PLAN)), *TAKEN_ON))


@lru_cache(maxsize=64)
def measured(*sets: str) -> tuple[int, ...]:
    """The peaks that a run's storage tracker saw, rank by rank."""
    prepared, plan = planned(*sets)
    found, _ = cli.run(prepared, plan, RunOptions(prepared.ranks, watchdog_s=60.0))
    return tuple(found["memory"]["peak_allocated_bytes"].values())
