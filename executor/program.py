"""One program of a plan as the interpreter needs it: which values cross stages, who brings them, where they go."""

from __future__ import annotations

from dataclasses import dataclass, field

from ir.graph import Node
from ir.ops import Pass
from ir.plan import AT_START, OpKind, Plan, Shape

Value = tuple[int, int, int]  # (node, slot, microbatch)


@dataclass(frozen=True)
class Program:
    """Rank `rank`'s ops are rows first … last − 1 of the plan.

    received: value → the receive that brings it. outer: node → the (node, slot) of another stage that it reads.
    crosses: node → the slot of its output (F) or input gradient (I) that another stage reads. frees: (op, cover) → the
    values among these that die there; cover is AT_START for those gone before the op runs.
    """

    plan: Plan
    rank: int
    first: int
    last: int
    received: dict[Value, int] = field(default_factory=dict)
    outer: dict[int, tuple[int, int]] = field(default_factory=dict)
    crosses: dict[int, int] = field(default_factory=dict)
    frees: dict[tuple[int, int], list[Value]] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan, rank: int) -> Program:
        """Read one rank's part."""
        out = cls(plan, rank, int(plan.bounds[rank]), int(plan.bounds[rank + 1]))
        for i in range(out.first, out.last):
            shape = out.shape(i)
            if shape.kind is OpKind.RECV:
                assert shape.slot is not None
                out.received[(*shape.slot, int(plan.mb[i]))] = i
        nodes = plan.graph.nodes
        for e in plan.graph.edges:
            src, dst = nodes[e.src], nodes[e.dst]
            if not e.join and src.kind in (Pass.F, Pass.I) and src.kind is dst.kind and src.stage != dst.stage:
                out.outer[e.dst] = (e.src, e.slot)
                out.crosses[e.src] = e.slot
        out._read_frees()
        return out

    def _read_frees(self) -> None:
        plan, b = self.plan, self.plan.buffers
        for k in range(len(b)):
            op = int(b.free[k])
            if not self.first <= op < self.last:
                continue
            node, slot, mb = int(b.node[k]), int(b.slot[k]), int(b.mb[k])
            if node >= 0 and self.crosses.get(node) == slot:
                value = (node, slot, mb)
            elif node < 0 and (brought := self.shape(slot).slot) is not None:
                value = (*brought, int(plan.mb[slot]))
            else:
                continue  # inside a stage: dies with what holds it
            self.frees.setdefault((op, max(int(b.free_cover[k]), AT_START)), []).append(value)

    def shape(self, i: int) -> Shape:
        """What kind of op row i is."""
        return self.plan.shapes[int(self.plan.shape[i])]

    def covers(self, i: int) -> list[tuple[int, Node, int]]:
        """Row i's nodes in the order they run: (index, node, microbatch)."""
        mbs = (int(self.plan.mb[i]), int(self.plan.mb2[i]))
        return [(n, self.plan.graph.nodes[n], mbs[member]) for n, member in self.shape(i).covers]

    def value(self, i: int) -> Value:
        """What a send or receive carries."""
        slot = self.shape(i).slot
        assert slot is not None
        return (*slot, int(self.plan.mb[i]))

    def peer(self, i: int) -> int:
        """The other rank of a send or receive."""
        return int(self.plan.program[int(self.plan.partner[i])])

    def others(self, i: int) -> list[int]:
        """The ranks that a communication op needs."""
        if self.shape(i).kind is not OpKind.COLLECTIVE:
            return [self.peer(i)]
        return [g for g in self.covers(i)[0][1].groups if g != self.rank]

    def batches(self) -> list[int]:
        """The microbatches whose tokens or labels this rank reads."""
        ends = (0, self.plan.graph.stages - 1)
        rows = (c for i in range(self.first, self.last) if self.shape(i).kind is OpKind.COMPUTE for c in self.covers(i))
        return sorted({mb for _, node, mb in rows if node.kind is Pass.F and node.stage in ends})
