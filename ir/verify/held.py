"""Who holds each parameter, read off the graph's entries anew; what every bucket must say of them."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from typing import NamedTuple

from ir.core.errors import PiperError
from ir.core.mesh import Mesh
from ir.core.ops import Pass
from ir.graph.graph import COMPUTE, BucketPolicy, Graph, illegal
from ir.graph.sync import Bucket, buckets
from ir.workload.params import local_numel
from ir.workload.part import Param, PlacedPart

Nodes = Mapping[tuple[int, str], list[int]]  # (stage, part) → its compute nodes


@dataclass(frozen=True)
class HeldShards:
    """A bucket, and what follows from the parameters in it.

    inside: the ranks of one group that divide its elements. over: the axes that these differ in. across: those in which
    ranks of one group differ that hold the same share; times: how many these are. share: elements of each, where they
    divide them. users: the compute nodes that work with its parameters. adds: those that make its gradients.
    """

    bucket: Bucket
    inside: int
    over: frozenset[str]
    across: frozenset[str]
    times: int
    share: int
    users: tuple[int, ...]
    adds: tuple[int, ...]

    @property
    def level(self) -> int:
        """ZeRO's."""
        return self.bucket.replica.zero

    @property
    def passing(self) -> bool:
        """Whether its gradients are reduced after each microbatch."""
        return self.level >= 2 and self.inside > 1


_DENSE, _DENSE_TP, _EXPERTS = frozenset({"cp", "dp"}), frozenset({"cp", "dp", "tp"}), frozenset({"edp"})


class _Holders(NamedTuple):
    """Of one parameter: the entries that name it, the groups that run them, the axes over which ranks have parts of its
    gradient, its elements on one device, what `replicate` said, whether Muon updates it, a hidden matrix."""

    entries: tuple[int, ...]
    owners: tuple[int, ...]
    axes: frozenset[str]
    numel: int
    said: BucketPolicy | None
    matrix: bool


def held(graph: Graph) -> list[HeldShards]:
    """Every bucket. Raises PiperError (illegal_plan): one that shares its key, leaves out or misplaces a parameter, or
    copies that nothing keeps in step."""
    if graph.source is None or graph.mesh is None:
        return []
    found = buckets(graph)
    nodes: dict[tuple[int, str], list[int]] = defaultdict(list)
    for i, n in enumerate(graph.nodes):
        if n.stream == COMPUTE and type(n.kind) is Pass:
            nodes[n.stage, n.part].append(i)
    holders = _holders(graph, nodes)
    for key, count in Counter(b.key for b in found).items():
        if count > 1:
            raise illegal(f"{count} buckets are called {key}", "a name for each")
    of = {name: b for b in found for name in b.params}
    for name in holders:
        if name not in of:
            raise illegal(f"{name} is in no bucket")
    if len(of) < sum(len(b.params) for b in found):
        name = next(n for b in found for n in b.params if of[n] is not b)
        raise illegal(f"{name} is in bucket {of[name].key} and in another")
    return [_held(graph, b, [holders[n] for n in b.params], nodes) for b in found]


def _holders(graph: Graph, nodes: Nodes) -> dict[str, _Holders]:
    assert graph.source is not None
    named: dict[str, list[int]] = defaultdict(list)
    params: dict[str, Param] = {}
    groups = [{s.group for i in nodes[e.stage, e.name] for s in graph.nodes[i].spans} for e in graph.entries]
    for k, e in enumerate(graph.entries):
        for p in e.part.params:
            named[p.name].append(k)
            params.setdefault(p.name, p)
    out = {}
    for name, entries in named.items():
        param, entry = params[name], graph.entries[entries[0]]
        said = [graph.replicas[k] for k in entries if k in graph.replicas]
        if len({(r.zero, r.dp_replicate) for r in said}) > 1:
            levels = [(r.zero, r.dp_replicate) if r.dp_replicate > 1 else r.zero for r in said]
            raise illegal(f"{name} is at ZeRO levels {levels}, {entry.name} names it first", "one level")
        owners = tuple(sorted(set[int]().union(*(groups[k] for k in entries))))
        numel = local_numel(param, entry.layout)
        matrix = graph.muon is not None and not param.table and len(param.shape) == (3 if param.expert else 2)
        out[name] = _Holders(tuple(entries), owners, _parts(param, entry), numel, said[0] if said else None, matrix)
    return out


def _parts(param: Param, entry: PlacedPart) -> frozenset[str]:
    """The axes over which each rank has a part of a parameter's gradient: of its own tokens, or of its own heads."""
    if param.expert:
        return _EXPERTS
    layout = entry.layout
    own = layout.sequence_parallel or param.by_heads
    whole_on_each = layout.tp > 1 and "tp" not in param.sharded
    return _DENSE_TP if whole_on_each and own else _DENSE


def _held(graph: Graph, b: Bucket, params: Sequence[_Holders], nodes: Nodes) -> HeldShards:
    assert graph.mesh is not None
    axes = frozenset(b.axes)
    for name, p in zip(b.params, params, strict=True):
        if p.owners != b.owners:
            raise _wrong(b, f"of groups {list(b.owners)}, but {name} is on groups {list(p.owners)}")
        if p.axes != axes:
            raise _wrong(b, f"summed over {sorted(b.axes)}, but {name} over {sorted(p.axes)}")
        if (p.said is not None) != b.replicated or (p.said.zero if p.said else 0) != b.replica.zero:
            said = "nothing" if p.said is None else f"zero = {p.said.zero}"
            raise _wrong(b, f"kept at zero = {b.replica.zero}, but replicate says {said} of {name}")
        if (p.said.dp_replicate if p.said else 1) != b.replica.dp_replicate:
            raise _wrong(b, f"copied {b.replica.dp_replicate} times, but replicate says otherwise of {name}")
        if p.matrix is not bool(b.matrices):
            whose = ("AdamW's", "Muon's")
            raise _wrong(b, f"{whose[not p.matrix]}, but {name} is {whose[p.matrix]}")
    entries = tuple(sorted({k for p in params for k in p.entries}))
    over, across = _divided(graph.mesh, b)
    inside, times, numel = graph.mesh.size(over), graph.mesh.size(across), sum(p.numel for p in params)
    ranks, copies = (inside * len(b.owners), times) if b.replica.zero < 2 else (inside, times * len(b.owners))
    if (entries, numel, ranks) != (b.members, b.numel, b.ranks):
        raise _wrong(b, f"of {b.numel} elements on {b.ranks} ranks, not {numel} on {ranks}")
    if copies != b.copies:
        raise _wrong(b, f"of shares on {b.copies} ranks each, not {copies}")
    if ranks * copies > 1 and not b.replicated:
        raise _wrong(b, "kept in step by nothing, though other ranks hold copies", 'replicate({}, "zero": 0)')
    own = {i for k in entries for i in nodes[graph.entries[k].stage, graph.entries[k].name]}
    adds = tuple(sorted(i for i in own if graph.nodes[i].kind is Pass.W))
    users = sorted(own.union(*(_borrowing(graph, e, nodes) for e in graph.entries if {*e.part.borrowed} & {*b.params})))
    share = _fullest([p.numel for p in params], ranks) if b.matrices and b.replica.zero else -(-numel // ranks)
    return HeldShards(b, inside, over, across, times, share, tuple(users), adds)


def _borrowing(graph: Graph, e: PlacedPart, nodes: Nodes) -> set[int]:
    """The backward of a part that runs a norm again whose parameters another part has."""
    back = {i for i in nodes[e.stage, e.name] if graph.nodes[i].kind is not Pass.F}
    runs = [k.label for i in back if graph.nodes[i].kind is Pass.R for k in graph.nodes[i].work]
    return back if "normed.again" in runs else set()


def _fullest(sizes: Sequence[int], ranks: int) -> int:
    """What the rank with most has of matrices that are dealt out whole, the largest first, each to who has least."""
    loads = [0] * ranks
    for numel in sorted(sizes, reverse=True):
        heapreplace(loads, loads[0] + numel)
    return max(loads)


def _divided(mesh: Mesh, b: Bucket) -> tuple[frozenset[str], frozenset[str]]:
    """The axes that shards of a bucket lie over, and those that copy them: all its axes', each rank once."""
    over, across = frozenset(b.inside), frozenset(b.across)
    met = sorted(x + y for x in mesh.offsets(over) for y in mesh.offsets(across))
    if met != mesh.offsets(b.axes) or mesh.size(across) != b.replica.dp_replicate:
        said = f"divided over {sorted(over)} and copied over {sorted(across)}"
        raise _wrong(b, f"{said}, not {b.replica.dp_replicate} times, or not over {sorted(b.axes)}")
    return over, across


def _wrong(b: Bucket, why: str, fix: str | None = None) -> PiperError:
    return illegal(f"bucket {b.key} is {why}", fix)
