"""A job as the table it could have been read from, single keys of it, and as TOML that loads as the same job."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from typing import Any

from ir.job.schema import OPEN, SECTIONS, Job


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
        given = {key: _plain(getattr(section, key)) for key in keys_of(name)}
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


def job_toml(job: Job) -> str:
    """A job file's text: what differs from the defaults, section by section.

    >>> from ir.job.load import load_job
    >>> print(job_toml(load_job({"model": {"config": "tiny-llama"}, "parallel": {"pp": 2}})), end="")
    [model]
    config = "tiny-llama"
    <BLANKLINE>
    [parallel]
    pp = 2
    """
    tables = {}
    for name in SECTIONS:
        section = getattr(job, name)
        own = ((f, getattr(section, f.name)) for f in fields(section) if f.name != "overrides")
        given = {f.name: _plain(value) for f, value in own if value != _default(f)}
        tables[name] = given | (section.overrides if name in OPEN else {})
    return toml_sections(tables)


def toml_sections(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Sections as TOML; empty ones are left out.

    >>> print(toml_sections({"schedule": {"name": "1f1b", "recompute": ["norm"]}, "data": {}}), end="")
    [schedule]
    name = "1f1b"
    recompute = ["norm"]
    """
    return "\n".join(
        f"[{name}]\n" + "".join(f"{_key(k)} = {toml_value(v)}\n" for k, v in table.items())
        for name, table in tables.items()
        if table
    )


def _plain(value: Any) -> Any:
    """A table that a section holds, as `cluster.slow_nodes`, is one of ours once it is read."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _default(f: Field[Any]) -> object:
    return f.default if f.default is not MISSING else f.default_factory() if f.default_factory is not MISSING else None


def _key(key: str) -> str:
    plain = key.replace("_", "").replace("-", "")
    return key if plain.isalnum() and plain.isascii() else json.dumps(key)


def toml_value(value: object) -> str:
    """A value as a job file or `--set` has it.

    >>> toml_value({"F": 0.5, "p2p": None}), toml_value(("a", True))
    ('{ F = 0.5 }', '["a", true]')
    """
    match value:
        case Mapping():
            return (
                "{ " + ", ".join(f"{_key(str(k))} = {toml_value(v)}" for k, v in value.items() if v is not None) + " }"
            )
        case list() | tuple():
            return f"[{', '.join(map(toml_value, value))}]"
        case str():  # TOML takes JSON's escapes, but for one character
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case _:
            return json.dumps(value)
