"""What exists once per step: every gradient summed once over exactly those who hold it, before norm, update, gather."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ir.core.order import IntArray
from ir.core.work import MessageKind
from ir.graph.graph import Graph, GraphNode, PerStepOp, illegal
from ir.plan.plan import Plan
from ir.verify.coverage import OpInstances
from ir.verify.held import HeldShards

_COMM = {
    PerStepOp.REDUCE: MessageKind.REDUCE_SCATTER,
    PerStepOp.ALL_REDUCE: MessageKind.ALL_REDUCE,
    PerStepOp.GATHER: MessageKind.ALL_GATHER,
}


@dataclass(frozen=True)
class StepTail:
    """A step's end. sums: bucket → the node that sums its gradients once per step; gathers: bucket → those that bring
    its updated weights; norm: None without clipping, or where one rank has all. updates: by program."""

    sums: dict[str, int] = field(default_factory=dict)
    gathers: dict[str, list[int]] = field(default_factory=dict)
    norm: int | None = None
    updates: dict[int, int] = field(default_factory=dict)

    def follow(self, program: int) -> int:
        """The node of a program that reads all its reduced gradients first."""
        return self.updates[program] if self.norm is None else self.norm


def tail(graph: Graph, found: Sequence[HeldShards]) -> StepTail:
    """The once-nodes of a graph. Raises PiperError (illegal_plan): one missing, twice, or over others than holders."""
    sums, gathers, norms, updates = dict[str, int](), dict[str, list[int]](), list[int](), dict[int, int]()
    for i, n in [(i, n) for i, n in enumerate(graph.nodes) if type(n.kind) is PerStepOp]:
        match n.kind:
            case PerStepOp.REDUCE | PerStepOp.ALL_REDUCE:
                if n.bucket in sums:
                    raise illegal(f"{n.text()} and {graph.nodes[sums[n.bucket]].text()} both sum {n.bucket}", "one sum")
                sums[n.bucket] = i
            case PerStepOp.GATHER:
                gathers.setdefault(n.bucket, []).append(i)
            case PerStepOp.NORM:
                norms.append(i)
            case PerStepOp.UPDATE:
                for g in n.groups:
                    if g in updates:
                        raise illegal(f"program {g}: {n.text()} and {graph.nodes[updates[g]].text()} both update")
                    updates[g] = i
    if found and (late := next((p for p in range(graph.programs) if p not in updates), None)) is not None:
        raise illegal(f"program {late} never updates")
    if len(norms) > 1 or any(graph.nodes[i].groups != tuple(range(graph.programs)) for i in norms):
        raise illegal("NORM is not one sum over all programs")
    out = StepTail(sums, gathers, norms[0] if norms else None, updates)
    _check_known(graph, {h.bucket.key for h in found}, [*sums, *gathers])
    for h in found:
        _check_sum(graph, h, out)
        _check_gathers(graph, h, out)
    for p, i in updates.items():
        _check_update(graph.nodes[i], [h for h in found if p in h.bucket.owners])
    return out


def _check_known(graph: Graph, keys: set[str], named: Iterable[str]) -> None:
    for key in named:
        if key not in keys:
            node = next(n for n in graph.nodes if n.bucket == key and n.once)
            raise illegal(f"{node.text()} is about bucket {key!r}, which there is not")


def _check_sum(graph: Graph, h: HeldShards, t: StepTail) -> None:
    """ZeRO-0 and 1 sum over all who hold it; 2 and 3, summed inside each group already, between the groups."""
    b, between = h.bucket, len(h.bucket.owners) > 1
    wanted = h.copies if h.level < 2 else between
    node = graph.nodes[t.sums[b.key]] if b.key in t.sums else None
    if not wanted or not h.adds:
        if node is not None:
            raise illegal(f"{node.text()} sums what nobody else holds")
        return
    if node is None:
        raise illegal(f"nothing sums {b.key} over groups {list(b.owners)}", "reduce it once per step")
    kind = PerStepOp.REDUCE if h.level == 1 else PerStepOp.ALL_REDUCE
    if node.kind is not kind:
        raise illegal(f"{node.text()}: zero = {h.level} takes a {kind}")
    _check_message(graph, node, h, set(b.axes) if h.level < 2 else set(), b.owners, 0)


def _check_update(n: GraphNode, own: Sequence[HeldShards]) -> None:
    numel = sum(h.share if h.level else h.bucket.numel for h in own)
    if n.numel != numel:
        raise illegal(f"{n.text()} updates {n.numel} elements, not {numel}")


def _check_gathers(graph: Graph, h: HeldShards, t: StepTail) -> None:
    """ZeRO-1 divides over all owners, who gather together; ZeRO-2 inside each group, which gathers by itself."""
    b, found = h.bucket, t.gathers.get(h.bucket.key, [])
    together = h.level == 1 and h.copies
    wanted = [b.owners] if together else [(g,) for g in b.owners] if h.level == 2 and h.inside > 1 else []
    if sorted(graph.nodes[i].groups for i in found) != sorted(wanted):
        got = [list(graph.nodes[i].groups) for i in found]
        raise illegal(f"{b.key} is gathered by groups {got}, not {[list(w) for w in wanted]}")
    for i in found:
        _check_message(graph, graph.nodes[i], h, set(b.axes), graph.nodes[i].groups, 1)


def _check_message(
    graph: Graph, n: GraphNode, h: HeldShards, axes: set[str], groups: tuple[int, ...], way: int
) -> None:
    """way: 0 for gradients, 1 for weights."""
    assert graph.source is not None
    b, m = h.bucket, n.message
    # Between groups travel the shares that each rank has; else all of it, padded to equal shares.
    numel = h.share * (1 if way == 0 and h.level >= 2 else b.ranks)
    size = numel * graph.source.sync_bytes()[way]
    if n.groups != groups:
        raise illegal(f"{n.text()} is over groups {list(n.groups)}, but {b.key} is on {list(groups)}")
    if m is None or m.kind is not _COMM[PerStepOp(n.kind)] or set(m.axes) != axes or m.bytes != size:
        raise illegal(f"{n.text()} is no {_COMM[PerStepOp(n.kind)]} of {size} bytes over {sorted(axes)}: {m}")


def once_needs(plan: Plan, found: OpInstances, holds: Sequence[HeldShards], t: StepTail) -> IntArray:
    """[needed op, op that needs it] of one program: W -> sum -> [norm] -> update -> gather."""
    out: list[tuple[int, int]] = []
    op = found.op
    for h in holds:
        b, adds = h.bucket, np.array(h.adds, dtype=np.int64)
        rows = op[adds, : plan.graph.mbs] if len(adds) else np.zeros((0, 0), dtype=np.int64)
        for p in b.owners:
            mine = rows[plan.program[rows] == p]
            after = op[t.follow(p), p]
            if b.key in t.sums:
                total = op[t.sums[b.key], p]
                out.append((total, after))
                after = total
            if len(mine):
                out.append((mine.max(), after))
            for gather in t.gathers.get(b.key, ()):
                if p in plan.graph.nodes[gather].groups:
                    out.append((op[t.updates[p], p], op[gather, p]))
    if t.norm is not None:
        out += [(op[t.norm, p], op[update, p]) for p, update in t.updates.items()]
    return np.array(out, dtype=np.int64).reshape(-1, 2)
