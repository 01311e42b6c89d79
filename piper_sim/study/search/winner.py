"""The best configuration as a job file."""

import os
from dataclasses import replace
from pathlib import Path

from ir.core.files import named_path
from ir.job.table import job_toml
from piper_sim.study.search.search import JobSearchResult
from piper_sim.study.search.space import replaced

_FILES = ("model.config", "model.graph", "cluster.gpu", "costs.profile", "costs.software", "routing.file")


def winner_toml(found: JobSearchResult, folder: str) -> str:
    """The text of a job file in a folder that simulates to `found.best`. `[search]` is left out: it has been done."""
    assert found.best is not None
    job = found.job
    job = replace(replaced(job, found.best["changes"]), search=type(job.search)())
    for key in _FILES:
        section, name = key.split(".")
        value = getattr(getattr(job, section), name)
        if value and (path := named_path(job.file, value)) and Path(path).is_file():  # else the name of a preset
            here = os.path.relpath(path, folder)
            job = replace(job, **{section: replace(getattr(job, section), **{name: here})})
    return job_toml(job)
