"""A job as the table it could have been read from, and single keys of it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ir.job.schema import SECTIONS, Job


def keys_of(section: str) -> tuple[str, ...]:
    """The keys a section of a job file has; open sections take others, too.

    >>> keys_of("history")
    ('file', 'apply')
    """
    return tuple(f.name for f in fields(SECTIONS[section]) if f.name != "overrides")


def table_of(job: Job) -> dict[str, dict[str, Any]]:
    """The table that `job_from` reads as this job again; what is None there stays out.

    >>> from ir.job.load import job_from
    >>> table_of(job_from({"model": {"config": "tiny-llama", "num_hidden_layers": 2}}))["model"]["num_hidden_layers"]
    2
    """
    out = {}
    for name in SECTIONS:
        section = getattr(job, name)
        given = {key: getattr(section, key) for key in keys_of(name)}
        out[name] = {k: v for k, v in given.items() if v is not None} | dict(getattr(section, "overrides", {}))
    return out


def value_of(job: Job, key: str) -> object:
    """What a job says under `section.key`, None where it says nothing.

    >>> from ir.job.load import job_from
    >>> value_of(job_from({"model": {"config": "tiny-llama"}, "parallel": {"pp": 2}}), "parallel.pp")
    2
    """
    section, *path = key.split(".")
    found: Any = table_of(job).get(section, {})
    for part in path:
        found = found.get(part) if isinstance(found, dict) else None
    return found
