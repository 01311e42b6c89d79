"""What exists once per step: gradient reductions over the owners of each parameter, norm, update, parameter gathers.

One map decides all of it: logical parameter -> the ranks that hold the same shard. Dense data parallelism, expert data
parallelism, norms between tensor-parallel regions, tied embeddings and DualPipe's two copies are that map read off the
graph.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from ir.graph import Buffer, Edge, Graph, Node, Once, Replica, Span
from ir.mesh import Mesh
from ir.model.part import Layout, Param
from ir.ops import Pass
from ir.work import CommKind, Message

ALL_AXES = ("tp", "cp", "dp", "pp")


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that are synchronised together, because the same ranks own them.

    owners: groups that hold a copy. axes: mesh axes over which the ranks of one group hold the same shard.
    numel: elements on one device before ZeRO. ranks: devices that hold the shard, over axes and owners.
    members: indices into `Graph.entries`. params: their global names, in canonical order.
    """

    name: str
    stage: int
    owners: tuple[int, ...]
    axes: tuple[str, ...]
    numel: int
    ranks: int
    replica: Replica
    members: tuple[int, ...]
    params: tuple[str, ...] = ()

    @property
    def shard(self) -> int:
        """Elements of one rank's share where it is sharded: padded, so that shares are equal."""
        return -(-self.numel // self.ranks)

    @property
    def key(self) -> str:
        """`2/dense`: unique in the graph."""
        return f"{self.stage}/{self.name}"


def summed_over(param: Param, layout: Layout) -> tuple[str, ...]:
    """The mesh axes over which ranks hold the same shard of a parameter, each with a part of its gradient.

    Over tp that is a parameter that is not cut, where each rank has its own tokens (sequence parallelism) or its own
    heads; elsewhere all tp ranks have its whole gradient already, the same on each, which must not be summed.

    >>> summed_over(Param("norm", (8,)), Layout(tp=2, sequence_parallel=True)), summed_over(Param("w", (8,)), Layout(2))
    (('tp', 'cp', 'dp'), ('cp', 'dp'))
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


def buckets(graph: Graph) -> tuple[Bucket, ...]:
    """The buckets of all parameters, in order of their first entry; found once per graph.

    Parts that `replicate` did not name still have owners, but nothing keeps their copies in step.
    """
    known = graph.__dict__
    if "_buckets" not in known:
        known["_buckets"] = _buckets(graph)
    found: tuple[Bucket, ...] = known["_buckets"]
    return found


def _buckets(graph: Graph) -> tuple[Bucket, ...]:
    if graph.source is None or graph.mesh is None:
        return ()
    named: dict[str, list[int]] = defaultdict(list)
    for k, e in enumerate(graph.entries):
        for p in e.part.params:
            named[p.name].append(k)
    where = {(n.stage, n.part): n.groups for n in graph.nodes if n.kind is Pass.F}
    pools: dict[_Pool, list[tuple[int, int, str]]] = {}
    for k, e in enumerate(graph.entries):
        for p in e.part.params:
            holders = named[p.name]
            if holders[0] != k:
                continue
            owners = sorted({g for j in holders for g in where[graph.entries[j].stage, graph.entries[j].name]})
            replica = graph.replicas.get(k, Replica())
            chunk = e.chunk.name if replica.zero == 3 else ""
            axes = summed_over(p, e.layout)
            pool = _Pool(e.stage, chunk, p.expert, axes, len(holders) > 1, tuple(owners), replica)
            pools.setdefault(pool, []).append((k, graph.source.local_numel(p, e.layout), p.name))
    out: list[Bucket] = []
    for pool, params in pools.items():
        out += _cut(graph, graph.mesh, named, pool, params)
    return tuple(sorted(out, key=lambda b: (b.members[0], b.name)))


@dataclass(frozen=True)
class _Pool:
    """What parameters of one bucket have in common."""

    stage: int
    chunk: str
    expert: bool
    axes: tuple[str, ...]
    tied: bool
    owners: tuple[int, ...]
    replica: Replica

    @property
    def label(self) -> str:
        kind, across = "experts" if self.expert else "dense", "tp" if "tp" in self.axes else ""
        words = (self.chunk, kind, across, "tied" if self.tied else "")
        return ".".join(w for w in words if w)


def _cut(
    graph: Graph, mesh: Mesh, named: dict[str, list[int]], pool: _Pool, params: list[tuple[int, int, str]]
) -> list[Bucket]:
    """One pool of (entry, elements, name) as buckets of at most the asked size."""
    axes, limit = pool.axes, pool.replica.bucket_bytes
    element = graph.source.sync_bytes()[0] if graph.source else 4
    groups: list[list[tuple[int, int, str]]] = [[]]
    filled = 0
    for k, n, name in params:
        if limit is not None and groups[-1] and filled + n * element > limit:
            groups.append([])
            filled = 0
        groups[-1].append((k, n, name))
        filled += n * element
    # Per-microbatch reductions (ZeRO-2, 3) stay inside a group; copies on other groups meet once, at the step's end.
    ranks = mesh.size(axes) * (len(pool.owners) if pool.replica.zero < 2 else 1)
    out = []
    for i, group in enumerate(groups):
        label = pool.label if len(groups) == 1 else f"{pool.label}.{i}"
        numel, names = sum(n for _, n, _ in group), tuple(name for _, _, name in group)
        held = tuple(sorted({j for name in names for j in named[name]}))
        out.append(Bucket(label, pool.stage, pool.owners, axes, numel, ranks, pool.replica, held, names))
    return out


def with_sync(graph: Graph, clip: bool, found: tuple[Bucket, ...]) -> Graph:
    """The graph with its once-per-step nodes.

    rewrite, for one program p whose buckets are reduced (RS under ZeRO-1, else AR):
        W -(join)-> RS -> [NORM: all programs] -> UPDATE -> AG
    """
    if graph.source is None or graph.mesh is None:
        return graph
    nodes, edges = list(graph.nodes), list(graph.edges)
    reduce_bytes, gather_bytes = graph.source.sync_bytes()
    ready: dict[int, list[int]] = defaultdict(list)
    w_of = defaultdict(list)
    for i, n in enumerate(graph.nodes):
        if n.kind is Pass.W:
            w_of[n.stage, n.part].append(i)
    for b in found:
        ws = [i for k in b.members for i in w_of[graph.entries[k].stage, graph.entries[k].name]]
        sources = ws
        copies = b.replica.zero >= 2 and len(b.owners) > 1
        if (copies or (b.ranks > 1 and b.replica.zero < 2)) and ws and any(k in graph.replicas for k in b.members):
            kind = Once.REDUCE if b.replica.zero == 1 else Once.ALL_REDUCE
            comm = CommKind.REDUCE_SCATTER if b.replica.zero == 1 else CommKind.ALL_REDUCE
            size = b.shard if copies else b.shard * b.ranks
            message = Message(comm, size * reduce_bytes, () if copies else b.axes)
            spans = tuple(Span(None, g) for g in b.owners)
            done = (Buffer("done", 0),)
            stream = b.replica.reduce_stream
            nodes.append(Node(b.stage, kind, b.name, stream, message=message, writes=done, spans=spans))
            edges += [Edge(w, len(nodes) - 1, 0, join=True) for w in ws]
            sources = [len(nodes) - 1]
        for g in b.owners:
            ready[g] += sources
    programs = range(graph.programs)
    norm = None
    if clip and graph.mesh.ranks > 1:
        spans = tuple(Span(None, g) for g in programs)
        message = Message(CommKind.ALL_REDUCE, 8, ALL_AXES)
        nodes.append(Node(0, Once.NORM, "", "dp", message=message, writes=(Buffer("done", 0),), spans=spans))
        norm = len(nodes) - 1
    for p in programs:
        numel = sum(b.shard if b.replica.zero else b.numel for b in found if p in b.owners)
        first = min((n.stage for n in graph.nodes for s in n.spans if s.group == p and not n.once), default=0)
        done = (Buffer("done", 0),)
        nodes.append(Node(first, Once.UPDATE, f"p{p}", numel=numel, writes=done, spans=(Span(None, p),)))
        update = len(nodes) - 1
        for src in dict.fromkeys(ready[p]):
            target = update if norm is None else norm
            edges.append(Edge(src, target, 0, join=True))
        if norm is not None:
            edges.append(Edge(norm, update, 0, join=True))
        ready[p] = [update]
    for b in found:
        if b.ranks > 1 and b.replica.zero in (1, 2) and any(k in graph.replicas for k in b.members):
            message = Message(CommKind.ALL_GATHER, b.shard * b.ranks * gather_bytes, b.axes)
            # The shards of ZeRO-1 lie on all owners, those of ZeRO-2 inside each group.
            for owners in [b.owners] if b.replica.zero == 1 else [(g,) for g in b.owners]:
                name = b.name if len(owners) == len(b.owners) else f"{b.name}.p{owners[0]}"
                spans = tuple(Span(None, g) for g in owners)
                nodes.append(Node(b.stage, Once.GATHER, name, b.replica.gather_stream, message=message, spans=spans))
                edges += [Edge(u, len(nodes) - 1, 0, join=True) for g in owners for u in ready[g]]
    unique = tuple(dict.fromkeys(edges))
    return replace(graph, nodes=tuple(nodes), edges=unique)
