"""Templates: the rows that one unit of an order becomes, built once and stamped for every microbatch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ir.core.ops import OpToken, Pass
from ir.graph.graph import COMPUTE, Graph, GraphEdge, PerStepOp, illegal
from ir.lower.merge import Item, merged
from ir.lower.policy import MessageQueue, PassMerge, PlanPolicy
from ir.lower.sequence import PassSequences
from ir.plan.names import MessageNames, OpLabels, fused_text, node_shape, numbered
from ir.plan.plan import OpKind, OpShape

Members = tuple[tuple[int, int], ...]  # (stage, token)
TemplateRow = tuple[int, int, int]  # shape, member of mb, member of mb2 (-1: none)
Homes = Mapping[tuple[int, int], int]  # (stage, microbatch class) -> program
TAIL = (PerStepOp.NORM, PerStepOp.UPDATE, PerStepOp.GATHER)  # behind all reductions
Sharded = Mapping[int, frozenset[str]]  # node -> the buckets it reads gathered, or whose gradients it makes


@dataclass(frozen=True, slots=True)
class PlanTemplateKey:
    """What a template depends on: the program, the actions of the unit, the class of each one's microbatch."""

    program: int
    members: Members
    classes: tuple[int, ...]
    last: bool = False  # gradients are whole behind it: what is reduced need not wait for all of it


class PlanTemplates:
    """Builds templates and the shapes they share. `home[stage][class]` is the program of a stage's microbatch class."""

    def __init__(self, graph: Graph, policy: PlanPolicy, home: Homes, sharded: Sharded) -> None:
        self.graph, self.policy, self.home, self.sharded = graph, policy, home, sharded
        self.sequences = PassSequences(graph, policy.experts)
        self.shapes: list[OpShape] = []
        self._shape_at: dict[tuple[str, str, int], int] = {}
        self._alone: dict[int, int] = {}  # node -> its own shape
        self._runs: dict[tuple[int, ...], int] = {}  # nodes of one member -> their shape
        self.names, self.labels = MessageNames(graph), OpLabels(graph)
        nodes = graph.nodes
        self._leaving: dict[int, list[GraphEdge]] = {}
        self._adds_to: dict[int, list[int]] = {}  # weight gradient -> reductions that add it up
        sums: dict[int, set[int]] = {}
        for e in graph.edges:
            if e.join and nodes[e.dst].once and nodes[e.dst].kind not in TAIL:
                self._adds_to.setdefault(e.src, []).append(e.dst)
                sums.setdefault(nodes[e.src].stage, set()).add(e.dst)
            if nodes[e.src].stage != nodes[e.dst].stage and not e.join and not nodes[e.dst].once:
                self._leaving.setdefault(e.src, []).append(e)
        several = {stage for stage, mine in sums.items() if len(mine) > 1}
        self.divided = set() if policy.reduce_behind else several  # reduced in several pieces, beside what is left
        # Compute that reads a collective's result must not drag what stands before it into its wait.
        self._waiting = {e.dst for e in graph.edges if nodes[e.src].stream != COMPUTE and not nodes[e.src].once}

    def build(self, key: PlanTemplateKey) -> list[TemplateRow]:
        """The rows of one unit.

        Raises PiperError (illegal_plan): members that cannot be one fused op.
        """
        alone = len(key.members) == 1
        seqs = [self.sequences.of(stage, OpToken(token), alone) for stage, token in key.members]
        nodes = self.graph.nodes
        there = [m for m, (stage, _) in enumerate(key.members) if seqs[m] or stage not in self.graph.silent]
        if len(there) < 2:
            items: list[Item] = [(n, m) for m in there for n in seqs[m]]
        elif self.policy.merge is PassMerge.FUSED:
            if len(seqs) > 2 or not all(seqs) or any(nodes[n].stream != COMPUTE for seq in seqs for n in seq):
                names = " ".join(f"{stage}{OpToken(token).name}" for stage, token in key.members)
                raise illegal(f"{names} cannot be one fused op: two members of compute alone", "merge = alternate")
            items = [(n, m) for m, seq in enumerate(seqs) for n in seq]
        else:
            items = merged(self.graph, self.policy, [OpToken(t) for _, t in key.members], seqs)
        return self._rows(key, items)

    def _rows(self, key: PlanTemplateKey, items: list[Item]) -> list[TemplateRow]:
        """Coalesce neighbours on the compute stream; put sends behind their producers."""
        rows: list[TemplateRow] = []
        run: list[Item] = []
        pending: list[TemplateRow] = []
        fused = len({m for _, m in items}) > 1 and self.policy.merge is PassMerge.FUSED
        cut = not fused and not self.policy.whole_backward
        whole = self._whole(items) if key.last and cut else frozenset()

        def close() -> None:
            if run:
                rows.append(self._compute(key, run, fused))
                run.clear()
            rows.extend(pending)
            pending.clear()

        for node, member in items:
            computes = self.graph.nodes[node].stream == COMPUTE
            if not computes:
                close()
                if node not in self._alone:
                    self._alone[node] = self.add(node_shape(self.graph, node))
                rows.append((self._alone[node], member, -1))
            else:
                if run and not fused and not self._joins(run, (node, member)):
                    close()
                run.append((node, member))
            sends = self._sends(key, node, member) if node in self._leaving else ()
            (pending if computes else rows).extend(sends)
            if (sends and cut and computes) or node in whole:
                close()
        close()
        return rows

    def _whole(self, items: list[Item]) -> frozenset[int]:
        """The nodes behind which all of a bucket's gradients are there."""
        return frozenset({r: node for node, _ in items for r in self._adds_to.get(node, ())}.values())

    def _joins(self, run: list[Item], new: Item) -> bool:
        last, node = run[-1], new[0]
        a, b = self.graph.nodes[last[0]], self.graph.nodes[node]
        if last[1] != new[1] or a.stage != b.stage or (a.kind is Pass.F) != (b.kind is Pass.F) or node in self._waiting:
            return False
        if b.kind is Pass.W and a.kind is Pass.I and a.part != b.part:  # a W that was put off is an op of its own
            return False
        mine = self.sharded.get(node)  # none: it may run with any; else only with its own
        return mine is None or (
            all(mine == self.sharded.get(n, mine) for n, _ in run) and any(n in self.sharded for n, _ in run)
        )

    def _compute(self, key: PlanTemplateKey, run: list[Item], fused: bool) -> TemplateRow:
        if not fused:
            nodes = tuple([n for n, _ in run])
            if nodes not in self._runs:  # in a schedule's pairs the same runs come again and again
                covers = tuple([(n, 0) for n in nodes])
                self._runs[nodes] = self.add(OpShape(OpKind.COMPUTE, COMPUTE, self.labels.of(nodes), covers))
            return (self._runs[nodes], run[0][1], -1)
        texts = [self.labels.of([n for n, m in run if m == i]) for i in range(len(key.members))]
        shape = OpShape(OpKind.COMPUTE, COMPUTE, fused_text(texts), tuple(run))
        return (self.add(shape), 0, 1)

    def _sends(self, key: PlanTemplateKey, node: int, member: int) -> list[TemplateRow]:
        """One send per program that reads a slot of this node elsewhere."""
        n = self.graph.nodes[node]
        cls = key.classes[member]
        out: dict[tuple[int, int], TemplateRow] = {}
        for e in self._leaving[node]:
            reader = self.graph.nodes[e.dst]
            peer = self.home.get((reader.stage, cls))
            if peer is None:
                raise illegal(f"{reader.text()} reads {n.text()} but is placed nowhere", "place every stage")
            if peer != key.program and (peer, e.slot) not in out:
                stream = "p2p" if self.policy.p2p is MessageQueue.SINGLE else f"send>{peer}"
                shape = OpShape(OpKind.SEND, stream, self.names.send((node, e.slot)), slot=(node, e.slot), peer=peer)
                out[peer, e.slot] = (self.add(shape), member, -1)
        return [out[k] for k in sorted(out)]

    def add(self, shape: OpShape) -> int:
        """Register a shape, which perhaps no template makes (a receive, a once-per-step op): its place in `shapes`."""
        base, k = shape.text, 1  # the same nodes in another order go by the same label: a number tells them apart
        while (at := self._shape_at.get((shape.stream, shape.text, shape.peer))) is not None:
            if shape.kind is not OpKind.COMPUTE or self.shapes[at].covers == shape.covers:
                break
            k += 1
            shape = replace(shape, text=numbered(base, k))
        at = self._shape_at.setdefault((shape.stream, shape.text, shape.peer), len(self.shapes))
        if at == len(self.shapes):
            self.shapes.append(shape)
        elif self.shapes[at] != shape:
            raise illegal(f"two different ops are both called {shape.text}")
        return at
