"""Profiles as files: stable JSON out, and a strict reader that names file, key, what is allowed and the nearest fix."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cost_models.profile import VERSION, Machine, Measured, OpEntry, Profile
from cost_models.profile_fit import Curve
from ir.alloc import AllocList
from ir.errors import ErrorKind, PiperError, nearest

_TIME = ("median_s", "spread_s", "count")
_CURVE = ("alpha_s", "beta_s_per_byte", "error")
_MACHINE = ("cpu", "cores", "gpu", "gpus", "versions", "date")
_TOP = ("profile_version", "machine", "host_s", "fit_error", "ops", "links", "curves")
_LIMIT_BYTES = 100_000_000
_LARGEST = 1e18


def profile_text(profile: Profile) -> str:
    """Stable: equal profiles give equal text."""
    table = {
        "profile_version": VERSION,
        "machine": asdict(profile.machine),
        "host_s": profile.host_s,
        "fit_error": profile.fit_error,
        "ops": {key: _op_table(entry) for key, entry in profile.ops.items()},
        "links": {key: asdict(found) for key, found in profile.links.items()},
        "curves": {key: asdict(curve) for key, curve in profile.curves.items()},
    }
    return json.dumps(table, indent=1, sort_keys=True, allow_nan=False) + "\n"


def _op_table(entry: OpEntry) -> dict[str, Any]:
    table: dict[str, Any] = {} if entry.time is None else asdict(entry.time)
    return table if entry.alloc is None else table | {"alloc": entry.alloc.text()}


def load_profile(path: str | Path) -> Profile:
    """Read a profile file. Raises PiperError (io, job): nothing doubtful is let through."""
    file = Path(path)
    try:
        with file.open("rb") as f:
            raw = f.read(_LIMIT_BYTES + 1)
    except OSError as error:
        fix = "piper-sim calibrate writes one"
        message = f"cannot read the profile: {error.strerror}"
        raise PiperError(ErrorKind.IO, message, file=str(path), key="costs.profile", suggestion=fix) from None
    try:
        if len(raw) > _LIMIT_BYTES:
            raise PiperError(ErrorKind.JOB, "this is no profile: too large", allowed=f"{_LIMIT_BYTES} bytes")
        return parse_profile(raw.decode("utf-8"))
    except UnicodeDecodeError:
        raise PiperError(ErrorKind.JOB, "not UTF-8", file=str(path)) from None
    except PiperError as error:
        raise error.at(file=str(path)) from None


def parse_profile(text: str) -> Profile:
    """The profile that a text holds; the inverse of `profile_text`.

    >>> parse_profile('{"profile_version": 1, "machin": {}}')
    Traceback (most recent call last):
    ...
    ir.errors.PiperError: machin: unknown key
    allowed: profile_version, machine, host_s, fit_error, ops, links, curves
    fix: machine
    """
    try:
        table = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise PiperError(ErrorKind.JOB, f"not JSON: {error}") from None
    top = _table(table, "", _TOP, _TOP)
    if top["profile_version"] != VERSION or isinstance(top["profile_version"], bool):
        message = f"version {top['profile_version']!r}"
        fix = "take it again: piper-sim calibrate"
        raise PiperError(ErrorKind.JOB, message, key="profile_version", allowed=str(VERSION), suggestion=fix)
    profile = Profile(
        _machine(top["machine"]),
        {key: _op(value, f"ops.{key}") for key, value in _open(top["ops"], "ops").items()},
        {key: _measured(value, _link(key)) for key, value in _open(top["links"], "links").items()},
        {key: _curve(value, f"curves.{key}") for key, value in _open(top["curves"], "curves").items()},
        None if top["host_s"] is None else _number(top["host_s"], "host_s"),
    )
    if _number(top["fit_error"], "fit_error") != profile.fit_error:
        raise _wrong("fit_error", top["fit_error"], f"{profile.fit_error}, the largest error of `curves`")
    return profile


def _machine(value: object) -> Machine:
    table = _table(value, "machine", _MACHINE, _MACHINE)
    versions = _open(table["versions"], "machine.versions")
    return Machine(
        _text(table["cpu"], "machine.cpu"),
        _count(table["cores"], "machine.cores", 1),
        _text(table["gpu"], "machine.gpu"),
        _count(table["gpus"], "machine.gpus", 0),
        {name: _text(v, f"machine.versions.{name}") for name, v in versions.items()},
        _text(table["date"], "machine.date"),
    )


def _op(value: object, at: str) -> OpEntry:
    table = _table(value, at, (*_TIME, "alloc"), ())
    timed = {k: v for k, v in table.items() if k != "alloc"}
    alloc = None
    if "alloc" in table:
        try:
            alloc = AllocList.parse(_text(table["alloc"], f"{at}.alloc"))
        except PiperError as error:
            raise error.at(key=f"{at}.alloc") from None
    if not table:
        raise PiperError(ErrorKind.JOB, "says nothing", key=at, allowed=(*_TIME, "alloc"))
    return OpEntry(_measured(timed, at) if timed else None, alloc)


def _link(key: str) -> str:
    """Where a link stands in the file. Its key ends in bytes."""
    if not key.rpartition(" ")[2].isdecimal() or " " not in key:
        allowed = "`p2p <bytes>`, or `<kind> <ranks> <bytes>`"
        raise PiperError(ErrorKind.JOB, "not a link", key=f"links.{key}", allowed=allowed)
    return f"links.{key}"


def _measured(value: object, at: str) -> Measured:
    table = _table(value, at, _TIME, _TIME)
    median, spread = (_number(table[k], f"{at}.{k}") for k in _TIME[:2])
    return Measured(median, spread, _count(table["count"], f"{at}.count", 1))


def _curve(value: object, at: str) -> Curve:
    table = _table(value, at, _CURVE, _CURVE)
    return Curve(*(_number(table[k], f"{at}.{k}") for k in _CURVE))


def _open(value: object, at: str) -> Mapping[str, object]:
    """A table with keys of its own."""
    if not isinstance(value, dict):
        raise _wrong(at, value, "a table")
    return value


def _table(value: object, at: str, known: Iterable[str], needed: Iterable[str]) -> Mapping[str, Any]:
    table, known = _open(value, at or "the file"), tuple(known)
    prefix = f"{at}." if at else ""
    for key in table:
        if key not in known:
            fix = nearest(key, known)
            raise PiperError(ErrorKind.JOB, "unknown key", key=f"{prefix}{key}", allowed=known, suggestion=fix)
    for key in needed:
        if key not in table:
            raise PiperError(ErrorKind.JOB, "missing", key=f"{prefix}{key}", allowed=known)
    return table


def _number(value: object, at: str) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _LARGEST
    if not good:
        raise _wrong(at, value, "a finite number from 0 up")
    return float(value)  # type: ignore[arg-type]


def _count(value: object, at: str, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise _wrong(at, value, f"an integer from {least} up")
    return value


def _text(value: object, at: str) -> str:
    if not isinstance(value, str):
        raise _wrong(at, value, "a text")
    return value


def _wrong(at: str, value: object, allowed: str) -> PiperError:
    return PiperError(ErrorKind.JOB, f"{value!r:.60}", key=at, allowed=allowed)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    out = dict(pairs)
    if len(out) < len(pairs):
        raise ValueError(f"a key is given twice: {next(k for k, _ in pairs if [p for p, _ in pairs].count(k) > 1)!r}")
    return out
