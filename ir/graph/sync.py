"""What exists once per step: gradient reductions over the owners of each parameter, norm, update, parameter gathers.

One map decides all of it: logical parameter -> the ranks that hold the same shard. Dense data parallelism, expert data
parallelism, norms between tensor-parallel regions, tied embeddings and DualPipe's two copies are that map read off the
graph.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from ir.core.errors import directive_error
from ir.core.mesh import Mesh
from ir.core.ops import Pass
from ir.core.work import Message, MessageKind
from ir.graph.graph import BucketPolicy, Buffer, Graph, GraphEdge, GraphNode, MicrobatchSpan, PerStepOp
from ir.workload.params import local_numel
from ir.workload.part import Param, PartLayout

ALL_AXES = ("tp", "cp", "dp", "pp")
_DONE = (Buffer("done", 0),)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that are synchronised together, because the same ranks own them.

    owners: groups that hold a copy. axes: mesh axes over which the ranks of one group hold the same shard.
    numel: elements on one device before ZeRO. ranks: devices that hold the shard, over axes and owners.
    members: indices into `Graph.entries`. params: their global names, in canonical order. replicated: whether a
    `replicate` named them, so that their copies are kept in step.
    """

    name: str
    stage: int
    owners: tuple[int, ...]
    axes: tuple[str, ...]
    numel: int
    ranks: int
    replica: BucketPolicy
    members: tuple[int, ...]
    params: tuple[str, ...] = ()
    replicated: bool = True

    @property
    def shard(self) -> int:
        """Elements of one rank's share where it is sharded: padded, so that shares are equal."""
        return -(-self.numel // self.ranks)

    @property
    def key(self) -> str:
        """`2/dense`: unique in the graph."""
        return f"{self.stage}/{self.name}"


def summed_over(param: Param, layout: PartLayout) -> tuple[str, ...]:
    """The mesh axes over which ranks hold the same shard of a parameter, each with a part of its gradient.

    Over tp that is a parameter that is not cut, where each rank has its own tokens (sequence parallelism) or its own
    heads; elsewhere all tp ranks have its whole gradient already, the same on each, which must not be summed.

    >>> summed_over(Param("norm", (8,)), PartLayout(tp=2, sequence_parallel=True))
    ('tp', 'cp', 'dp')
    >>> summed_over(Param("w", (8,)), PartLayout(2))
    ('cp', 'dp')
    """
    if param.expert:
        return ("edp",)
    apart = layout.sequence_parallel or param.by_heads
    return ("tp", "cp", "dp") if layout.tp > 1 and apart and "tp" not in param.sharded else ("cp", "dp")


def repeated(graph: Graph) -> frozenset[str]:
    """The parameters whose whole gradient every tensor-parallel rank has: in a global norm the first alone counts."""
    held = [(p, e.layout) for e in graph.entries for p in e.part.params]
    return frozenset(
        p.name
        for p, layout in held
        if layout.tp > 1 and not p.expert and "tp" not in (*p.sharded, *summed_over(p, layout))
    )


_FOUND: WeakKeyDictionary[Graph, tuple[Bucket, ...]] = WeakKeyDictionary()


def buckets(graph: Graph) -> tuple[Bucket, ...]:
    """The buckets of all parameters, in order of their first entry; found once per graph.

    Parts that `replicate` did not name still have owners, but nothing keeps their copies in step. Raises PiperError
    (directive): two parts share a parameter, and `replicate` gives them different levels.
    """
    if graph not in _FOUND:
        _FOUND[graph] = _buckets(graph)
    return _FOUND[graph]


def _buckets(graph: Graph) -> tuple[Bucket, ...]:
    if graph.source is None or graph.mesh is None:
        return ()
    named: dict[str, list[int]] = defaultdict(list)
    for k, e in enumerate(graph.entries):
        for p in e.part.params:
            named[p.name].append(k)
    where = {(n.stage, n.part): n.groups for n in graph.nodes if n.kind is Pass.F}  # all passes of a part are together
    at = [where[e.stage, e.name] for e in graph.entries]
    pools: dict[_Pool, list[tuple[int, int, str]]] = {}
    for k, e in enumerate(graph.entries):
        mine: dict[tuple[object, ...], list[tuple[int, int, str]]] = {}  # of this part: what its parameters share
        for p in e.part.params:
            holders = named[p.name]
            if holders[0] != k:
                continue
            tied, axes = len(holders) > 1, summed_over(p, e.layout)
            owners = tuple(sorted({g for j in holders for g in at[j]})) if tied else at[k]
            replica = _replica(graph, p.name, holders) if tied else graph.replicas.get(k)
            alike = p.expert, axes, tied, owners, id(replica)
            if alike not in mine:
                chunk = e.chunk.name if replica is not None and replica.zero == 3 else ""
                pool = _Pool(e.stage, chunk, p.expert, axes, tied, owners, replica)
                mine[alike] = pools.setdefault(pool, [])
            mine[alike].append((k, local_numel(p, e.layout), p.name))
    cuts = {pool: _cut(graph, pool, params) for pool, params in pools.items()}
    out: list[Bucket] = []
    for pool, label in _labels(cuts).items():
        out += _pooled(graph.mesh, named, pool, label, cuts[pool])
    return tuple(sorted(out, key=lambda b: (b.members[0], b.name)))


def _replica(graph: Graph, name: str, holders: list[int]) -> BucketPolicy | None:
    """What `replicate` said of a parameter: of the first part that holds it and was named, None if none was."""
    said = [(k, graph.replicas[k]) for k in holders if k in graph.replicas]
    if len({r.zero for _, r in said}) > 1:
        levels = ", ".join(f"zero = {r.zero} for {graph.entries[k].name}" for k, r in said)
        raise directive_error(
            f"{name} is one parameter in several parts, and replicate says {levels}",
            "one level for a parameter",
            "name all of its parts in the last replicate that names one",
        )
    return said[0][1] if said else None


@dataclass(frozen=True)
class _Pool:
    """What parameters of one bucket have in common. replica: None where no `replicate` named them."""

    stage: int
    chunk: str
    expert: bool
    axes: tuple[str, ...]
    tied: bool
    owners: tuple[int, ...]
    replica: BucketPolicy | None

    @property
    def label(self) -> str:
        kind, across = "experts" if self.expert else "dense", "tp" if "tp" in self.axes else ""
        words = (self.chunk, kind, across, "tied" if self.tied else "")
        return ".".join(w for w in words if w)

    def details(self) -> tuple[str, ...]:
        """What the label leaves out, a word each."""
        r = self.replica or BucketPolicy()
        level = f"zero{r.zero}" if self.replica else "apart"
        streams = f"reduce_{r.reduce_stream}", f"gather_{r.gather_stream}"
        return f"on{'_'.join(map(str, self.owners))}", level, f"of{r.bucket_bytes or ''}", *streams


Params = list[tuple[int, int, str]]  # (entry, elements, name)


def _labels(cuts: Mapping[_Pool, list[Params]]) -> dict[_Pool, str]:
    """The pools' labels: where two of a stage would call a bucket the same, each also says in what they differ."""
    alike: dict[tuple[int, str], list[_Pool]] = defaultdict(list)
    for pool in cuts:
        alike[pool.stage, pool.label].append(pool)
    out = {}
    for pools in alike.values():
        called = [name for pool in pools for name in _names(pool.label, cuts[pool])]
        clash = len(set(called)) < len(called)
        apart = [len(set(words)) > 1 for words in zip(*(p.details() for p in pools), strict=True)]
        for pool in pools:
            more = [w for w, differs in zip(pool.details(), apart, strict=True) if differs and clash]
            out[pool] = ".".join([pool.label, *more])
    return {pool: out[pool] for pool in cuts}


def _names(label: str, groups: list[Params]) -> list[str]:
    return [label] if len(groups) == 1 else [f"{label}.{i}" for i in range(len(groups))]


def _cut(graph: Graph, pool: _Pool, params: Params) -> list[Params]:
    """One pool's parameters as groups of at most the asked size."""
    limit = pool.replica.bucket_bytes if pool.replica else None
    element = graph.source.sync_bytes()[0] if graph.source else 4
    groups: list[Params] = [[]]
    filled = 0
    for k, n, name in params:
        if limit is not None and groups[-1] and filled + n * element > limit:
            groups.append([])
            filled = 0
        groups[-1].append((k, n, name))
        filled += n * element
    return groups


def _pooled(mesh: Mesh, named: dict[str, list[int]], pool: _Pool, label: str, groups: list[Params]) -> list[Bucket]:
    """The buckets of one pool."""
    replica = pool.replica or BucketPolicy()
    # Per-microbatch reductions (ZeRO-2, 3) stay inside a group; copies on other groups meet once, at the step's end.
    ranks = mesh.size(pool.axes) * (len(pool.owners) if replica.zero < 2 else 1)
    out = []
    for name, group in zip(_names(label, groups), groups, strict=True):
        numel, params = sum(n for _, n, _ in group), tuple(name for _, _, name in group)
        held = tuple(sorted({j for p in params for j in named[p]}))
        replicated = pool.replica is not None
        out.append(Bucket(name, pool.stage, pool.owners, pool.axes, numel, ranks, replica, held, params, replicated))
    return out


def with_sync(graph: Graph, clip: bool, found: tuple[Bucket, ...]) -> Graph:
    """The graph with its once-per-step nodes.

    rewrite, for one program p whose buckets are reduced (RS under ZeRO-1, else AR):
        W -(join)-> RS -> [NORM: all programs] -> UPDATE -> AG
    """
    if graph.source is None or graph.mesh is None:
        return graph
    new = _Once(graph, found)
    new.reduce()
    new.update(clip)
    new.gather()
    full = replace(graph, nodes=tuple(new.nodes), edges=tuple(dict.fromkeys(new.edges)))
    if found is _FOUND.get(graph):  # nodes of once per step own nothing
        _FOUND[full] = found
    return full


class _Once:
    """Nodes that exist once per step, in the making. ready: by program, what its next node has to follow."""

    def __init__(self, graph: Graph, found: tuple[Bucket, ...]) -> None:
        assert graph.source is not None and graph.mesh is not None
        self.graph, self.found, self.ranks = graph, found, graph.mesh.ranks
        self.nodes, self.edges = list(graph.nodes), list(graph.edges)
        self.reduce_bytes, self.gather_bytes = graph.source.sync_bytes()
        self.ready: dict[int, list[int]] = defaultdict(list)

    def _add(self, stage: int, kind: PerStepOp, part: str, groups: Iterable[int], **more: Any) -> int:
        spans = tuple(MicrobatchSpan(None, g) for g in groups)
        self.nodes.append(GraphNode(stage, kind, part, spans=spans, **more))
        return len(self.nodes) - 1

    def reduce(self) -> None:
        """Sums of gradients over all who hold a copy; what ZeRO-2 and 3 have summed inside groups, between groups."""
        w_of = defaultdict(list)
        for i, n in enumerate(self.graph.nodes):
            if n.kind is Pass.W:
                w_of[n.stage, n.part].append(i)
        for b in self.found:
            ws = [i for k in b.members for i in w_of[self.graph.entries[k].stage, self.graph.entries[k].name]]
            sources = ws
            copies = b.replica.zero >= 2 and len(b.owners) > 1
            if (copies or (b.ranks > 1 and b.replica.zero < 2)) and ws and b.replicated:
                kind = PerStepOp.REDUCE if b.replica.zero == 1 else PerStepOp.ALL_REDUCE
                comm = MessageKind.REDUCE_SCATTER if b.replica.zero == 1 else MessageKind.ALL_REDUCE
                size = b.shard if copies else b.shard * b.ranks
                message = Message(comm, size * self.reduce_bytes, () if copies else b.axes)
                keys = dict(stream=b.replica.reduce_stream, message=message, writes=_DONE, bucket=b.key)
                node = self._add(b.stage, kind, b.name, b.owners, **keys)
                self.edges += [GraphEdge(w, node, 0, join=True) for w in ws]
                sources = [node]
            for g in b.owners:
                self.ready[g] += sources

    def update(self, clip: bool) -> None:
        """The norm of the whole gradient, which all programs wait for, and each program's update."""
        programs = range(self.graph.programs)
        norm = None
        if clip and self.ranks > 1:
            message = Message(MessageKind.ALL_REDUCE, 8, ALL_AXES)
            norm = self._add(0, PerStepOp.NORM, "", programs, stream="dp", message=message, writes=_DONE)
        for p in programs:
            numel = sum(b.shard if b.replica.zero else b.numel for b in self.found if p in b.owners)
            placed = (n.stage for n in self.graph.nodes for s in n.spans if s.group == p and not n.once)
            update = self._add(min(placed, default=0), PerStepOp.UPDATE, f"p{p}", (p,), numel=numel, writes=_DONE)
            for src in dict.fromkeys(self.ready[p]):
                self.edges.append(GraphEdge(src, update if norm is None else norm, 0, join=True))
            if norm is not None:
                self.edges.append(GraphEdge(norm, update, 0, join=True))
            self.ready[p] = [update]

    def gather(self) -> None:
        """Weights that others updated. The shards of ZeRO-1 lie on all owners, those of ZeRO-2 inside each group."""
        for b in self.found:
            if not (b.ranks > 1 and b.replica.zero in (1, 2) and b.replicated):
                continue
            message = Message(MessageKind.ALL_GATHER, b.shard * b.ranks * self.gather_bytes, b.axes)
            for owners in [b.owners] if b.replica.zero == 1 else [(g,) for g in b.owners]:
                name = b.name if len(owners) == len(b.owners) else f"{b.name}.p{owners[0]}"
                keys = dict(stream=b.replica.gather_stream, message=message, bucket=b.key)
                node = self._add(b.stage, PerStepOp.GATHER, name, owners, **keys)
                self.edges += [GraphEdge(u, node, 0, join=True) for g in owners for u in self.ready[g]]
