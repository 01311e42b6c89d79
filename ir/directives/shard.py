"""`shard`: divide parts over a mesh axis: experts over ep, dense parts over tp or cp."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ir.core.errors import directive_error, nearest
from ir.core.filters import DirectiveFilter
from ir.core.ops import Pass
from ir.core.work import Message
from ir.directives.select import select
from ir.graph.build import PartPasses, inputs_of
from ir.graph.graph import COUNTS, Buffer, Graph, GraphEdge, GraphNode, MemoryKind
from ir.workload.part import ModelWork, PartLayout, PlacedPart

AXES = ("tp", "cp", "ep")


@dataclass(frozen=True)
class ShardDirective:
    """Divide the selected parts over an axis of the mesh.

    rewrite, axis="ep" (an all-to-all on each compute edge into and out of the experts, none around W; F exchanges
    first how many rows go where, which the host reads before it can dispatch them; R and I know it from F):
        F: router -> experts -> add        -->   router -> counts -> dispatch -> experts -> combine -> add
        I: router <- experts <- add        -->   router <- dispatch <- experts <- combine <- add
        R: router -> experts               -->   router -> dispatch -> experts
    axis="tp" or "cp": the same nodes with smaller work and blocking messages inside (see `Inline`). heads: cp divides
    attention's heads.
    """

    filter: DirectiveFilter
    axis: str
    stream: str = "ep"
    sequence_parallel: bool = False
    heads: bool = False

    def __str__(self) -> str:
        return f"shard({self.filter}, axis={self.axis})"

    def json(self) -> dict[str, object]:
        """The directive as in a strategy file."""
        out: dict[str, object] = {"op": "shard", "filter": self.filter.json(), "axis": self.axis}
        if self.axis == "ep" and self.stream != "ep":
            out["stream"] = self.stream
        if self.sequence_parallel:
            out["sequence_parallel"] = True
        if self.heads:
            out["heads"] = True
        return out

    def __call__(self, graph: Graph) -> Graph:
        return sharded(graph, [self])

    def hit(self, graph: Graph) -> set[tuple[int, str]]:
        """The (stage, part) keys that it divides. Raises PiperError (directive): it cannot."""
        if self.axis not in AXES:
            raise directive_error(f"{self}: no such axis", ", ".join(AXES), nearest(self.axis, AXES))
        if graph.mesh is None or graph.source is None:
            raise directive_error(f"{self}: a bare pipeline has nothing to shard")
        return {(graph.nodes[i].stage, graph.nodes[i].part) for i in select(graph, self.filter, str(self))}

    def layout(self, old: PartLayout, tp: int, cp: int, ep: int, etp: int) -> PartLayout:
        """A part's layout behind it, under these sizes."""
        match self.axis:
            case "tp":
                return replace(old, tp=tp, sequence_parallel=self.sequence_parallel and tp > 1)
            case "cp":
                return replace(old, cp=cp, cp_heads=self.heads and cp > 1)
            case _:
                return replace(old, ep=ep, etp=etp)


def sharded(graph: Graph, directives: Sequence[ShardDirective]) -> Graph:
    """The graph after some shards, one after the other; nodes are filled anew where their work is looked at."""
    for d in directives:
        hit = d.hit(graph)
        mesh, source = graph.mesh, graph.source
        assert mesh is not None and source is not None
        sizes = [mesh.sizes[axis] for axis in ("tp", "cp", "ep", "etp")]
        new = {old: d.layout(old, *sizes) for old in {e.layout for e in graph.entries}}
        entries = [
            PlacedPart(e.stage, e.chunk, e.part, new[e.layout] if (e.stage, e.name) in hit else e.layout)
            for e in graph.entries
        ]
        graph = replace(graph, entries=tuple(entries))
        exchanged = d.axis == "ep" and sizes[2] * sizes[3] > 1
        if exchanged or d is directives[-1]:
            graph = refill(graph, source)
        if exchanged:
            graph = _all_to_all(graph, source, hit, d.stream)
    return graph


def refill(graph: Graph, source: ModelWork) -> Graph:
    """Every compute node's work and buffers, asked for again under the current layouts."""
    works = [source.work(e) for e in graph.entries]
    at, reads = {(e.stage, e.name): k for k, e in enumerate(graph.entries)}, inputs_of(graph.entries)
    passes, nodes = PartPasses(graph.recompute), []
    for n in graph.nodes:
        if not n.once and (k := at.get((n.stage, n.part))) is not None:
            n = passes.fill(n, graph.entries[k], works[k], tuple([works[j].gradient_bytes for j in reads[k]]))
        nodes.append(n)
    return replace(graph, nodes=tuple(nodes))


def _all_to_all(graph: Graph, source: ModelWork, hit: set[tuple[int, str]], stream: str) -> Graph:
    nodes, edges = list(graph.nodes), list[GraphEdge]()
    made: dict[tuple[int, int, bool], int] = {}
    counts: dict[int, int] = {}
    entries = {(e.stage, e.name): e for e in graph.entries}
    for edge in graph.edges:
        src, dst = graph.nodes[edge.src], graph.nodes[edge.dst]
        inward = (dst.stage, dst.part) in hit and (src.stage, src.part) not in hit
        outward = (src.stage, src.part) in hit and (dst.stage, dst.part) not in hit
        carries = src.writes[edge.slot].slot
        if not (inward or outward) or not (carries == "out" or carries.startswith("grad")):
            edges.append(edge)
            continue
        key = (edge.src, edge.slot, inward)
        if key not in made:
            experts = entries[(dst.stage, dst.part) if inward else (src.stage, src.part)]
            if inward and src.kind is Pass.F:
                counts[edge.src] = len(nodes)
                message = source.messages(experts).counts
                out = Buffer("out", message.bytes, MemoryKind.BUFFERS)
                nodes.append(_behind(src, experts, COUNTS, stream, message, (out,)))
                edges.append(GraphEdge(edge.src, counts[edge.src], edge.slot))
            made[key] = len(nodes)
            nodes.append(_exchange(source, experts, src, inward, stream))
            edges.append(GraphEdge(edge.src, made[key], edge.slot))
            if edge.src in counts and inward:
                edges.append(GraphEdge(counts[edge.src], made[key], 0))
        edges.append(GraphEdge(made[key], edge.dst, 0))
        if edge.src in counts and inward:
            edges.append(GraphEdge(counts[edge.src], edge.dst, 0))  # whose products go expert by expert
    return replace(graph, nodes=tuple(nodes), edges=tuple(edges))


def _exchange(source: ModelWork, experts: PlacedPart, src: GraphNode, inward: bool, stream: str) -> GraphNode:
    """The all-to-all behind `src`. Backward runs it the other way round: what was combined is dispatched again."""
    m = source.messages(experts)
    forward = src.kind in (Pass.F, Pass.R)
    name = "dispatch" if inward == forward else "combine"
    message, out = (m.dispatch, m.dispatched_bytes) if inward else (m.combine, m.combined_bytes)
    writes = (Buffer("out" if forward else "grad", out, MemoryKind.BUFFERS),)
    return _behind(src, experts, name, stream, message, writes)


def _behind(
    src: GraphNode, experts: PlacedPart, name: str, stream: str, message: Message, writes: tuple[Buffer, ...]
) -> GraphNode:
    tags = {t: v for t, v in src.tags.items() if t != "EP"} | {t: v for t, v in experts.chunk.tags.items() if t == "L"}
    part = f"{experts.chunk.name}.{name}"
    return GraphNode(src.stage, src.kind, part, stream, message=message, writes=writes, tags=tags, spans=src.spans)
