"""Strategy files: a JSON list of directives, ours or UW Piper's as they are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ir.core.errors import ErrorKind
from ir.core.errors import directive_error as bad
from ir.core.files import FileErrors, read_json
from ir.core.filters import DirectiveFilter, parse_filter
from ir.core.limits import PASSES
from ir.directives.fields import (
    Fields,
    check_keys,
    names_devices,
    read_devices,
    read_filter,
    read_orders,
    read_place,
    read_split,
    read_stream,
    read_sync,
)
from ir.directives.place import PlaceDirective, SplitDirective
from ir.directives.strategy import Directive

FORM = FileErrors("a strategy", ErrorKind.DIRECTIVE, "schedule.directives", fix='[{"op": "place", …}, …]')

Lists = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class DirectiveFile:
    """A file's directives in pass order, and what its device lists say: pipeline groups, replicas, expert shards."""

    directives: tuple[Directive, ...]
    groups: int
    replicas: int | None
    stages: int
    mbs: int | None
    experts: int | None = None

    @property
    def rank_of_stage(self) -> tuple[int, ...] | None:
        """The pipeline rank of each stage; of a stage in several places (DualPipe's directions), the first place's.

        None where places name devices: such files, UW's, name each stage's experts, so that none may go without a
        layer, as an outer stage may where ranks are evened out.

        >>> ends = [{"op": "place", "filter": {"PP": s}, "group": g} for s, g in enumerate((0, 1, 1, 0))]
        >>> parse_strategy(ends).rank_of_stage
        (0, 1, 1, 0)
        """
        if self.replicas is not None:
            return None
        homes: dict[int, int] = {}
        for place in (d for d in self.directives if isinstance(d, PlaceDirective)):
            for stage in _named(place) or (0,):
                homes.setdefault(stage, place.group)
        return tuple(homes[stage] for stage in range(self.stages))


def load_strategy(path: str | Path) -> DirectiveFile:
    """Read a strategy file. Raises PiperError (io, directive) naming the file and the directive's index."""
    with FORM.naming(path):
        return parse_strategy(read_json(path, FORM))


def parse_strategy(value: object) -> DirectiveFile:
    """Directives from parsed JSON, re-sorted into Piper's pass order: split, place, replicate and shard, order.

    >>> s = parse_strategy([{"op": "place", "filter": {"PP": 0}, "devices": [0, 2]}])
    >>> [str(d) for d in s.directives], s.replicas
    (['place({"PP": 0}, group=0)'], 2)
    """
    if not isinstance(value, list):
        raise bad("a strategy is a JSON list of directives", '[{"op": "place", …}, …]')
    for i, d in enumerate(value):
        check_keys(i, d)
    by_op = {
        op: [(i, d) for i, d in enumerate(value) if d["op"] == op] for op in ("place", "split", "shard", "replicate")
    }
    lists = _device_lists(by_op["place"])
    group = {x: n for n, x in enumerate(lists)}
    places = [read_place(i, d, group) for i, d in by_op["place"]]
    stages = _stages(places)
    homes = _homes(places, lists)
    for i, d in sorted([*by_op["shard"], *by_op["replicate"]], key=lambda x: x[0]):
        if names_devices(d):
            _check_devices(i, d, homes)
    split = _one_split([(i, read_split(i, d)) for i, d in by_op["split"]], stages)
    middle = [read_sync(i, d) for i, d in enumerate(value) if d["op"] in ("replicate", "shard")]
    pipeline: list[Directive] = [*split, *places, *middle, *read_orders(value)]
    return DirectiveFile(
        tuple(pipeline),
        groups=_groups(places),
        replicas=len(lists[0]) if lists else None,
        stages=stages,
        mbs=split[0].mbs if split else None,
        experts=max((len(read_devices(i, d)) for i, d in by_op["shard"] if names_devices(d)), default=None),
    )


def _device_lists(places: Sequence[tuple[int, Fields]]) -> list[tuple[int, ...]]:
    """The distinct device lists of all places, sorted: pipeline ranks are numbered in this order."""
    lists = sorted({read_devices(i, d) for i, d in places if "group" not in d})
    if lists and any("group" in d for _, d in places):
        raise bad("some places name devices, some a group", "all of them the one or the other")
    if len({len(x) for x in lists}) > 1:
        raise bad(f"device lists differ in length: {[list(x) for x in lists]}", "one device per replica in each place")
    if len({d for x in lists for d in x}) < sum(map(len, lists)):
        raise bad(f"device lists overlap: {[list(x) for x in lists]}", "each device in one list")
    streams = [(i, d["stream"]) for i, d in places if "stream" in d]
    for i, name in streams:
        if read_stream(i, name) != read_stream(*streams[0]):
            raise bad(f"directive {i} (place): stream {name!r}", "one stream for all places", streams[0][1])
    return lists


def _groups(places: Sequence[PlaceDirective]) -> int:
    """Pipeline ranks that something is placed on."""
    named = {p.group for p in places}
    if named != set(range(len(named))):
        raise bad(f"groups {sorted(named)[:20]} have gaps", "groups 0, 1, 2, …")
    return len(named)


def _homes(places: Sequence[PlaceDirective], lists: Lists) -> dict[int, tuple[int, ...]]:
    """The device list of each stage, where places name devices. UW lets the last of two places win; we do not."""
    homes: dict[int, tuple[int, ...]] = {}
    for p in places if lists else ():
        if set(p.filter.tags) <= {"PP"}:
            for s in _named(p) or (0,):
                if homes.setdefault(s, lists[p.group]) != lists[p.group]:
                    message = f"stage {s} is placed on {list(homes[s])} and on {list(lists[p.group])}"
                    raise bad(message, "one place for each stage", "drop one of the two")
    return homes


def _named(place: PlaceDirective) -> list[int]:
    """The stages that a place names."""
    return [m for t, match in place.filter.matches if t == "PP" for r in match.ranges for m in r]


def _stages(places: Sequence[PlaceDirective]) -> int:
    """How many stages the places name. A single place without PP is about a model of one stage."""
    if not places:
        raise bad("nothing is placed", '{"op": "place", "filter": {"PP": 0}, "devices": [0]}')
    named: set[int] = set()
    for p in places:
        match = dict(p.filter.matches).get("PP")
        if match is None and len(places) == 1:
            return 1
        if match is None or match.any or match.absent or match.negated:
            raise bad(f"{p}: which stage?", "each place names its PP index", '"PP": 0')
        if any(r.stop > PASSES for r in match.ranges):
            raise bad(f"{p}: too many stages", f"at most {PASSES}")
        named.update(_named(p))
    if named != set(range(len(named))):
        raise bad(f"PP indices {sorted(named)[:20]} have gaps", "stages 0, 1, 2, …")
    return len(named)


def _check_devices(i: int, d: Fields, homes: Mapping[int, tuple[int, ...]]) -> None:
    """The devices of replicate and shard are those where `place` put what they select, as far as PP tells."""
    devices, wanted = read_devices(i, d), read_filter(i, d)
    pp = dict(wanted.matches).get("PP")
    if set(wanted.tags) - {"PP"} and pp is None:
        homes = {} if devices in homes.values() else dict(list(homes.items())[:1])
    for stage, home in sorted(homes.items()):
        if devices != home and (pp is None or pp.accepts(stage)):
            message = f"directive {i} ({d['op']}): devices {list(devices)}, but stage {stage} is placed on {list(home)}"
            raise bad(message, "the devices of its place", f'"devices": {list(home)}, or a filter on PP')


def _one_split(splits: Sequence[tuple[int, SplitDirective]], stages: int) -> list[SplitDirective]:
    """Several splits with one count and one dimension, one per stage say, are one over the whole model."""
    if len(splits) < 2:
        return [s for _, s in splits]
    first, whole = splits[0][1], set()
    for i, s in splits:
        if s.mbs != first.mbs:
            message = f"directive {i} (split): {s.mbs} microbatches, {first.mbs} before"
            raise bad(message, "one num_microbatches for the whole model", f'"num_microbatches": {first.mbs}')
        if s.dim != first.dim:
            message = f"directive {i} (split): dim_name {s.dim!r}, {first.dim!r} before"
            raise bad(message, "one dimension", f'"dim_name": "{first.dim}"')
        whole.update(_stages_of(i, s.filter, stages))
    if whole != set(range(stages)):
        raise bad(f"no split names stages {sorted(set(range(stages)) - whole)[:20]}", "the whole model", '"filter": {}')
    return [SplitDirective(parse_filter({}), first.dim, first.mbs)]


def _stages_of(i: int, wanted: DirectiveFilter, stages: int) -> list[int]:
    if set(wanted.tags) - {"PP"} or wanted.passes is not None:
        raise bad(f"directive {i} (split): several splits need filters on PP alone, not {wanted}", '{"PP": 0}')
    pp = dict(wanted.matches).get("PP")
    return [s for s in range(stages) if pp is None or pp.accepts(s)]
