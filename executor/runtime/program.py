"""One rank's program as the interpreter needs it: which values cross stages, who brings them, who meets, what dies."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field, replace

from executor.parallel.collective import Collective
from ir.core.ops import Pass
from ir.graph.graph import GraphNode
from ir.graph.sync import buckets
from ir.graph.zero import gathered
from ir.plan.host import host_reads
from ir.plan.places import RankPlacement
from ir.plan.plan import AT_START, OpKind, OpShape, Plan

Value = tuple[int, int, int]  # (node, slot, microbatch)
At = tuple[int, int]  # (op, cover)


@dataclass(frozen=True, slots=True)
class PassStretch:
    """Nodes of a compute op between which nothing happens but their work, all of one stage and microbatch.

    first: the node it begins with, `cover` the place of that in its op, `end` the place of its last. passes: (pass,
    part) of each; none for the update, which is nobody's.
    """

    stage: int
    mb: int
    first: int
    cover: int
    end: int
    passes: tuple[tuple[Pass, str], ...]


@dataclass(frozen=True, slots=True)
class ProgramOp:
    """Row `index` of the plan as the interpreter needs it, looked up once for all steps.

    waits: for communication alone, as compute runs in order anyway. stretches: of a compute op.
    """

    index: int
    kind: OpKind
    stream: str
    text: str
    waits: tuple[int, ...]
    stretches: tuple[PassStretch, ...] = ()


@dataclass(frozen=True)
class RankPlan:
    """What rank `rank` of the mesh runs: rows first … last − 1 of the plan.

    received: value → the receive that brings it. outer: node → the (node, slot) of another stage that it reads.
    crosses: node → the slot of its output (F) or input gradient (I) that another stage reads. frees: (op, cover) → the
    values among these that die there; cover is AT_START for those gone before the op runs. meetings: op → what it is,
    of collectives. opens: the (bucket, microbatch) whose gradients begin there; closes: the reductions and gathers
    whose flat tensors die there. gathered: node → the buckets whose weights it reads from a gather. brought: node → the
    exchanges, as nodes, whose rows it reads; exchanged: (exchange, microbatch) → its op. counted: op → the exchange
    whose numbers the host must have read before it.
    """

    plan: Plan
    places: RankPlacement
    rank: int
    first: int
    last: int
    received: dict[Value, int] = field(default_factory=dict)
    outer: dict[int, tuple[int, int]] = field(default_factory=dict)
    crosses: dict[int, int] = field(default_factory=dict)
    frees: dict[At, list[Value]] = field(default_factory=dict)
    meetings: dict[int, Collective] = field(default_factory=dict)
    opens: dict[At, list[tuple[str, int]]] = field(default_factory=dict)
    closes: dict[At, list[Collective]] = field(default_factory=dict)
    gathered: dict[int, list[str]] = field(default_factory=dict)
    brought: dict[int, list[int]] = field(default_factory=dict)
    exchanged: dict[tuple[int, int], int] = field(default_factory=dict)
    counted: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan, rank: int) -> RankPlan:
        places = RankPlacement.of(plan)
        number = places.program(rank)
        out = cls(plan, places, rank, int(plan.bounds[number]), int(plan.bounds[number + 1]))
        for i in range(out.first, out.last):
            shape = out.shape(i)
            if shape.kind is OpKind.RECV:
                assert shape.slot is not None
                out.received[(*shape.slot, int(plan.mb[i]))] = i
            if shape.kind is OpKind.COLLECTIVE:
                meeting = out.meetings[i] = Collective.of(plan, places, rank, shape, int(plan.mb[i]))
                if meeting.exchange:
                    out.exchanged[shape.covers[0][0], meeting.mb] = i
        nodes = plan.graph.nodes
        for e in plan.graph.edges:
            src, dst = nodes[e.src], nodes[e.dst]
            if not src.once and src.message is not None and dst.message is None:
                out.brought.setdefault(e.dst, []).append(e.src)
            if not e.join and src.kind in (Pass.F, Pass.I) and src.kind is dst.kind and src.stage != dst.stage:
                out.outer[e.dst] = (e.src, e.slot)
                out.crosses[e.src] = e.slot
        for index, held in gathered(plan.graph, buckets(plan.graph)).items():
            out.gathered[index] = [b.key for b in held]
        ops, on = host_reads(plan)
        out.counted.update(zip(ops.tolist(), on.tolist(), strict=True))
        out._read_buffers()
        return out

    @property
    def number(self) -> int:
        """Which program it is: the pipeline rank."""
        return self.places.program(self.rank)

    def _read_buffers(self) -> None:
        plan, b = self.plan, self.plan.buffers
        for k in range(len(b)):
            made = int(b.alloc[k])
            if not self.first <= made < self.last:
                continue
            node, slot, mb = int(b.node[k]), int(b.slot[k]), int(b.mb[k])
            end = int(b.free[k]), max(int(b.free_cover[k]), AT_START)
            if node < 0 and (meeting := self.meetings.get(slot)) is not None:
                if made != slot:
                    self.opens.setdefault((made, int(b.alloc_cover[k])), []).append((meeting.bucket, meeting.mb))
                self.closes.setdefault(end, []).append(meeting)
            elif node >= 0 and self.crosses.get(node) == slot:
                self.frees.setdefault(end, []).append((node, slot, mb))
            elif node < 0 and (brought := self.shape(slot).slot) is not None:
                self.frees.setdefault(end, []).append((*brought, int(plan.mb[slot])))
            # else inside a stage: dies with what holds it

    def shape(self, i: int) -> OpShape:
        return self.plan.shapes[int(self.plan.shape[i])]

    def covers(self, i: int) -> list[tuple[int, GraphNode, int]]:
        """Row i's nodes in the order they run: (index, node, microbatch)."""
        mbs = (int(self.plan.mb[i]), int(self.plan.mb2[i]))
        return [(n, self.plan.graph.nodes[n], mbs[member]) for n, member in self.shape(i).covers]

    def op(self, i: int, alone: Container[str] | None) -> ProgramOp:
        """Row i. alone: parts whose nodes the interpreter sees by themselves; None: all."""
        shape, plan = self.shape(i), self.plan
        stretches = self._stretches(i, alone) if shape.kind is OpKind.COMPUTE else ()
        waits = [w for w in plan.waits.row(i).tolist() if self.shape(w).kind is not OpKind.COMPUTE]
        return ProgramOp(i, shape.kind, shape.stream, plan.text(i), tuple(waits), tuple(stretches))

    def _stretches(self, i: int, alone: Container[str] | None) -> list[PassStretch]:
        out: list[PassStretch] = []
        apart = True
        for cover, (index, node, mb) in enumerate(self.covers(i)):
            by_itself = node.once or alone is None or node.part in alone
            new = apart or by_itself or index in self.brought or (i, cover) in self.opens
            if new or (node.stage, mb) != (out[-1].stage, out[-1].mb) or not self._gathered_alike(index, out[-1].first):
                out.append(PassStretch(node.stage, mb, index, cover, cover, ()))
            passes = () if node.once else ((Pass(str(node.kind)), node.part),)
            out[-1] = replace(out[-1], end=cover, passes=(*out[-1].passes, *passes))
            apart = by_itself or (i, cover) in self.frees or (i, cover) in self.closes
        return out

    def _gathered_alike(self, a: int, b: int) -> bool:
        """Whether two nodes read the same gathers, or the first one none."""
        return a not in self.gathered or self.gathered[a] == self.gathered.get(b)

    def value(self, i: int) -> Value:
        slot = self.shape(i).slot
        assert slot is not None
        return (*slot, int(self.plan.mb[i]))

    def peer(self, i: int) -> int:
        return self.places.peer(self.rank, int(self.plan.program[int(self.plan.partner[i])]))

    def others(self, i: int) -> list[int]:
        """The ranks that a communication op needs."""
        if i not in self.meetings:
            return [self.peer(i)]
        return [r for r in self.meetings[i].members if r != self.rank]

    def number_of(self, mb: int) -> int:
        return self.places.replica(self.rank) * self.plan.graph.mbs + mb

    def batches(self) -> list[int]:
        """The microbatches whose tokens or labels this rank reads."""
        ends = (0, self.plan.graph.stages - 1)
        rows = (c for i in range(self.first, self.last) if self.shape(i).kind is OpKind.COMPUTE for c in self.covers(i))
        return sorted({mb for _, node, mb in rows if node.kind is Pass.F and node.stage in ends})
