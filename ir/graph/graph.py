"""The global training DAG: nodes with microbatches as index sets, edges as data. What is true for every microbatch.

A node is compute (F, I, W, R) or communication inside one pass, once per microbatch; or it exists once per step
(reduce, gather, norm, update). Order is not in here: it is a table attached to a program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import numpy as np
from msgspec import Struct

from ir.core.errors import ErrorKind, PiperError
from ir.core.mesh import Mesh
from ir.core.ops import Pass
from ir.core.order import BoolArray, IntArray, Order
from ir.core.work import Message, Work
from ir.graph.matrices import MuonOptimizer
from ir.graph.recompute import RecomputedLayers
from ir.workload.part import ModelWork, PlacedPart

COMPUTE = "compute"
COUNTS = "counts"  # the part, behind its layer's name, of an exchange that the host reads


class PerStepOp(StrEnum):
    """Nodes that exist once per step, whatever the number of microbatches."""

    REDUCE = "RS"
    ALL_REDUCE = "AR"
    NORM = "NORM"
    UPDATE = "UPDATE"
    GATHER = "AG"


class MemoryKind(StrEnum):
    """What a buffer counts as in the memory breakdown."""

    ACTIVATIONS = "activations"
    BUFFERS = "buffers"


class Buffer(Struct, frozen=True):
    """Something a node writes and later nodes read. `slot` is unique within its node."""

    slot: str
    bytes: int
    category: MemoryKind = MemoryKind.ACTIVATIONS


class MicrobatchSpan(Struct, frozen=True):
    """A set of microbatches (None: once per step) on one group of devices, which run the same program."""

    mbs: range | None
    group: int


class GraphNode(Struct, frozen=True):
    """One piece of work of one stage, for every microbatch of its spans. Its text is its identity: `2F/l7.attn`.

    numel: of an update, the elements it updates on one device; matrices: of these, those of hidden matrices; others:
    those that other ranks update, and whose gradients are summed here, too (ZeRO-1). bucket: of what is once per step,
    the `Bucket.key` of what it reduces or gathers.
    """

    stage: int
    kind: Pass | PerStepOp
    part: str
    stream: str = COMPUTE
    work: Work = ()
    message: Message | None = None
    inline: tuple[Message, ...] = ()
    writes: tuple[Buffer, ...] = ()
    workspace: int = 0
    numel: int = 0
    tags: Mapping[str, int] = {}
    spans: tuple[MicrobatchSpan, ...] = ()
    bucket: str = ""
    matrices: int = 0
    others: int = 0

    def text(self, mb: int | None = None) -> str:
        """Op text of one microbatch's instance.

        >>> GraphNode(2, Pass.F, "l7.attn").text(0), GraphNode(2, Pass.F, "").text(0)
        ('2F0/l7.attn', '2F0')
        """
        return f"{self.stage}{self.kind}{'' if mb is None else mb}" + (f"/{self.part}" if self.part else "")

    @property
    def once(self) -> bool:
        """Whether it exists once per step."""
        return type(self.kind) is PerStepOp

    @property
    def groups(self) -> tuple[int, ...]:
        """The groups it has instances on, in ascending order."""
        if len(self.spans) == 1:
            return (self.spans[0].group,)
        return tuple(sorted({s.group for s in self.spans}))

    def doing(
        self, work: Work, inline: tuple[Message, ...], writes: tuple[Buffer, ...], workspace: int = 0
    ) -> GraphNode:
        """The same node with work and buffers: what `replace` makes, in less time."""
        head = (self.stage, self.kind, self.part, self.stream, work, self.message, inline, writes, workspace)
        return GraphNode(*head, self.numel, self.tags, self.spans, self.bucket, self.matrices, self.others)

    def at(self, spans: tuple[MicrobatchSpan, ...]) -> GraphNode:
        """The same node, placed so."""
        head = (self.stage, self.kind, self.part, self.stream, self.work, self.message, self.inline, self.writes)
        return GraphNode(*head, self.workspace, self.numel, self.tags, spans, self.bucket, self.matrices, self.others)


class GraphEdge(Struct, frozen=True):
    """`dst` reads buffer `slot` of `src`: in the same microbatch, or (join) of all its member's microbatches."""

    src: int
    dst: int
    slot: int
    join: bool = False


@dataclass(frozen=True, slots=True)
class BucketPolicy:
    """How `replicate` said an entry's parameters are kept in step: ZeRO level, bucket size, stream of its messages.

    dp_replicate: into how many parts of its ranks each has all shards.
    """

    zero: int = 0
    bucket_bytes: int | None = None
    reduce_stream: str = "dp"
    gather_stream: str = "dp"
    dp_replicate: int = 1


@dataclass(frozen=True, eq=False)
class Graph:
    """Nodes, edges and what directives have said so far. Never changed: every rewrite returns a new one.

    muon: how hidden matrices are updated, where not as all else.
    """

    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...]
    entries: tuple[PlacedPart, ...] = ()
    mbs: int = 1
    dim: str | None = None
    mesh: Mesh | None = None
    replicas: Mapping[int, BucketPolicy] = field(default_factory=dict)
    orders: Mapping[int, Order] = field(default_factory=dict)
    source: ModelWork | None = None
    recompute: RecomputedLayers = field(default_factory=RecomputedLayers)
    prefetch: int = 1
    muon: MuonOptimizer | None = None

    @cached_property
    def ends(self) -> IntArray:
        """[edge] src, dst, slot."""
        return np.array([(e.src, e.dst, e.slot) for e in self.edges], dtype=np.int64).reshape(-1, 3)

    @cached_property
    def data(self) -> BoolArray:
        """[edge] whether it is read microbatch by microbatch."""
        once = np.array([n.once for n in self.nodes], dtype=np.bool_)
        out: BoolArray = ~(self.joins | once[self.ends[:, 0]] | once[self.ends[:, 1]])
        return out

    @cached_property
    def joins(self) -> BoolArray:
        """[edge] whether it is a join."""
        return np.array([e.join for e in self.edges], dtype=np.bool_)

    @cached_property
    def stages(self) -> int:
        """Number of stages."""
        return 1 + max((n.stage for n in self.nodes), default=-1)

    @cached_property
    def silent(self) -> frozenset[int]:
        """Stages without a backward: nothing is trained there, nor before them."""
        back = {n.stage for n in self.nodes if n.kind is Pass.I}
        return frozenset(range(self.stages)) - back

    @cached_property
    def programs(self) -> int:
        """Number of groups that something is placed on."""
        return 1 + max((s.group for n in self.nodes for s in n.spans), default=-1)


def illegal(message: str, fix: str | None = None) -> PiperError:
    """A graph or plan that breaks a rule."""
    return PiperError(ErrorKind.ILLEGAL_PLAN, message, suggestion=fix)


def check(graph: Graph, since: Graph | None = None) -> None:
    """The rules that are always true; linear in the graph. Run after every directive.

    since: a graph that passed, from which this one was made; what both hold needs no second look.

    Raises PiperError (illegal_plan): a dangling edge; an edge between nodes without a common microbatch; a microbatch
    placed twice, or out of range; one part's passes of one microbatch on different groups; a data cycle.
    """
    _check_spans(graph, since)
    if since is None or not _same_edges(graph, since):
        _check_edges(graph)


def _check_spans(graph: Graph, since: Graph | None) -> None:
    homes: dict[tuple[int, str], tuple[GraphNode, tuple[MicrobatchSpan, ...]]] = {}
    seen: set[int] = set()  # spans that nodes share
    for node in graph.nodes if since is None else _touched(graph, since):
        if id(node.spans) not in seen:
            seen.add(id(node.spans))
            _check_microbatches(node, graph.mbs)
        if not node.once:
            first, spans = homes.setdefault((node.stage, node.part.split(".", 1)[0]), (node, node.spans))
            if spans is not node.spans and spans != node.spans:
                raise illegal(
                    f"{node.text()} is placed on {_where(node.spans)} but {first.text()} on {_where(spans)}",
                    "place all passes of a chunk together",
                )


def _check_microbatches(node: GraphNode, mbs: int) -> None:
    end = 0
    for span in sorted((s.mbs for s in node.spans if s.mbs is not None), key=lambda r: r.start):
        if span.start < 0 or span.stop > mbs:
            raise illegal(f"{node.text()}: microbatches {span} of {mbs}")
        if span.start < end:
            raise illegal(f"{node.text()}: a microbatch is placed twice", "let the filters of `place` not overlap")
        end = span.stop


def _touched(graph: Graph, since: Graph) -> Sequence[GraphNode]:
    """The nodes of every stage in which one is new: no rule about spans looks beyond a stage."""
    if graph.mbs != since.mbs:
        return graph.nodes
    old = set(map(id, since.nodes))
    stages = {n.stage for n in graph.nodes if id(n) not in old}
    return [n for n in graph.nodes if n.stage in stages]


def _same_edges(graph: Graph, since: Graph) -> bool:
    """Whether the edges, and what they say of nodes, are another graph's."""
    if graph.edges is not since.edges or len(graph.nodes) != len(since.nodes):
        return False
    pairs = zip(graph.nodes, since.nodes, strict=True)
    return all(a is b or a.writes is b.writes or len(a.writes) == len(b.writes) for a, b in pairs)


def _check_edges(graph: Graph) -> None:
    nodes, count = graph.nodes, len(graph.nodes)
    ends = graph.ends
    if len(ends) and (int(ends[:, :2].min()) < 0 or int(ends[:, :2].max()) >= count):
        edge = next(e for e in graph.edges if not (0 <= e.src < count and 0 <= e.dst < count))
        raise illegal(f"edge {edge} names a node that is not in the graph")
    src, dst, slot = ends.T
    lacking = np.flatnonzero((slot < 0) | (slot >= np.array([len(n.writes) for n in nodes], dtype=np.int64)[src]))
    if len(lacking):
        edge = graph.edges[int(lacking[0])]
        raise illegal(f"{nodes[edge.dst].text()} reads a buffer that {nodes[edge.src].text()} lacks")
    if not _rises(src, dst, count):
        _refuse_cycle(graph)


def _rises(src: IntArray, dst: IntArray, count: int) -> bool:
    """Whether all edges lead up in an order that is easily found: as nodes stand, those added last behind what they
    read. That proves that there is no cycle; if there is no such order, there may be one."""
    place = np.arange(count, dtype=np.float64)
    moved = np.zeros(count, dtype=np.bool_)
    moved[src[src > dst]] = True
    into = np.flatnonzero(moved[dst])
    for _ in range(3 if len(into) else 0):
        behind = np.full(count, -1.0)
        np.maximum.at(behind, dst[into], place[src[into]])
        place[moved] = behind[moved] + 0.25
    return bool((place[src] < place[dst]).all())


def _refuse_cycle(graph: Graph) -> None:
    nodes, count = graph.nodes, len(graph.nodes)
    indegree = [0] * count
    readers: list[list[int]] = [[] for _ in range(count)]
    for edge in graph.edges:
        indegree[edge.dst] += 1
        readers[edge.src].append(edge.dst)
    ready = [i for i in range(count) if not indegree[i]]
    done = 0
    while ready:
        done += 1
        for dst in readers[ready.pop()]:
            indegree[dst] -= 1
            if not indegree[dst]:
                ready.append(dst)
    if done < count:
        stuck = [nodes[i].text() for i in range(count) if indegree[i]]
        raise illegal(f"data edges form a cycle through {', '.join(stuck[:6])}")


def _where(spans: tuple[MicrobatchSpan, ...]) -> str:
    return ", ".join(f"group {s.group} for {s.mbs}" for s in spans) or "nothing"
