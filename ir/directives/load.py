"""Strategy files: a JSON list of directives, ours or UW Piper's as they are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ir.directives.order import OrderBy
from ir.directives.place import Place
from ir.directives.replicate import Replicate
from ir.directives.shard import Shard
from ir.directives.split import Split
from ir.directives.strategy import Directive
from ir.errors import ErrorKind, PiperError, nearest
from ir.filters import Filter, parse_filter
from ir.order import Order

_KEYS: Mapping[str, frozenset[str]] = {
    "place": frozenset({"filter", "devices", "device", "stream", "group"}),
    "replicate": frozenset(
        {"filter", "devices", "device", "reduce_stream", "gather_stream", "bucket_size", "bucket_MiB"}
        | {"shard_grads", "shard_params", "zero"}
    ),
    "shard": frozenset({"filter", "devices", "device", "stream", "axis", "sequence_parallel"}),
    "split": frozenset({"filter", "dim_name", "num_microbatches"}),
    "order": frozenset({"filters", "group", "cells"}),
}
_LIMIT_BYTES = 64_000_000


@dataclass(frozen=True)
class Strategy:
    """A file's directives in pass order, and what its device lists say: pipeline groups, replicas."""

    directives: tuple[Directive, ...]
    groups: int | None
    replicas: int | None
    stages: int
    mbs: int | None


def load_strategy(path: str | Path) -> Strategy:
    """Read a strategy file. Raises PiperError (io, directive) naming the file and the directive's index."""
    file = str(path)
    try:
        text = Path(path).read_bytes()
    except OSError as e:
        raise PiperError(ErrorKind.IO, f"cannot read the strategy: {e.strerror}", file=file) from None
    if len(text) > _LIMIT_BYTES:
        raise PiperError(ErrorKind.DIRECTIVE, f"{len(text)} bytes is too large", file=file, allowed="64 MB")
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as e:
        raise PiperError(ErrorKind.DIRECTIVE, f"not JSON: {e}", file=file) from None
    except PiperError as e:
        raise e.at(file=file) from None
    try:
        return parse_strategy(value)
    except PiperError as e:
        raise e.at(file=file) from None


def parse_strategy(value: object) -> Strategy:
    """Directives from parsed JSON, re-sorted into Piper's pass order: split, place, replicate and shard, order.

    >>> s = parse_strategy([{"op": "place", "filter": {"PP": 0}, "devices": [0, 2]}])
    >>> [str(d) for d in s.directives], s.replicas
    (['place({"PP": 0}, group=0)'], 2)
    """
    if not isinstance(value, list):
        raise _bad("a strategy is a JSON list of directives", '[{"op": "place", …}, …]')
    for i, d in enumerate(value):
        _check_shape(i, d)
    lists = sorted({tuple(_devices(i, d)) for i, d in enumerate(value) if d["op"] == "place" and "group" not in d})
    if lists and len({len(x) for x in lists}) > 1:
        raise _bad(f"device lists differ in length: {[list(x) for x in lists]}", "one device per replica in each place")
    if lists and len({d for x in lists for d in x}) < sum(map(len, lists)):
        raise _bad(f"device lists overlap: {[list(x) for x in lists]}", "each device in one list")
    group = {x: n for n, x in enumerate(lists)}
    splits = [_split(i, d) for i, d in enumerate(value) if d["op"] == "split"]
    if len({s.mbs for s in splits}) > 1:
        raise _bad("several microbatch counts", "one num_microbatches for the whole model")
    places = [_place(i, d, group) for i, d in enumerate(value) if d["op"] == "place"]
    middle = [_sync(i, d) for i, d in enumerate(value) if d["op"] in ("replicate", "shard")]
    order = _orders(value)
    stages = _stages(places)
    pipeline: list[Directive] = [*splits[:1], *places, *middle, *order]
    replicas = len(lists[0]) if lists else None
    return Strategy(tuple(pipeline), len(lists) or None, replicas, stages, splits[0].mbs if splits else None)


def _check_shape(i: int, d: object) -> None:
    if not isinstance(d, Mapping):
        raise _bad(f"directive {i} is no object: {d!r}", '{"op": "place", …}')
    op = str(d.get("op"))
    if op not in _KEYS:
        raise _bad(f"directive {i}: unknown op {op!r}", ", ".join(_KEYS), nearest(op, _KEYS))
    for key in d:
        if key != "op" and key not in _KEYS[op]:
            allowed = sorted(_KEYS[op])
            raise _bad(f"directive {i} ({op}): unknown key {key!r}", ", ".join(allowed), nearest(str(key), allowed))


def _filter(i: int, d: Mapping[str, Any]) -> Filter:
    if "filter" not in d:
        raise _bad(f"directive {i} ({d['op']}): no filter", '"filter": {"PP": 0}')
    try:
        return parse_filter(d["filter"])
    except PiperError as e:
        raise _bad(f"directive {i} ({d['op']}): {e.message}", e.allowed, e.suggestion) from None


def _devices(i: int, d: Mapping[str, Any]) -> list[int]:
    devices = d.get("devices", d.get("device"))
    good = isinstance(devices, list) and devices and all(type(x) is int and x >= 0 for x in devices)
    if not good or len(set(devices)) < len(devices):
        raise _bad(f"directive {i} ({d['op']}): devices {devices!r}", "a list of distinct device numbers")
    return list(devices)


def _split(i: int, d: Mapping[str, Any]) -> Split:
    n, dim = d.get("num_microbatches"), d.get("dim_name")
    if type(n) is not int or not 0 < n <= 1_000_000:
        raise _bad(f"directive {i} (split): num_microbatches = {n!r}", "an integer from 1 to 1000000")
    if not isinstance(dim, str) or not dim:
        raise _bad(f"directive {i} (split): dim_name = {dim!r}", '"MB"')
    return Split(_filter(i, d), dim, n)


def _place(i: int, d: Mapping[str, Any], group: Mapping[tuple[int, ...], int]) -> Place:
    if "group" in d:
        if type(d["group"]) is not int or d["group"] < 0:
            raise _bad(f"directive {i} (place): group = {d['group']!r}", "a pipeline rank, 0 or more")
        return Place(_filter(i, d), d["group"])
    return Place(_filter(i, d), group[tuple(_devices(i, d))])


def _sync(i: int, d: Mapping[str, Any]) -> Directive:
    if d["op"] == "shard":
        stream = d.get("stream", "compute" if "devices" in d else "ep")
        return Shard(_filter(i, d), d.get("axis", "ep"), _stream(stream), _flag(i, d, "sequence_parallel"))
    zero = d.get("zero")
    if zero is None:
        zero = 3 if _flag(i, d, "shard_params") else 2 if _flag(i, d, "shard_grads") else 0
    size = d.get("bucket_MiB", d.get("bucket_size"))
    if size is not None and (not isinstance(size, int | float) or isinstance(size, bool) or not size > 0):
        raise _bad(f"directive {i} (replicate): bucket size {size!r}", "MiB, more than 0")
    reduce, gather = d.get("reduce_stream", "dp"), d.get("gather_stream", d.get("reduce_stream", "dp"))
    return Replicate(_filter(i, d), zero, size, _stream(reduce), _stream(gather))


def _stream(name: object) -> str:
    """Piper's `default_stream` is the compute stream; ours has its own name for collectives on it."""
    if not isinstance(name, str) or not name.replace("_", "").isalnum():
        raise _bad(f"stream {name!r}", "a word")
    return "default" if name in ("default_stream", "compute") else name.removesuffix("_stream")


def _flag(i: int, d: Mapping[str, Any], key: str) -> bool:
    value = d.get(key, False)
    if not isinstance(value, bool):
        raise _bad(f"directive {i} ({d['op']}): {key} = {value!r}", "true or false")
    return value


def _orders(value: Sequence[Mapping[str, Any]]) -> list[OrderBy]:
    table, rows = [], []
    for i, d in enumerate(value):
        if d["op"] != "order":
            continue
        if "cells" in d:
            if type(d.get("group")) is not int:
                raise _bad(f"directive {i} (order): cells need a group", '"group": 0')
            table.append((d["group"], Order.of([str(c) for c in d["cells"]])))
            continue
        groups = d.get("filters")
        if not isinstance(groups, list) or len(groups) < 2 or not all(isinstance(g, list) and g for g in groups):
            raise _bad(f"directive {i} (order): filters", "a list of at least two lists of filters")
        rows.append(tuple(tuple(_filter(i, {"op": "order", "filter": f}) for f in g) for g in groups))
    return [OrderBy(tuple(table), tuple(rows))] if table or rows else []


def _stages(places: Sequence[Place]) -> int:
    named = {m for p in places for t, match in p.filter.matches if t == "PP" for r in match.ranges for m in r}
    if named != set(range(len(named))):
        raise _bad(f"PP indices {sorted(named)} have gaps", "stages 0, 1, 2, …")
    return len(named)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for k, v in pairs:
        if k in out:
            raise _bad(f"key {k!r} is given twice", "each key once")
        out[k] = v
    return out


def _no_constant(name: str) -> NoReturn:
    raise _bad(f"{name} is no number", "finite numbers")


def _bad(message: str, allowed: str | None = None, fix: str | None = None) -> PiperError:
    return PiperError(ErrorKind.DIRECTIVE, message, allowed=allowed, suggestion=fix)
