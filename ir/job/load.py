"""Reading a job: TOML, `--set`, types, ranges, the nearest key for a typo."""

from __future__ import annotations

import math
import tomllib
import types
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from ir.core.errors import ErrorKind, PiperError, nearest
from ir.job import schema
from ir.job.schema import CHOICES, DTYPES, OPEN, POSITIVE, RECOMPUTE, SECTIONS, Job
from ir.schedules.registry import canonical

_LIMIT_BYTES = 1_000_000
_LIMIT_TEXT = 1024
_LIMIT_INT = 2**31 - 1
_LARGEST, _SMALLEST = 1e18, 1e-30
_ALTERNATIVES = ("name", "directives", "builder", "csv")  # of [schedule]
_SPEED = (1e-3, 1e3)


def load_job(path: str | Path | Mapping[str, Any], set: Iterable[str] = ()) -> Job:
    """A job from a file in TOML, or from its sections as a mapping; then `section.key=value` overrides.

    Raises PiperError (io): no such file; (job): not TOML, an unknown key, a wrong type or range; (usage): an override
    that sets nothing.

    >>> load_job({"model": {"config": "tiny-llama"}}, set=["parallel.pp=2"]).parallel.pp
    2
    """
    if isinstance(path, Mapping):
        return job_from(path, set)
    try:
        with open(path, "rb") as f:
            raw = f.read(_LIMIT_BYTES + 1)
    except (OSError, ValueError) as e:  # ValueError: a NUL in the path
        why = getattr(e, "strerror", None) or e
        fix = 'a job file in TOML: [model] config = "llama3-8b"'
        raise PiperError(ErrorKind.IO, f"cannot read the job: {why}", file=str(path), suggestion=fix) from None
    if len(raw) > _LIMIT_BYTES:
        raise PiperError(ErrorKind.JOB, "this is no job file: too large", file=str(path), allowed="1 MB")
    try:
        table = tomllib.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as e:  # not TOML, not UTF-8, a number of too many digits, too deep
        raise PiperError(ErrorKind.JOB, f"not TOML: {e}", file=str(path)) from None
    return job_from(table, set, str(path))


def job_from(table: Mapping[str, Any], sets: Iterable[str] = (), file: str = "job") -> Job:
    """A job from a parsed table.

    >>> job_from({"model": {"config": "tiny-llama"}}, ["parallel.pp=2"]).parallel.pp
    2
    """
    merged: dict[str, Any] = deepcopy(dict(table))
    named: set[str] = set()
    for item in sets:
        keys = _set(merged, item)
        if keys[0] == "schedule" and keys[1] in _ALTERNATIVES:
            named.add(keys[1])
    if named:  # --set schedule.csv=… is meant instead of the file's schedule.name
        for key in set(_ALTERNATIVES) - named:
            merged["schedule"].pop(key, None)
    try:
        return _job(merged, file)
    except PiperError as e:
        raise e.at(file=file) from None


def _set(table: dict[str, Any], item: str) -> list[str]:
    path, eq, text = item.partition("=")
    keys = path.strip().split(".")
    if not eq or len(keys) < 2 or not all(keys):
        raise PiperError(ErrorKind.USAGE, f"{item!r} sets nothing", key="--set", allowed="--set section.key=value")
    at = table
    for k in keys[:-1]:
        at = at.setdefault(k, {})
        if not isinstance(at, dict):
            raise PiperError(ErrorKind.USAGE, f"{k} is a value, not a section", key=f"--set {path}")
    at[keys[-1]] = _bare(text.strip())
    return keys


def _bare(text: str) -> Any:
    """A TOML value, or the text itself."""
    try:
        found = tomllib.loads(f"x = {text}")
    except (ValueError, RecursionError):
        return text
    return found["x"] if len(found) == 1 else text  # more than one: a line break in it


def _job(table: Mapping[str, Any], file: str) -> Job:
    for name, value in table.items():
        if name not in SECTIONS:
            raise _unknown(name, SECTIONS, "section")
        if not isinstance(value, Mapping):
            raise PiperError(ErrorKind.JOB, f"[{name}] is a section, not a value", key=name)
    if "config" not in table.get("model", {}) and "graph" not in table.get("model", {}):
        raise PiperError(
            ErrorKind.JOB,
            "no model",
            key="model.config",
            allowed="a preset or a path to config.json",
            suggestion='"llama3-8b"',
        )
    built = {name: _section(name, cls, table.get(name, {})) for name, cls in SECTIONS.items()}
    _check_schedule(built["schedule"])
    return Job(**built, file=file)


def _check_schedule(s: schema.Schedule) -> None:
    given = [k for k in _ALTERNATIVES if getattr(s, k) is not None]
    if len(given) > 1:
        raise PiperError(
            ErrorKind.JOB,
            f"{' and '.join(given)} are both given",
            key="schedule",
            allowed="one of " + ", ".join(_ALTERNATIVES),
            suggestion=f"keep {given[-1]}",
        )
    if s.name is not None:
        try:
            canonical(s.name)
        except PiperError as e:
            raise PiperError(ErrorKind.JOB, e.message, key=e.key, allowed=e.allowed, suggestion=e.suggestion) from None


def _section(name: str, cls: type, table: Mapping[str, Any]) -> Any:
    hints = get_type_hints(cls)
    known = [f.name for f in fields(cls) if f.name != "overrides"]
    values: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for key, value in table.items():
        if key in known:
            values[key] = _value(f"{name}.{key}", hints[key], value)
        elif name in OPEN:
            _check_plain(f"{name}.{key}", value)
            extra[key] = value
        else:
            raise _unknown(f"{name}.{key}", known, "key")
    if name in OPEN:
        values["overrides"] = extra
    return cls(**values)


def _value(key: str, hint: Any, value: Any) -> Any:
    _check_plain(key, value)
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    fitted = next((v for v in (_fit(o, value) for o in options) if v is not None), None)
    if fitted is None:
        wanted = " or ".join(sorted({_name(o) for o in options if o is not type(None)}))
        fix = _near_value(key, options, value)
        raise PiperError(ErrorKind.JOB, f"{value!r} is no {wanted}", key=key, allowed=wanted, suggestion=fix)
    _check_range(key, fitted)
    return fitted


def _near_value(key: str, options: Sequence[Any], value: Any) -> str | None:
    """The same value in the type that is wanted, where there is one."""
    if int in options and isinstance(value, str | float):
        try:
            return f"{key} = {int(value)}"
        except (ValueError, OverflowError):
            return f"{key} = 1"
    if bool in options:
        return f"{key} = {'true' if value else 'false'}"
    if str in options and isinstance(value, int | float):
        return f'{key} = "{value}"'
    return None


def _check_plain(key: str, value: Any) -> None:
    """Only what JSON has too (TOML also has dates), no text or number beyond all reason."""
    if isinstance(value, Mapping):
        for k, v in value.items():
            _check_plain(key, k)
            _check_plain(key, v)
    elif isinstance(value, list | tuple):
        for v in value:
            _check_plain(key, v)
    elif isinstance(value, str):
        if len(value) > _LIMIT_TEXT or not value.isprintable():
            raise PiperError(
                ErrorKind.JOB, f"{value[:80]!r} is no plain text", key=key, allowed=f"{_LIMIT_TEXT} characters"
            )
    elif not isinstance(value, int | float):
        raise PiperError(
            ErrorKind.JOB, f"{value} is a {type(value).__name__}", key=key, allowed="numbers, text, true/false"
        )
    elif _LARGEST < abs(value) < math.inf or 0 < abs(value) < _SMALLEST:
        small = abs(value) < 1
        allowed = f"from {_SMALLEST:g}" if small else f"up to {_LARGEST:g}"
        raise PiperError(ErrorKind.JOB, f"the number is too {'small' if small else 'large'}", key=key, allowed=allowed)


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
    if isinstance(value, int) and not isinstance(value, bool):
        least = 1 if key in POSITIVE else 0
        if not least <= value <= _LIMIT_INT:
            low = value < least
            message = f"{value} is {'less than ' + str(least) if low else 'too large'}"
            fix = f"{key} = {least if low else _LIMIT_INT}"
            raise PiperError(ErrorKind.JOB, message, key=key, allowed=f"{least} to {_LIMIT_INT}", suggestion=fix)
    if key == "parallel.zero" and value > 3:
        raise PiperError(
            ErrorKind.JOB, f"{value} is no ZeRO level", key=key, allowed="0, 1, 2, 3", suggestion=f"{key} = 3"
        )
    if key == "schedule.recompute":
        for part in (value,) if isinstance(value, str) else value:
            words = (*RECOMPUTE, "none", "selective", "full") if isinstance(value, str) else RECOMPUTE
            if part not in words:
                raise _choice(key, part, words)
    if isinstance(value, float) and (value < 0 or (key == "parallel.bucket_MiB" and not 0 < value < 1e9)):
        more = "more than 0" if key == "parallel.bucket_MiB" else "0 or more"
        raise PiperError(ErrorKind.JOB, f"{value:g} is out of range", key=key, allowed=more)
    if key == "cluster.speed":
        for rank, speed in value.items():
            _check_speed(str(rank), speed)


def _check_speed(rank: str, speed: object) -> None:
    low, high = _SPEED
    fine = isinstance(speed, int | float) and not isinstance(speed, bool) and low <= speed <= high
    if not (rank.isascii() and rank.isdigit() and rank == str(int(rank[:9]))) or not fine:
        raise PiperError(
            ErrorKind.JOB,
            f"speed of rank {rank!r} is {speed!r}",
            key="cluster.speed",
            allowed=f"{{ rank = factor }}, a factor from {low:g} to {high:g}",
            suggestion="speed = { 17 = 0.8 }",
        )


def _choice(key: str, value: Any, words: Iterable[str]) -> PiperError:
    words = list(words)
    what = key.split(".")[-1]
    return PiperError(
        ErrorKind.JOB, f"unknown {what} {value!r}", key=key, allowed=words, suggestion=nearest(str(value), words)
    )


def _unknown(key: str, known: Iterable[str], what: str) -> PiperError:
    names = list(known)
    near = nearest(key.split(".")[-1], names)
    return PiperError(ErrorKind.JOB, f"unknown {what}", key=key, allowed=names, suggestion=near)
