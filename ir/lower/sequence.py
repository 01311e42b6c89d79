"""Which nodes one action of a schedule stands for, in the order one program would run them."""

from collections import defaultdict

from ir.core.ops import OpToken, Pass
from ir.graph.graph import COMPUTE, Graph, GraphEdge
from ir.lower.policy import ExpertOverlap


class PassSequences:
    """Node sequences per (stage, token). Communication stands right behind its producer.

    F runs parts in model order. I runs them backwards, each behind what it recomputes. B puts every W behind the
    communication that its I feeds, so that the wire is busy first.
    place: or, of an action by itself, communication behind what may not run beside it, which it then waits for.
    """

    def __init__(self, graph: Graph, place: ExpertOverlap = ExpertOverlap.OVERLAPPED) -> None:
        self.graph, self.place = graph, place
        self.out: list[list[GraphEdge]] = [[] for _ in graph.nodes]
        self.into: list[list[GraphEdge]] = [[] for _ in graph.nodes]
        for e in graph.edges:
            self.out[e.src].append(e)
            self.into[e.dst].append(e)
        self.compute: dict[tuple[int, Pass], list[int]] = defaultdict(list)
        for i, n in enumerate(graph.nodes):
            if isinstance(n.kind, Pass) and n.stream == COMPUTE:
                self.compute[n.stage, n.kind].append(i)
        self._memo: dict[tuple[int, OpToken, ExpertOverlap], tuple[int, ...]] = {}

    def of(self, stage: int, token: OpToken, alone: bool = True) -> tuple[int, ...]:
        """Node indices of one action. alone: it does not take turns with another."""
        key = stage, token, self.place if alone else ExpertOverlap.OVERLAPPED
        if key not in self._memo:
            self._memo[key] = tuple(self._deferred(self._build(stage, token), key[2]))
        return self._memo[key]

    def _deferred(self, nodes: list[int], place: ExpertOverlap) -> list[int]:
        """The same with communication behind all that may not run beside it."""
        kinds = {ExpertOverlap.OVERLAPPED: (), ExpertOverlap.SHARED: (Pass.W,), ExpertOverlap.SERIAL: tuple(Pass)}
        out: list[int] = []
        waiting: list[int] = []
        for node in nodes:
            n = self.graph.nodes[node]
            if n.stream != COMPUTE:
                waiting.append(node)
                continue
            if n.kind not in kinds[place] or any(e.src in waiting for e in self.into[node]):
                out += waiting
                waiting.clear()
            out.append(node)
        return out + waiting

    def fed(self, node: int) -> list[int]:
        """Communication nodes of the same stage and pass that read this node."""
        n = self.graph.nodes
        hits = {e.dst for e in self.out[node] if n[e.dst].stream != COMPUTE and n[e.dst].kind == n[node].kind}
        return sorted(hits)

    def _build(self, stage: int, token: OpToken) -> list[int]:
        match token:
            case OpToken.F:
                return [x for i in self.compute[stage, Pass.F] for x in (i, *self.fed(i))]
            case OpToken.W:
                return list(self.compute[stage, Pass.W])
            case OpToken.I | OpToken.B:
                return self._backward(stage, token)

    def _backward(self, stage: int, token: OpToken) -> list[int]:
        out: list[int] = []
        done: set[int] = set()
        weight = {self.graph.nodes[w].part: w for w in self.compute[stage, Pass.W]}
        for i in self.compute[stage, Pass.I]:
            w = weight.get(self.graph.nodes[i].part)
            for reader in (i,) if w is None else (i, w):
                self._recompute(reader, out, done)
            out += [i, *self.fed(i)]
            if token is OpToken.B and w is not None:
                out.append(w)
        return out

    def _recompute(self, reader: int, out: list[int], done: set[int]) -> None:
        """Emit the R nodes that `reader` needs and that have not run yet, each behind what it needs itself."""
        for e in self.into[reader]:
            if self.graph.nodes[e.src].kind is Pass.R and e.src not in done:
                done.add(e.src)
                self._recompute(e.src, out, done)
                out.append(e.src)
                for comm in self.fed(e.src):
                    if comm not in done:
                        done.add(comm)
                        out.append(comm)
