"""The best configuration as a job file."""

import os
from dataclasses import replace

from ir.job.table import job_toml
from piper_sim.study.inputs import named_files
from piper_sim.study.search.result import JobSearchResult
from piper_sim.study.search.space import replaced


def winner_toml(found: JobSearchResult, folder: str) -> str:
    """The text of a job file in a folder that simulates to `found.best`. `[search]` is left out: it has been done."""
    assert found.best is not None
    job = found.job
    job = replace(replaced(job, found.best["changes"]), search=type(job.search)())
    for key, file in named_files(job).items():
        section, name = key.split(".")
        here = os.path.relpath(file.path, folder) + file.function
        job = replace(job, **{section: replace(getattr(job, section), **{name: here})})
    return job_toml(job)
