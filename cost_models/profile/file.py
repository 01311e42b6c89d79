"""Profiles as files: stable JSON out, and a strict reader that names file, key, what is allowed and the nearest fix.

A digest inside is checked when a file is read. Whoever changes one by hand sets it to null, and results say so.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from cost_models.profile.fit import MessageCurve, Seconds
from cost_models.profile.pairs import KernelPair, pair_keys
from cost_models.profile.profile import VERSION, MeasuredCost, OpEntry, Profile, ProfileMachine
from cost_models.profile.shapes import KernelShape
from ir.core.errors import ErrorKind
from ir.core.files import FileErrors, cut, parse_json, read_text, typed, words

FORM = FileErrors("a profile", ErrorKind.JOB, "costs.profile", 10**8, "piper-sim calibrate writes one")
_LINK = re.compile(r"p2p(@\d+)? \d+|[a-z_]+ \d+(@\d+)? \d+", re.ASCII)
_LINKS = "`p2p <bytes>` or `<kind> <ranks> <bytes>`, with `@<nodes>` behind p2p or ranks where that is known"
_ENTRY = ("median_s", "spread_s", "count", "family", "at", "alone")
_TAKE = "take it again: piper-sim calibrate"


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
    table: dict[str, Any] = asdict(entry.time)
    if entry.shape is not None:
        table |= {"family": entry.shape.family, "at": dict(entry.shape.at)}
    return table | {"alone": True} if entry.alone else table


def digest_of(table: Mapping[str, object]) -> str:
    """SHA-256 of all that a profile's file holds, but for the digest itself."""
    rest = {k: v for k, v in table.items() if k != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, allow_nan=False).encode()).hexdigest()


class _Op(Struct):
    """An entry of `ops` as the file has it; what it lacks is told by the keys of the table."""

    median_s: Seconds = 0.0
    spread_s: Seconds = 0.0
    count: Annotated[int, Meta(ge=1)] = 1
    alloc: str = ""  # what it allocates, in files of old; read over
    family: str = ""
    at: dict[str, Annotated[int, Meta(ge=0)]] = {}
    alone: bool = True


class _File(Struct):
    """The file."""

    profile_version: int
    digest: str | None
    machine: ProfileMachine
    origins: tuple[str, ...]
    host_s: Seconds | None
    fit_error: Seconds
    ops: dict[str, _Op]
    links: dict[str, MeasuredCost]
    curves: dict[str, MessageCurve]
    pairs: dict[Annotated[str, words(*pair_keys(), said="pair")], KernelPair]


def load_profile(path: str | Path, key: str = "costs.profile") -> Profile:
    """Read a profile file. key: what named it. Raises PiperError (io, job): nothing doubtful is let through."""
    form = FORM.named_by(key)
    return parse_profile(read_text(path, form), form, str(path))


def parse_profile(text: str, form: FileErrors = FORM, file: str | None = None) -> Profile:
    """The profile that a text holds; the inverse of `profile_text`. Raises PiperError (job).

    >>> parse_profile('{"profile_version": 2, "machin": {}}')
    Traceback (most recent call last):
    ...
    ir.core.errors.PiperError: machin: unknown key
    allowed: a table of profile_version, digest, machine, origins, host_s, fit_error, ops, links, curves, pairs
    fix: machine
    """
    table = parse_json(text, form, file)
    version = table.get("profile_version", VERSION) if isinstance(table, dict) else VERSION
    if version != VERSION or isinstance(version, bool):
        raise FORM.wrong(f"version {cut(version)}", file, "profile_version", str(VERSION), _TAKE)
    found = typed(table, _File, FORM, file)
    # An entry of old that says nothing but what its class allocates is no entry any more.
    kept = {key: op for key, op in found.ops.items() if table["ops"][key].keys() != {"alloc"}}
    ops = {key: _op(table["ops"][key], op, f"ops.{key}", file) for key, op in kept.items()}
    for key in found.links:
        if not _LINK.fullmatch(key):
            raise FORM.wrong("not a link", file, f"links.{key}", _LINKS)
    for key, curve in found.curves.items():
        ends = [n for p in curve.pieces for n in (p.first, p.last)]
        if not ends or ends != sorted(ends):
            raise FORM.wrong(cut(ends), file, f"curves.{key}.pieces", "pieces in the order of their sizes")
    sealed = found.digest is not None
    origins, machine = found.origins, found.machine
    if machine.cpu and not machine.cores:
        raise FORM.wrong("a processor without cores", file, "machine.cores", "an integer from 1 up")
    profile = Profile(machine, ops, found.links, found.curves, found.host_s, found.pairs, origins, sealed)
    if found.fit_error != profile.fit_error:
        allowed = f"{profile.fit_error}, the largest error of `curves`"
        raise FORM.wrong(cut(found.fit_error), file, "fit_error", allowed)
    if sealed and found.digest != (right := digest_of(table)):
        message = f"the file was changed after it was measured: its digest would be {right[:12]}"
        fix = f"{_TAKE}; or set it to null, and results will say that it was edited"
        raise FORM.wrong(message, file, "digest", "the digest that was written, or null", fix)
    return profile


def _op(table: Mapping[str, object], op: _Op, at: str, file: str | None) -> OpEntry:
    shaped = table.keys() & {"family", "at"}
    for k in (*_ENTRY[:3], *(("family", "at") if shaped else ())):
        if k not in table:
            raise FORM.wrong("missing", file, f"{at}.{k}", ", ".join(_ENTRY))
    if not op.alone:
        raise FORM.wrong("False", file, f"{at}.alone", "true, or no such key")
    return OpEntry(
        MeasuredCost(op.median_s, op.spread_s, op.count),
        KernelShape(op.family, op.at) if shaped else None,
        "alone" in table,
    )
