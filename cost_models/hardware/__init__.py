"""Hardware presets (the JSON files beside this one) and the strict loader of hardware files.

>>> load_hardware("h800-sxm", {"nic_Gbps": 200}).nic_Gbps
200.0
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import msgspec

from cost_models.hardware.schema import Hardware, check_consistent, check_known
from ir.core.errors import ErrorKind, PiperError, nearest

__all__ = ["Hardware", "hardware_keys", "load_hardware", "presets"]

_HERE = Path(__file__).parent
Raw = dict[str, object]


def presets() -> tuple[str, ...]:
    """Names of the hardware files that ship with us.

    >>> "h800-sxm" in presets()
    True
    """
    return tuple(sorted(p.stem for p in _HERE.glob("*.json")))


def hardware_keys() -> tuple[str, ...]:
    """Top-level keys of a hardware file: what a job's [cluster] may override inline."""
    return tuple(f.name for f in msgspec.structs.fields(Hardware) if f.name not in ("name", "sources", "software"))


def load_hardware(name_or_path: str | Path, overrides: Mapping[str, object] | None = None) -> Hardware:
    """A preset or a file, with a job's inline overrides on top; anything doubtful is refused.

    A file may start from another with `"base": "<preset or path>"`; nested tables are merged key by key.

    >>> load_hardware("h100")
    Traceback (most recent call last):
    ...
    ir.core.errors.PiperError: cluster.gpu: unknown hardware preset 'h100'
    allowed: a path to a .json file, a100-sxm-40gb, ...
    fix: h100-sxm
    """
    raw, file = _read(str(name_or_path), ())
    try:
        check_known(raw)
        _check_finite(raw, "")
    except PiperError as error:
        raise error.at(file=file) from None
    if overrides:
        check_known(dict(overrides), prefix="cluster.")
        _check_finite(dict(overrides), "cluster.")
        raw = _merge(raw, overrides)
    try:
        hw = msgspec.convert(raw, Hardware, strict=True)
    except msgspec.ValidationError as error:
        # msgspec says "... - at `$.gemm.ramp_bytes`"; we hand out message and key apart.
        message, _, where = str(error).partition(" - at `$.")
        key = where.rstrip("`") or None
        if key and overrides and key.split(".")[0].split("[")[0] in overrides:
            raise PiperError(ErrorKind.HARDWARE, message, key=f"cluster.{key}") from None
        raise PiperError(ErrorKind.HARDWARE, message, file=file, key=key) from None
    check_consistent(hw)
    return hw


def _read(name: str, seen: tuple[str, ...]) -> tuple[Raw, str]:
    """The raw table of a preset or file with its bases merged underneath, and the file's path."""
    path = _path(name)
    if str(path) in seen:
        circle = " -> ".join([*seen, str(path)])
        raise PiperError(ErrorKind.HARDWARE, f"bases go round in a circle: {circle}", key="base")
    try:
        raw = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except OSError as error:
        raise PiperError(ErrorKind.IO, f"cannot read: {error.strerror}", file=str(path), key="cluster.gpu") from None
    except msgspec.DecodeError as error:
        raise PiperError(ErrorKind.HARDWARE, f"not a JSON object: {error}", file=str(path)) from None
    base = raw.pop("base", None)
    if base is None:
        return raw, str(path)
    if not isinstance(base, str):
        raise PiperError(ErrorKind.HARDWARE, "base must be a preset's name or a path", file=str(path), key="base")
    beside = path.parent / base
    under, _ = _read(str(beside) if base.endswith(".json") and beside.exists() else base, (*seen, str(path)))
    return _merge(under, raw), str(path)


def _path(name: str) -> Path:
    known = presets()
    if name in known:
        return _HERE / f"{name}.json"
    if name.endswith(".json") or "/" in name:
        return Path(name)
    raise PiperError(
        ErrorKind.HARDWARE,
        f"unknown hardware preset {name!r}",
        key="cluster.gpu",
        allowed=["a path to a .json file", *known],
        suggestion=nearest(name, known),
    )


def _merge(under: Mapping[str, object], over: Mapping[str, object]) -> Raw:
    out: Raw = dict(under)
    for key, value in over.items():
        below = out.get(key)
        out[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
    return out


def _check_finite(value: object, key: str) -> None:
    """NaN passes every `x > 0` test in some form, so it is refused before types are looked at."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _check_finite(inner, f"{key}{name}" if not key or key.endswith(".") else f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_finite(inner, key)
    elif isinstance(value, float) and not math.isfinite(value):
        raise PiperError(ErrorKind.HARDWARE, f"{value} is not a finite number", key=key)
