"""Hardware presets (the JSON files beside this one) and the strict loader of hardware files.

>>> load_hardware("h800-sxm", {"nic_Gbps": 200}).nic_Gbps
200.0
"""

import os
import re
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from cost_models.hardware.schema import DeviceHardware, check_consistent
from ir.core.errors import ErrorKind, PiperError, nearest
from ir.core.files import FileErrors, cut, named_path, read_json, typed

__all__ = ["DeviceHardware", "load_hardware", "presets"]

_FIX = "a preset's name, or a path to a .json file"
FORM = FileErrors("a hardware file", ErrorKind.HARDWARE, "cluster.gpu", 10**6, _FIX, smallest=1e-30)  # as a job's
_HERE = Path(__file__).parent
Raw = dict[str, Any]


@cache
def presets() -> tuple[str, ...]:
    """Names of the hardware files that ship with us.

    >>> "h800-sxm" in presets()
    True
    """
    return tuple(sorted(p.stem for p in _HERE.glob("*.json")))


def load_hardware(
    name_or_path: str | Path, overrides: Mapping[str, object] | None = None, beside: Collection[str] = ()
) -> DeviceHardware:
    """A preset or a file, with a job's inline overrides on top; anything doubtful is refused.

    A file may start from another with `"base": "<preset or path>"`; nested tables are merged key by key. beside: the
    job's own keys, among which stand the overrides.

    >>> load_hardware("h100")
    Traceback (most recent call last):
    ...
    ir.core.errors.PiperError: cluster.gpu: unknown hardware preset 'h100'
    allowed: a path to a .json file, a100-sxm-40gb, ...
    fix: h100-sxm
    """
    if not overrides and name_or_path in presets():
        return _preset(str(name_or_path))
    return _load(str(name_or_path), dict(overrides or {}), beside)


@cache
def _preset(name: str) -> DeviceHardware:
    return _load(name, {}, ())


def _load(name_or_path: str, over: Raw, beside: Collection[str]) -> DeviceHardware:
    raw, file = _read(name_or_path, ())
    merged = _merge(raw, over)
    try:
        return check_consistent(typed(merged, DeviceHardware, FORM, file))
    except PiperError as error:
        if re.split(r"[.[]", error.key or "")[0] not in over:
            raise error.at(file=file) from None
    return check_consistent(
        typed(merged, DeviceHardware, FORM, None, "cluster", beside), "cluster."
    )  # the same error, of the job


def _read(name: str, seen: tuple[str, ...]) -> tuple[Raw, str]:
    """The raw table of a preset or file with its bases merged underneath, and the file's path."""
    path = _path(name)
    if str(path) in seen:
        circle = " -> ".join([*seen, str(path)])
        allowed = "a preset, or a file that starts from none of those that start from it"
        raise FORM.wrong(f"bases go round in a circle: {circle}", str(path), "base", allowed)
    raw: Raw = typed(read_json(path, FORM), dict[str, Any], FORM, str(path))
    base = raw.pop("base", None)
    if base is None:
        return raw, str(path)
    if not isinstance(base, str):
        raise FORM.wrong(f"{cut(base)} is no text", str(path), "base", "a preset's name, or a path from this file on")
    try:
        lower = named_path(str(path), base, presets())
        if not os.path.exists(_path(lower)):  # the file that names it is the one to mend
            raise FORM.wrong(f"no such file: {lower}", None, "base", "a preset's name, or a path from this file on")
        under, _ = _read(lower, (*seen, str(path)))
    except PiperError as e:
        raise e if e.file else FORM.wrong(e.message, str(path), "base", e.allowed, e.suggestion) from None
    return _merge(under, raw), str(path)


def _path(name: str) -> Path:
    known = presets()
    if name in known:
        return _HERE / f"{name}.json"
    if name.endswith(".json") or "/" in name or "\\" in name:
        return Path(name)
    begun = [k for k in known if k.startswith(f"{name.lower()}-")]  # gb300
    raise PiperError(
        ErrorKind.HARDWARE,
        f"unknown hardware preset {name!r}",
        key="cluster.gpu",
        allowed=["a path to a .json file", *known],
        suggestion=begun[0] if len(begun) == 1 else nearest(name, known),
    )


def _merge(under: Mapping[str, object], over: Mapping[str, object]) -> Raw:
    out: Raw = dict(under)
    for key, value in over.items():
        below = out.get(key)
        out[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
    return out
