"""The fields of one directive in a strategy file: which keys it may have, what they may hold, UW Piper's defaults."""

from collections.abc import Mapping, Sequence
from typing import Any

from ir.core.errors import PiperError, nearest
from ir.core.errors import directive_error as bad
from ir.core.filters import DirectiveFilter, parse_filter
from ir.core.limits import PASSES
from ir.core.order import Order
from ir.directives.place import OrderDirective, PlaceDirective, SplitDirective
from ir.directives.replicate import ReplicateDirective
from ir.directives.shard import AXES, ShardDirective
from ir.directives.strategy import Directive

KEYS: Mapping[str, frozenset[str]] = {
    "place": frozenset({"filter", "devices", "device", "stream", "group"}),
    "replicate": frozenset(
        {"filter", "devices", "device", "reduce_stream", "gather_stream", "bucket_size", "bucket_MiB"}
        | {"shard_grads", "shard_params", "zero", "dp_replicate"}
    ),
    "shard": frozenset({"filter", "devices", "device", "stream", "axis", "sequence_parallel", "heads"}),
    "split": frozenset({"filter", "dim_name", "num_microbatches"}),
    "order": frozenset({"filters", "group", "cells"}),
}
_ONE_OF = (("devices", "device"), ("devices", "group"), ("device", "group"), ("bucket_size", "bucket_MiB"))
_TAGS = ("PASS", "PP", "L", "EP", "MOE", "MTP")  # what nodes carry anyway

Fields = Mapping[str, Any]


def check_keys(i: int, d: object) -> None:
    """An object with a known op and known keys."""
    if not isinstance(d, Mapping):
        raise bad(f"directive {i} is no object: {_short(d)}", '{"op": "place", …}')
    op = str(d.get("op"))
    if op not in KEYS:
        raise bad(f"directive {i}: unknown op {_short(op)}", ", ".join(KEYS), nearest(op, KEYS))
    for key in d:
        if key != "op" and key not in KEYS[op]:
            allowed = sorted(KEYS[op])
            raise bad(
                f"directive {i} ({op}): unknown key {_short(key)}", ", ".join(allowed), nearest(str(key), allowed)
            )
    for one, other in _ONE_OF:
        if one in d and other in d:
            raise bad(f"directive {i} ({op}): {one!r} and {other!r} together", "one of them", f"drop {other!r}")


def names_devices(d: Fields) -> bool:
    """Whether a directive names devices, as UW's do; ours name groups, axes and levels."""
    return "devices" in d or "device" in d


def read_filter(i: int, d: Fields) -> DirectiveFilter:
    """`filter`, with the directive named in errors."""
    if "filter" not in d:
        raise bad(f"directive {i} ({d['op']}): no filter", '"filter": {"PP": 0}')
    try:
        return parse_filter(d["filter"])
    except PiperError as e:
        raise bad(f"directive {i} ({d['op']}): {e.message}", e.allowed, e.suggestion) from None


def read_devices(i: int, d: Fields) -> tuple[int, ...]:
    """`devices` (UW also writes `device`): distinct numbers, one per replica."""
    devices = d.get("devices", d.get("device"))
    good = isinstance(devices, list) and devices and all(type(x) is int and 0 <= x < 2**31 for x in devices)
    if not good or len(set(devices)) < len(devices):
        raise bad(f"directive {i} ({d['op']}): devices {_short(devices)}", "a list of distinct device numbers")
    return tuple(devices)


def read_split(i: int, d: Fields) -> SplitDirective:
    """`split`."""
    n, dim = d.get("num_microbatches"), d.get("dim_name")
    if type(n) is not int or not 0 < n <= PASSES:
        raise bad(f"directive {i} (split): num_microbatches = {_short(n)}", f"an integer from 1 to {PASSES}")
    if not isinstance(dim, str) or not dim or dim in _TAGS:
        raise bad(f"directive {i} (split): dim_name = {_short(dim)}", '"MB"', '"dim_name": "MB"')
    return SplitDirective(read_filter(i, d), dim, n)


def read_place(i: int, d: Fields, group: Mapping[tuple[int, ...], int]) -> PlaceDirective:
    """`place`. group: of each device list."""
    if "group" not in d:
        return PlaceDirective(read_filter(i, d), group[read_devices(i, d)])
    if type(d["group"]) is not int or not 0 <= d["group"] < PASSES:
        raise bad(f"directive {i} (place): group = {_short(d['group'])}", "a pipeline rank, 0 or more")
    return PlaceDirective(read_filter(i, d), d["group"])


def read_sync(i: int, d: Fields) -> Directive:
    """`shard` or `replicate`. What UW's file leaves out goes to the compute stream, in ours to a stream of its own."""
    wanted = read_filter(i, d)
    if d["op"] == "shard":
        axis = d.get("axis", "ep")
        if axis not in AXES:
            raise bad(f"directive {i} (shard): no axis {_short(axis)}", ", ".join(AXES), nearest(str(axis), AXES))
        stream = d.get("stream", "compute" if names_devices(d) else "ep")
        flags = (_flag(i, d, key) for key in ("sequence_parallel", "heads"))
        return ShardDirective(wanted, axis, read_stream(i, stream), *flags)
    zero = 3 if _flag(i, d, "shard_params") else 2 if _flag(i, d, "shard_grads") else 0
    if "zero" in d:
        zero = d["zero"]
        if type(zero) is not int or not 0 <= zero <= 3:
            raise bad(f"directive {i} (replicate): zero = {_short(zero)}", "0, 1, 2, 3")
    size = d.get("bucket_MiB", d.get("bucket_size"))
    if size is not None and (not isinstance(size, int | float) or isinstance(size, bool) or not 0 < size < 1e9):
        raise bad(f"directive {i} (replicate): bucket size {_short(size)}", "MiB, more than 0")
    copies = d.get("dp_replicate", 1)
    if type(copies) is not int or copies < 1:
        raise bad(f"directive {i} (replicate): dp_replicate = {_short(copies)}", "a divisor of dp", "1")
    default = "compute" if names_devices(d) else "dp"
    reduce = d.get("reduce_stream", default)
    gather = d.get("gather_stream", default if names_devices(d) else reduce)
    return ReplicateDirective(wanted, zero, size, read_stream(i, reduce), read_stream(i, gather), copies)


def read_stream(i: int, name: object) -> str:
    """Piper's `default_stream` is the compute stream; ours has its own name for collectives on it."""
    if not isinstance(name, str) or not name.replace("_", "").isalnum() or len(name) > 100:
        raise bad(f"directive {i}: stream {_short(name)}", "a word", '"dp_stream"')
    return "default" if name in ("default_stream", "compute") else name.removesuffix("_stream")


def _flag(i: int, d: Fields, key: str) -> bool:
    value = d.get(key, False)
    if not isinstance(value, bool):
        raise bad(f"directive {i} ({d['op']}): {key} = {_short(value)}", "true or false")
    return value


def read_orders(value: Sequence[Fields]) -> list[OrderDirective]:
    """All `order` directives as one: tables of cells by group, rows of filters."""
    table: dict[int, Order] = {}
    rows = []
    for i, d in enumerate(value):
        if d["op"] != "order":
            continue
        if "cells" in d or "group" in d:
            group, order = _cells(i, d)
            if group in table:
                raise bad(f"directive {i} (order): group {group} has an order already", "one order per group")
            table[group] = order
            continue
        groups = d.get("filters")
        if not isinstance(groups, list) or len(groups) < 2 or not all(isinstance(g, list) and g for g in groups):
            allowed = "a list of at least two lists of filters"
            raise bad(f"directive {i} (order): filters = {_short(groups)}", allowed, "[[{…}], [{…}, {…}], [{…}]]")
        rows.append(tuple(tuple(read_filter(i, {"op": "order", "filter": f}) for f in g) for g in groups))
    return [OrderDirective(tuple(table.items()), tuple(rows))] if table or rows else []


def _cells(i: int, d: Fields) -> tuple[int, Order]:
    group, cells = d.get("group"), d.get("cells")
    if type(group) is not int or "filters" in d:
        raise bad(f"directive {i} (order): cells need a group, and no filters", '{"group": 0, "cells": ["0F0", …]}')
    if not isinstance(cells, list) or not cells or not all(isinstance(c, str) for c in cells):
        raise bad(f"directive {i} (order): cells = {_short(cells)}", "a list of op texts", '["0F0", "0B0"]')
    try:
        return group, Order.of(cells)
    except PiperError as e:
        raise bad(f"directive {i} (order): {e.message}", e.allowed, e.suggestion) from None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
