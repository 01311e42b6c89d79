"""Which parameters are kept in step together, over which ranks.

One map decides it: logical parameter -> the ranks that hold the same shard. Dense data parallelism, expert data
parallelism, norms between tensor-parallel regions, tied embeddings and DualPipe's two copies are that map read off the
graph.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from ir.core.errors import directive_error
from ir.core.mesh import Mesh
from ir.graph.graph import BucketPolicy, Graph
from ir.graph.matrices import MatrixShard, hidden_matrix, packed
from ir.workload.params import local_numel
from ir.workload.part import Param, PartLayout


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that are synchronised together, because the same ranks own them.

    owners: groups that hold a copy. axes: mesh axes over which the ranks of one group hold the same parameters. inside:
    those of them, or parts, over which shards of these lie; across: the others, over which each shard is copied.
    numel: elements on one device before ZeRO. ranks: devices that a set of shards lies over. copies: that hold each.
    members: indices into `Graph.entries`. params: their global names, in canonical order. replicated: whether a
    `replicate` named them, so that their copies are kept in step. matrices: what one device holds of each, where they
    are hidden matrices that Muon updates: a share of such a bucket has some of them whole, and none in part.
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
    inside: tuple[str, ...] = ()
    across: tuple[str, ...] = ()
    copies: int = 1
    matrices: tuple[MatrixShard, ...] = ()

    @property
    def alone(self) -> bool:
        """Whether no other rank holds it."""
        return self.ranks * self.copies == 1

    @property
    def shard(self) -> int:
        """Elements of one rank's share where it is sharded: padded, so that shares are equal."""
        if self.matrices and self.replica.zero:
            load, sizes = [0] * self.ranks, [m.numel for m in self.matrices]
            for numel, owner in zip(sizes, packed(sizes, self.ranks), strict=True):
                load[owner] += numel
            return max(load)
        return -(-self.numel // self.ranks)

    @property
    def key(self) -> str:
        """`2/dense`: unique in the graph."""
        return f"{self.stage}/{self.name}"

    def called(self, owners: tuple[int, ...]) -> str:
        """Its name in what only these of its owners do."""
        return self.name if len(owners) == len(self.owners) else f"{self.name}.p{owners[0]}"


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


def keep_buckets(graph: Graph, found: tuple[Bucket, ...], of: Graph) -> None:
    """A graph's buckets are another's, if those were found: nodes of once per step own nothing."""
    if found is _FOUND.get(of):
        _FOUND[graph] = found


def _buckets(graph: Graph) -> tuple[Bucket, ...]:
    if graph.source is None or graph.mesh is None:
        return ()
    named: dict[str, list[int]] = defaultdict(list)
    for k, e in enumerate(graph.entries):
        for p in e.part.params:
            named[p.name].append(k)
    where = {(n.stage, n.part): n.groups for n in graph.nodes}  # all passes of a part are together
    at = [where[e.stage, e.name] for e in graph.entries]
    pools: dict[_Pool, list[tuple[int, int, str]]] = {}
    hidden = dict[str, MatrixShard]()
    for k, e in enumerate(graph.entries):
        mine: dict[tuple[object, ...], list[tuple[int, int, str]]] = {}  # of this part: what its parameters share
        for p in e.part.params:
            holders = named[p.name]
            if holders[0] != k:
                continue
            tied, axes, owners, replica = False, summed_over(p, e.layout), at[k], graph.replicas.get(k)
            if len(holders) > 1:
                tied, owners = True, tuple(sorted({g for j in holders for g in at[j]}))
                replica = _replica(graph, p.name, holders)
            if graph.muon is not None and (found := hidden_matrix(p, e.layout)) is not None:
                hidden[p.name] = found
            alike = p.expert, axes, tied, owners, id(replica), p.name in hidden
            if alike not in mine:
                chunk = e.chunk.name if replica is not None and replica.zero >= 2 else ""
                pool = _Pool(e.stage, chunk, p.expert, axes, tied, owners, replica, p.name in hidden)
                mine[alike] = pools.setdefault(pool, [])
            mine[alike].append((k, local_numel(p, e.layout), p.name))
    if cut := next((x for x in pools if x.matrix and x.replica is not None and x.replica.zero > 1), None):
        message = f"replicate cuts matrices of stage {cut.stage}, which Muon updates whole"
        raise directive_error(message, "zero = 0 or 1", "zero = 1")
    element, _ = graph.source.sync_bytes()
    cuts = {pool: _cut(element, pool, params) for pool, params in pools.items()}
    out: list[Bucket] = []
    for pool, label in _labels(cuts).items():
        for b in _pooled(graph.mesh, named, pool, label, cuts[pool]):
            out.append(replace(b, matrices=tuple(hidden[n] for n in b.params)) if pool.matrix else b)
    return tuple(sorted(out, key=lambda b: (b.members[0], b.name)))


def _replica(graph: Graph, name: str, holders: list[int]) -> BucketPolicy | None:
    """What `replicate` said of a parameter: of the first part that holds it and was named, None if none was."""
    said = [(k, graph.replicas[k]) for k in holders if k in graph.replicas]
    if len({(r.zero, r.dp_replicate) for _, r in said}) > 1:
        again = len({r.dp_replicate for _, r in said}) > 1
        levels = ", ".join(
            f"zero = {r.zero}{f', dp_replicate = {r.dp_replicate}' if again else ''} for {graph.entries[k].name}"
            for k, r in said
        )
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
    matrix: bool = False

    @property
    def label(self) -> str:
        kind, across = "experts" if self.expert else "dense", "tp" if "tp" in self.axes else ""
        words = (self.chunk, kind, across, "tied" if self.tied else "", "matrices" if self.matrix else "")
        return ".".join(w for w in words if w)

    def details(self) -> tuple[str, ...]:
        """What the label leaves out, a word each."""
        r = self.replica or BucketPolicy()
        level = f"zero{r.zero}" if self.replica else "apart"
        level += f"x{r.dp_replicate}" if r.dp_replicate > 1 else ""
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


def _cut(element: int, pool: _Pool, params: Params) -> list[Params]:
    """One pool's parameters as groups of at most the asked size, of so many bytes an element.

    Matrices that one rank each has whole stay together: a group of fewer than there are ranks would be mostly padding.
    """
    whole = pool.matrix and pool.replica is not None and pool.replica.zero > 0
    limit = pool.replica.bucket_bytes if pool.replica and not whole else None
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
    inside, across = mesh.divided(pool.axes) if replica.dp_replicate > 1 else (pool.axes, ())
    # Per-microbatch reductions (ZeRO-2, 3) stay inside a group; copies on other groups meet once, at the step's end.
    joined, apart = (len(pool.owners), 1) if replica.zero < 2 else (1, len(pool.owners))
    ranks, copies = mesh.size(inside) * joined, mesh.size(across) * apart
    replicated, out = pool.replica is not None, []
    for name, group in zip(_names(label, groups), groups, strict=True):
        numel, params = sum(n for _, n, _ in group), tuple(name for _, _, name in group)
        held = tuple(sorted({j for p in params for j in named[p]}))
        own = (pool.stage, pool.owners, pool.axes, numel, ranks, replica, held, params)
        out.append(Bucket(name, *own, replicated, inside, across, copies))
    return out
