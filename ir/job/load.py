"""Reading a job: TOML, `--set`, types, ranges, the nearest key for a typo."""

from __future__ import annotations

import math
import tomllib
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from ir.errors import ErrorKind, PiperError, nearest
from ir.job import schema
from ir.job.schema import CHOICES, DTYPES, POSITIVE, RECOMPUTE, Job

_SECTIONS: Mapping[str, type] = {
    "model": schema.Model,
    "cluster": schema.Cluster,
    "parallel": schema.Parallel,
    "schedule": schema.Schedule,
    "routing": schema.Routing,
    "costs": schema.Costs,
    "data": schema.Data,
    "gate": schema.Gate,
    "history": schema.History,
    "optimizer": schema.Optimizer,
    "precision": schema.Precisions,
}
_OPEN = ("model", "cluster")  # sections whose other keys belong to the model config and the hardware file
_LIMIT_BYTES = 1_000_000


def load_job(path: str | Path, sets: Iterable[str] = ()) -> Job:
    """Read a job file and apply `section.key=value` overrides.

    Raises PiperError (io: no such file; job: not TOML, an unknown key, a wrong type or range).
    """
    file = Path(path)
    try:
        raw = file.read_bytes()
    except OSError as e:
        raise PiperError(ErrorKind.IO, f"cannot read the job: {e.strerror}", file=str(path)) from None
    if len(raw) > _LIMIT_BYTES:
        raise PiperError(ErrorKind.JOB, f"{len(raw)} bytes is no job file", file=str(path), allowed="1 MB")
    try:
        table = tomllib.loads(raw.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise PiperError(ErrorKind.JOB, f"not TOML: {e}", file=str(path)) from None
    return job_from(table, sets, str(path))


def job_from(table: Mapping[str, Any], sets: Iterable[str] = (), file: str = "job") -> Job:
    """A job from a parsed table.

    >>> job_from({"model": {"config": "tiny-llama"}}, ["parallel.pp=2"]).parallel.pp
    2
    """
    merged: dict[str, Any] = {k: dict(v) if isinstance(v, Mapping) else v for k, v in table.items()}
    for item in sets:
        _set(merged, item)
    try:
        return _job(merged, file)
    except PiperError as e:
        raise e.at(file=file) from None


def _set(table: dict[str, Any], item: str) -> None:
    path, eq, text = item.partition("=")
    keys = path.strip().split(".")
    if not eq or len(keys) < 2 or not all(keys):
        raise PiperError(ErrorKind.USAGE, f"{item!r} sets nothing", key="--set", allowed="--set section.key=value")
    try:
        value = tomllib.loads(f"x = {text.strip()}")["x"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    at = table
    for k in keys[:-1]:
        at = at.setdefault(k, {})
        if not isinstance(at, dict):
            raise PiperError(ErrorKind.USAGE, f"{k} is a value, not a section", key=f"--set {path}")
    at[keys[-1]] = value


def _job(table: Mapping[str, Any], file: str) -> Job:
    for name, value in table.items():
        if name not in _SECTIONS:
            raise _unknown(name, _SECTIONS, "section")
        if not isinstance(value, Mapping):
            raise PiperError(ErrorKind.JOB, f"[{name}] is a section, not a value", key=name)
    if "config" not in table.get("model", {}) and "graph" not in table.get("model", {}):
        raise PiperError(
            ErrorKind.JOB, "no model", key="model.config", allowed="a preset or a path to config.json", suggestion='"llama3-8b"'
        )
    built = {name: _section(name, cls, table.get(name, {})) for name, cls in _SECTIONS.items()}
    return Job(**built, file=file)


def _section(name: str, cls: type, table: Mapping[str, Any]) -> Any:
    hints = get_type_hints(cls)
    known = [f.name for f in fields(cls) if f.name != "overrides"]
    values: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for key, value in table.items():
        if key in known:
            values[key] = _value(f"{name}.{key}", hints[key], value)
        elif name in _OPEN:
            extra[key] = value
        else:
            raise _unknown(f"{name}.{key}", known, "key")
    if name in _OPEN:
        values["overrides"] = extra
    return cls(**values)


def _value(key: str, hint: Any, value: Any) -> Any:
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    fitted = next((v for v in (_fit(o, value) for o in options) if v is not None), None)
    if fitted is None:
        wanted = " or ".join(sorted({_name(o) for o in options if o is not type(None)}))
        raise PiperError(ErrorKind.JOB, f"{value!r} is no {wanted}", key=key, allowed=wanted)
    _check_range(key, fitted)
    return fitted


def _fit(option: Any, value: Any) -> Any:
    """The value as one option of a type hint, None where it does not fit."""
    origin = get_origin(option)
    if origin is tuple:
        inner = get_args(option)[0]
        good = isinstance(value, Sequence) and not isinstance(value, str)
        return tuple(value) if good and all(_fit(inner, v) is not None for v in value) else None
    if origin is not None:
        return dict(value) if isinstance(value, Mapping) else None
    if option is bool:
        return value if isinstance(value, bool) else None
    if option is float:
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return float(value) if good else None
    if option is int:
        return value if isinstance(value, int) and not isinstance(value, bool) else None
    if option is str:
        return value if isinstance(value, str) else None
    return None


def _name(option: Any) -> str:
    origin = get_origin(option)
    if origin is tuple:
        return f"list of {_name(get_args(option)[0])}"
    return "table" if origin is not None else {str: "text", int: "integer", float: "number", bool: "true/false"}[option]


def _check_range(key: str, value: Any) -> None:
    if key in CHOICES and value not in CHOICES[key]:
        raise _choice(key, value, CHOICES[key])
    if key.startswith("precision.") and value not in DTYPES:
        raise _choice(key, value, DTYPES)
    if key in POSITIVE and value < 1:
        raise PiperError(ErrorKind.JOB, f"{value} is less than 1", key=key, allowed="1 or more", suggestion=f"{key} = 1")
    if key == "parallel.zero" and value not in range(4):
        raise PiperError(ErrorKind.JOB, f"{value} is no ZeRO level", key=key, allowed="0, 1, 2, 3")
    if key == "schedule.recompute":
        for part in (value,) if isinstance(value, str) else value:
            words = (*RECOMPUTE, "none", "selective", "full") if isinstance(value, str) else RECOMPUTE
            if part not in words:
                raise _choice(key, part, words)
    if isinstance(value, float) and value < 0:
        raise PiperError(ErrorKind.JOB, f"{value} is negative", key=key, allowed="0 or more")
    if key == "cluster.speed":
        for rank, speed in value.items():
            fine = isinstance(speed, int | float) and not isinstance(speed, bool) and 0 < speed < math.inf
            if not str(rank).isdigit() or not fine:
                raise PiperError(ErrorKind.JOB, f"speed of {rank!r} is {speed!r}", key=key, allowed="{ rank = factor > 0 }")


def _choice(key: str, value: Any, words: Iterable[str]) -> PiperError:
    words = list(words)
    return PiperError(
        ErrorKind.JOB, f"unknown {key.split('.')[1]} {value!r}", key=key, allowed=words, suggestion=nearest(str(value), words)
    )


def _unknown(key: str, known: Iterable[str], what: str) -> PiperError:
    names = list(known)
    near = nearest(key.split(".")[-1], names)
    return PiperError(ErrorKind.JOB, f"unknown {what}", key=key, allowed=names, suggestion=near)
