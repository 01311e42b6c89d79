"""Profiles as files: stable JSON out, and a strict reader that names file, key, what is allowed and the nearest fix.

A digest inside is checked when a file is read. Whoever changes one by hand sets it to null, and results say so.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cost_models.profile.fit import Curve, Piece
from cost_models.profile.pairs import Pair, pair_keys
from cost_models.profile.profile import VERSION, Machine, Measured, OpEntry, Profile
from cost_models.profile.shapes import OpShape
from ir.core.alloc import AllocList
from ir.core.errors import ErrorKind, PiperError, nearest

_TIME = ("median_s", "spread_s", "count")
_OP = (*_TIME, "alloc", "family", "at", "alone")
_CURVE = ("pieces", "error", "spread")
_PIECE = ("first", "last", "alpha_s", "beta_s_per_byte")
_PAIR = ("held", "moving", "wire")
_MACHINE = ("cpu", "cores", "gpu", "gpus", "versions", "date", "threads")
_TOP = ("profile_version", "digest", "machine", "origins", "host_s", "fit_error", "ops", "links", "curves", "pairs")
_LIMIT_BYTES = 100_000_000
_LARGEST = 1e18
_LINK = re.compile(r"p2p(@\d+)? \d+|[a-z_]+ \d+(@\d+)? \d+", re.ASCII)


def profile_text(profile: Profile) -> str:
    """Stable: equal profiles give equal text."""
    table = {
        "profile_version": VERSION,
        "machine": asdict(profile.machine),
        "origins": list(profile.origins),
        "host_s": profile.host_s,
        "fit_error": profile.fit_error,
        "ops": {key: _op_table(entry) for key, entry in profile.ops.items()},
        "links": {key: asdict(found) for key, found in profile.links.items()},
        "curves": {key: asdict(curve) for key, curve in profile.curves.items()},
        "pairs": {key: asdict(pair) for key, pair in profile.pairs.items()},
    }
    table["digest"] = digest_of(table) if profile.sealed else None
    return json.dumps(table, indent=1, sort_keys=True, allow_nan=False) + "\n"


def _op_table(entry: OpEntry) -> dict[str, Any]:
    table: dict[str, Any] = {} if entry.time is None else asdict(entry.time)
    if entry.alloc is not None:
        table["alloc"] = entry.alloc.text()
    if entry.shape is not None:
        table |= {"family": entry.shape.family, "at": dict(entry.shape.at)}
    return table | {"alone": True} if entry.alone else table


def digest_of(table: Mapping[str, object]) -> str:
    """SHA-256 of all that a profile's file holds, but for the digest itself."""
    rest = {k: v for k, v in table.items() if k != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, allow_nan=False).encode()).hexdigest()


def load_profile(path: str | Path, key: str = "costs.profile") -> Profile:
    """Read a profile file. key: what named it. Raises PiperError (io, job): nothing doubtful is let through."""
    file = Path(path)
    try:
        with file.open("rb") as f:
            raw = f.read(_LIMIT_BYTES + 1)
    except OSError as error:
        fix = "piper-sim calibrate writes one"
        message = f"cannot read the profile: {error.strerror}"
        raise PiperError(ErrorKind.IO, message, file=str(path), key=key, suggestion=fix) from None
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

    >>> parse_profile('{"profile_version": 2, "machin": {}}')
    Traceback (most recent call last):
    ...
    ir.core.errors.PiperError: machin: unknown key
    allowed: profile_version, digest, machine, origins, host_s, fit_error, ops, links, curves, pairs
    fix: machine
    """
    try:
        table = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise PiperError(ErrorKind.JOB, f"not JSON: {error}") from None
    version = _table(table, "", _TOP, ()).get("profile_version", VERSION)
    if version != VERSION or isinstance(version, bool):
        fix = "take it again: piper-sim calibrate"
        allowed = str(VERSION)
        raise PiperError(ErrorKind.JOB, f"version {version!r}", key="profile_version", allowed=allowed, suggestion=fix)
    top = _table(table, "", _TOP, _TOP)
    profile = Profile(
        _machine(top["machine"]),
        {key: _op(value, f"ops.{key}") for key, value in _open(top["ops"], "ops").items()},
        {key: _measured(value, _link(key)) for key, value in _open(top["links"], "links").items()},
        {key: _curve(value, f"curves.{key}") for key, value in _open(top["curves"], "curves").items()},
        None if top["host_s"] is None else _number(top["host_s"], "host_s"),
        {_pair_key(key): _pair(value, f"pairs.{key}") for key, value in _open(top["pairs"], "pairs").items()},
        tuple(_text(x, f"origins.{i}") for i, x in enumerate(_list(top["origins"], "origins"))),
        top["digest"] is not None,
    )
    if _number(top["fit_error"], "fit_error") != profile.fit_error:
        raise _wrong("fit_error", top["fit_error"], f"{profile.fit_error}, the largest error of `curves`")
    if top["digest"] not in (None, found := digest_of(top)):
        message = f"the file was changed after it was measured: its digest would be {found[:12]}"
        fix = "take it again: piper-sim calibrate; or set it to null, and results will say that it was edited"
        raise PiperError(ErrorKind.JOB, message, key="digest", suggestion=fix)
    return profile


def _machine(value: object) -> Machine:
    table = _table(value, "machine", _MACHINE, _MACHINE)
    versions = _open(table["versions"], "machine.versions")
    cpu = _text(table["cpu"], "machine.cpu")
    return Machine(
        cpu,
        _count(table["cores"], "machine.cores", 1 if cpu else 0),
        _text(table["gpu"], "machine.gpu"),
        _count(table["gpus"], "machine.gpus", 0),
        {name: _text(v, f"machine.versions.{name}") for name, v in versions.items()},
        _text(table["date"], "machine.date"),
        _count(table["threads"], "machine.threads", 1),
    )


def _op(value: object, at: str) -> OpEntry:
    table = _table(value, at, _OP, ())
    timed = {k: v for k, v in table.items() if k in _TIME}
    if not timed and "alloc" not in table:
        raise PiperError(ErrorKind.JOB, "says nothing", key=at, allowed=_OP)
    alloc = None
    if "alloc" in table:
        try:
            alloc = AllocList.parse(_text(table["alloc"], f"{at}.alloc"))
        except PiperError as error:
            raise error.at(key=f"{at}.alloc") from None
    shape = None
    if "family" in table or "at" in table:
        _table(table, at, _OP, ("family", "at"))
        sizes = {k: _count(v, f"{at}.at.{k}", 0) for k, v in _open(table["at"], f"{at}.at").items()}
        shape = OpShape(_text(table["family"], f"{at}.family"), sizes)
    if table.get("alone", True) is not True:
        raise _wrong(f"{at}.alone", table["alone"], "true, or no such key")
    return OpEntry(_measured(timed, at) if timed else None, alloc, shape, "alone" in table)


def _link(key: str) -> str:
    """Where a link stands in the file."""
    if not _LINK.fullmatch(key):
        allowed = "`p2p <bytes>` or `<kind> <ranks> <bytes>`, with `@<nodes>` behind p2p or ranks where that is known"
        raise PiperError(ErrorKind.JOB, "not a link", key=f"links.{key}", allowed=allowed)
    return f"links.{key}"


def _measured(value: object, at: str) -> Measured:
    table = _table(value, at, _TIME, _TIME)
    median, spread = (_number(table[k], f"{at}.{k}") for k in _TIME[:2])
    return Measured(median, spread, _count(table["count"], f"{at}.count", 1))


def _curve(value: object, at: str) -> Curve:
    table = _table(value, at, _CURVE, _CURVE)
    pieces = [_piece(p, f"{at}.pieces.{i}") for i, p in enumerate(_list(table["pieces"], f"{at}.pieces"))]
    ends = [n for p in pieces for n in (p.first, p.last)]
    if not pieces or ends != sorted(ends):
        raise _wrong(f"{at}.pieces", ends, "pieces in the order of their sizes")
    return Curve(tuple(pieces), _number(table["error"], f"{at}.error"), _number(table["spread"], f"{at}.spread"))


def _piece(value: object, at: str) -> Piece:
    table = _table(value, at, _PIECE, _PIECE)
    first, last = (_count(table[k], f"{at}.{k}", 0) for k in _PIECE[:2])
    return Piece(first, last, *(_number(table[k], f"{at}.{k}") for k in _PIECE[2:]))


def _pair_key(key: str) -> str:
    if key not in pair_keys():
        fix = nearest(key, pair_keys())
        raise PiperError(ErrorKind.JOB, "no such pair", key=f"pairs.{key}", allowed=pair_keys(), suggestion=fix)
    return key


def _pair(value: object, at: str) -> Pair:
    table = _table(value, at, _PAIR, _PAIR)
    return Pair(*(_number(table[k], f"{at}.{k}") for k in _PAIR))


def _open(value: object, at: str) -> Mapping[str, object]:
    """A table with keys of its own."""
    if not isinstance(value, dict):
        raise _wrong(at, value, "a table")
    return value


def _list(value: object, at: str) -> list[object]:
    if not isinstance(value, list):
        raise _wrong(at, value, "a list")
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
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _LARGEST:
        raise _wrong(at, value, "a finite number from 0 up")
    return float(value)


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
