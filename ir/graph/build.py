"""The first graph, before any directive: a model's parts as F, I, W (and R) nodes; or bare stages for `schedule`."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from ir.core.ops import Pass
from ir.core.work import KernelKind, Message, MessageKind, Work
from ir.graph.graph import Buffer, Graph, GraphEdge, GraphNode, PerStepOp
from ir.graph.recompute import RecomputedLayers
from ir.workload.part import ENCODER, Chunk, KeptBuffer, ModelWork, PartWork, PlacedPart, SavedBuffer, before_training

NOTHING_AGAIN = RecomputedLayers()


def stage_graph(stages: int) -> Graph:
    """A chain of stages with unit work: what a pipeline schedule alone is about.

    rewrite:
        0F -> 1F        activations of one stage and microbatch count one byte, from F to W
        0I <- 1I
        0W    1W

    >>> [n.text() for n in stage_graph(2).nodes]
    ['0F', '0I', '0W', '1F', '1I', '1W']
    """
    nodes: list[GraphNode] = []
    edges: list[GraphEdge] = []
    for s in range(stages):
        tags = {"PP": s}
        nodes += [
            GraphNode(s, Pass.F, "", writes=(Buffer("out", 0), Buffer("act", 1)), tags=tags),
            GraphNode(s, Pass.I, "", writes=(Buffer("grad", 0), Buffer("stash", 0)), tags=tags),
            GraphNode(s, Pass.W, "", writes=(Buffer("dw", 0),), tags=tags),
        ]
        f, i, w = 3 * s, 3 * s + 1, 3 * s + 2
        edges += [GraphEdge(f, i, 1), GraphEdge(f, w, 1), GraphEdge(i, w, 1)]
        if s:
            edges += [GraphEdge(f - 3, f, 0), GraphEdge(i, i - 3, 0)]
    return Graph(tuple(nodes), tuple(edges))


def model_graph(
    partition: Sequence[Sequence[Chunk]], source: ModelWork, recompute: RecomputedLayers = NOTHING_AGAIN
) -> Graph:
    """The layer-level graph of a model whose chunks are grouped into stages.

    partition: the chunks of each stage, in stage order.

    rewrite, for a part that reads x and writes y (act: what backward needs; g: gradients):
        F: x -> y, act        I: g(y), act -> g(x), stash        W: act, stash -> (gradient, persistent)
    """
    entries = [PlacedPart(s, c, p) for s, chunks in enumerate(partition) for c in chunks for p in c.parts]
    builder = _Builder(entries, source, recompute)
    return builder.graph()


def inputs_of(entries: Sequence[PlacedPart]) -> list[tuple[int, ...]]:
    """The entries that each entry reads, by their places, in the order of its inputs."""
    index = {e.name: i for i, e in enumerate(entries)}
    last = {e.chunk.name: i for i, e in enumerate(entries) if e.part.name == e.chunk.output}
    before = {b: a for a, b in pairwise(last)}
    out = []
    for e in entries:
        outer = e.chunk.reads or before.get(e.chunk.name)
        far = {"": () if outer is None else (last[outer],)}
        if e.chunk.encoder:
            far[ENCODER] = (last[e.chunk.encoder],)
        out.append(tuple(j for x in e.part.inputs for j in (far[x] if x in far else (index[f"{e.chunk.name}.{x}"],))))
    return out


class _Builder:
    """Collects nodes and edges; used once, by `model_graph`."""

    def __init__(self, entries: list[PlacedPart], source: ModelWork, recompute: RecomputedLayers) -> None:
        self.entries, self.source, self.recompute, self.passes = entries, source, recompute, PartPasses(recompute)
        self.nodes: list[GraphNode] = []
        self.edges: list[GraphEdge] = []
        self.works = [source.work(e) for e in entries]
        self.whole = [recompute.whole(e.chunk, e.part.name) for e in entries]
        self.inputs = inputs_of(entries)
        self.still = before_training({e.chunk.name: e.chunk for e in entries}.values())
        self.f: list[int] = []
        self.r: dict[int, int] = {}
        self.i: dict[int, int] = {}

    def graph(self) -> Graph:
        for k in range(len(self.entries)):
            self.f.append(self._add(k, Pass.F))
            for j in self.inputs[k]:
                self.edges.append(GraphEdge(self.f[j], self.f[k], 0))
        self._recompute()
        readers: list[list[int]] = [[] for _ in self.entries]
        for k, js in enumerate(self.inputs):
            for j in js:
                readers[j].append(k)
        for k in reversed(range(len(self.entries))):
            if self.entries[k].chunk.name not in self.still:
                self._backward(k, readers[k])
        graph = Graph(tuple(self.nodes), tuple(self.edges), tuple(self.entries), source=self.source)
        return prune_recompute(replace(graph, recompute=self.recompute))

    def _add(self, k: int, kind: Pass) -> int:
        e = self.entries[k]
        tags = {"PP": e.stage, **e.chunk.tags}
        if e.part.name == "experts" and "MOE" in tags:  # as a `with annotate("EP")` around them would have it
            tags["EP"] = tags["MOE"]
        node = GraphNode(e.stage, kind, e.name, tags=tags)
        grads = tuple([self.works[j].gradient_bytes for j in self.inputs[k]])
        self.nodes.append(self.passes.fill(node, e, self.works[k], grads))
        return len(self.nodes) - 1

    def _recompute(self) -> None:
        for k in range(len(self.entries)):
            if self.entries[k].chunk.name in self.still:
                continue
            options = self.recompute.of(self.entries[k].chunk)
            if not self.whole[k] and all(options.isdisjoint(s.recompute) for s in self.works[k].saved):
                continue
            self.r[k] = self._add(k, Pass.R)
            if not self.whole[k]:
                self.edges.append(GraphEdge(self.f[k], self.r[k], 1))
                continue
            for j in self.inputs[k]:
                self.edges.append(GraphEdge(self._made(j, k), self.r[k], 0))

    def _made(self, j: int, reader: int) -> int:
        """The node whose output of entry j backward reads: its recomputed twin inside a recomputed chunk."""
        twin = self.whole[j] and self.whole[reader] and self.entries[j].chunk.name == self.entries[reader].chunk.name
        return self.r[j] if twin else self.f[j]

    def _backward(self, k: int, readers: list[int]) -> None:
        e, w = self.entries[k], self.works[k]
        i = self.i[k] = self._add(k, Pass.I)
        wg = self._add(k, Pass.W) if w.weight_grad or e.part.params else None
        for reader in self._summed(k, readers):
            self.edges.append(GraphEdge(self.i[reader], i, grad_slot(self.inputs[reader], k)))
        self._reads(self.f[k], i, wg)
        if k in self.r:
            self._reads(self.r[k], i, wg)
        for keep in e.part.keeps:
            self._keep(k, keep, i, wg)
        if wg is not None:
            self.edges.append(GraphEdge(i, wg, len(self.inputs[k])))

    def _summed(self, k: int, readers: list[int]) -> list[int]:
        """The readers whose gradients come by themselves: of an encoder's output a stage's add up from its last layer
        to its first, and one sum goes home.
        """
        far = [r for r in readers if self.entries[r].chunk.encoder == self.entries[k].chunk.name]
        firsts = {self.entries[r].stage: r for r in reversed(far)}
        for a, b in pairwise(far):
            if self.entries[a].stage == self.entries[b].stage:
                self.edges.append(GraphEdge(self.i[b], self.i[a], grad_slot(self.inputs[b], k)))
        return [r for r in readers if r not in far or r in firsts.values()]

    def _reads(self, src: int, i: int, wg: int | None) -> None:
        """Backward reads what forward (or its recomputation) saved: slot 1 until W, slot 2 until I."""
        self.edges.append(GraphEdge(src, i, 1))
        self.edges.append(GraphEdge(src, i, 2))
        if wg is not None:
            self.edges.append(GraphEdge(src, wg, 1))

    def _keep(self, k: int, keep: KeptBuffer, i: int, wg: int | None) -> None:
        e = self.entries[k]
        named = zip(self.inputs[k], e.part.inputs, strict=False)
        for j in [j for j, name in named if name == keep.of]:
            self.edges.append(GraphEdge(self._made(j, k), wg if keep.until is Pass.W and wg is not None else i, 0))


def grad_slot(inputs: Sequence[int], of: int) -> int:
    """Which of a reader's gradient slots belongs to input entry `of`."""
    return list(inputs).index(of)


class PartPasses:
    """What the passes of parts do and keep, under what is recomputed; worked out once for parts with the same work."""

    def __init__(self, recompute: RecomputedLayers) -> None:
        self.recompute = recompute
        self._how: dict[str, tuple[bool, bool, frozenset[str]]] = {}
        self._known: dict[tuple[object, ...], tuple[PartWork, _Done]] = {}

    def fill(self, node: GraphNode, e: PlacedPart, w: PartWork, grads: tuple[int, ...]) -> GraphNode:
        """A node with the work and buffers of its pass.

        grads: bytes of each input, hence of the gradient that I writes for it, unless the part says otherwise.
        """
        how = self._how.get(node.part)
        if how is None:
            again, name = self.recompute, e.part.name
            how = again.whole(e.chunk, name), again.ends_early(e.chunk, name), again.of(e.chunk)
            self._how[node.part] = how
        key = id(w), node.kind, grads, how  # equal parts share one work, which is kept here
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = w, _done(node.kind, w, grads, *how)
        return node.doing(*known[1])


_Done = tuple[Work, tuple[Message, ...], tuple[Buffer, ...], int]


def _done(
    kind: Pass | PerStepOp, w: PartWork, grads: tuple[int, ...], whole: bool, early: bool, options: frozenset[str]
) -> _Done:
    """Work, inline messages, buffers and workspace of a pass."""
    fine = tuple(s for s in w.saved if not options.isdisjoint(s.recompute))
    inline = tuple(x.message for x in w.inline if x.when is kind)
    match kind:
        case Pass.F:
            kept = () if whole else tuple(s for s in w.saved if s not in fine)
            return w.forward, inline, _outputs(w.out_bytes, kept), w.forward_workspace
        case Pass.R if whole and early and (at := _last_product(w)):
            came = _forward(w)
            sums = bool(came) and came[-1].axes == ("tp",) and came[-1].kind in SUMS
            return w.forward[:at], came[:-1] if sums else came, _outputs(0, w.saved), w.forward_workspace
        case Pass.R if whole:
            return w.forward, _forward(w), _outputs(w.out_bytes, w.saved), w.forward_workspace
        case Pass.R:
            came = tuple(m for m in _forward(w) if _asked_again(m)) if _reads_region(fine, options) else ()
            return tuple(k for s in fine for k in s.rebuild), came, _outputs(0, fine), 0
        case Pass.I:
            names = ("grad",) if len(grads) == 1 else tuple(f"grad{n}" for n in range(len(grads)))
            own = grads if w.handed is None else (w.handed,)
            buffers = tuple(Buffer(n, b) for n, b in zip(names, own, strict=True))
            return w.input_grad, inline, (*buffers, Buffer("stash", w.stash_bytes)), w.input_grad_workspace
        case Pass.W:
            dw = (Buffer("dw", 0),)  # the gradient itself persists; this only says that it is complete
            return w.weight_grad, inline, dw, w.weight_grad_workspace
        case _:
            raise AssertionError(kind)


DOWN = "down_proj"
SUMS = (MessageKind.REDUCE_SCATTER, MessageKind.ALL_REDUCE)  # of a row-parallel linear's output


def _last_product(w: PartWork) -> int:
    """Where a dense layer's last product stands among its part's kernels; 0: it is none. Experts' output is read."""
    found = [i for i, k in enumerate(w.forward) if k.kind is KernelKind.GEMM and k.label == DOWN]
    return found[-1] if found else 0


def _forward(w: PartWork) -> tuple[Message, ...]:
    return tuple(x.message for x in w.inline if x.when is Pass.F)


def _reads_region(fine: Sequence[SavedBuffer], options: frozenset[str]) -> bool:
    """Whether linears run again that read what other ranks have: of "operators", and latent attention's way up."""
    return "operators" in options or ("up_projection" in options and any("up_projection" in s.recompute for s in fine))


def _asked_again(message: Message) -> bool:
    """Whether it is sent twice then: what sums and all-to-alls bring is kept."""
    return message.axes == ("tp",) and message.kind is MessageKind.ALL_GATHER


def _outputs(out: int, saved: Sequence[SavedBuffer]) -> tuple[Buffer, ...]:
    act = sum(s.bytes for s in saved if s.until is not Pass.I)
    tmp = sum(s.bytes for s in saved if s.until is Pass.I)
    return (Buffer("out", out), Buffer("act", act), Buffer("tmp", tmp))


def prune_recompute(graph: Graph) -> Graph:
    """Drop recomputed nodes that nothing reads a byte of: a layer's last combine need not run again.

    rewrite:
        R: a -> b -> c, nothing reads c   -->   R: a -> b
    """
    live = {i for i, n in enumerate(graph.nodes) if n.kind is not Pass.R}
    while True:
        more = {
            e.src
            for e in graph.edges
            if e.src not in live and e.dst in live and graph.nodes[e.src].writes[e.slot].bytes > 0
        }
        if not more:
            break
        live |= more
    return subgraph(graph, live)


def subgraph(graph: Graph, keep: set[int]) -> Graph:
    """The graph without the other nodes and their edges."""
    if len(keep) == len(graph.nodes):
        return graph
    new = {old: n for n, old in enumerate(sorted(keep))}
    kept = (e for e in graph.edges if e.src in new and e.dst in new)
    edges = tuple(GraphEdge(new[e.src], new[e.dst], e.slot, e.join) for e in kept)
    return replace(graph, nodes=tuple(graph.nodes[i] for i in sorted(keep)), edges=edges)
