"""What exists once per step: every gradient summed once over exactly those who hold it, before norm, update, gather."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ir.core.order import IntArray
from ir.core.work import MessageKind
from ir.graph.graph import Graph, GraphNode, PerStepOp, illegal
from ir.graph.sync import Bucket
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
    """A step's end. sums: bucket → the nodes that sum its gradients once per step, in the order in which one sums what
    another has; gathers: bucket → those that bring its updated weights; norm: None without clipping, or where one rank
    has all. updates: by program."""

    sums: dict[str, list[int]] = field(default_factory=dict)
    gathers: dict[str, list[int]] = field(default_factory=dict)
    norm: int | None = None
    updates: dict[int, int] = field(default_factory=dict)

    def follow(self, program: int) -> int:
        """The node of a program that reads all its reduced gradients first."""
        return self.updates[program] if self.norm is None else self.norm

    def summing(self, graph: Graph, b: Bucket, program: int) -> list[int]:
        """The nodes that sum a bucket's gradients on a program, one behind the other."""
        return [i for i in self.sums.get(b.key, ()) if program in graph.nodes[i].groups]


def tail(graph: Graph, found: Sequence[HeldShards]) -> StepTail:
    """The once-nodes of a graph. Raises PiperError (illegal_plan): one missing, twice, or over others than holders."""
    sums, gathers, norms, updates = dict[str, list[int]](), dict[str, list[int]](), list[int](), dict[int, int]()
    for i, n in [(i, n) for i, n in enumerate(graph.nodes) if type(n.kind) is PerStepOp]:
        match n.kind:
            case PerStepOp.REDUCE | PerStepOp.ALL_REDUCE:
                sums.setdefault(n.bucket, []).append(i)
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
        _check_sums(graph, h, out.sums.get(h.bucket.key, []))
        _check_gathers(graph, h, out)
    for p, i in updates.items():
        _check_update(graph.nodes[i], [h for h in found if p in h.bucket.owners])
    return out


def _check_known(graph: Graph, keys: set[str], named: Iterable[str]) -> None:
    for key in named:
        if key not in keys:
            node = next(n for n in graph.nodes if n.bucket == key and n.once)
            raise illegal(f"{node.text()} is about bucket {key!r}, which there is not")


class _WantedSum(NamedTuple):
    """A sum that there has to be: over ranks that differ in these axes, on these groups, of so many elements each."""

    kind: PerStepOp
    axes: frozenset[str]
    groups: tuple[int, ...]
    numel: int


def _wanted(h: HeldShards) -> list[_WantedSum]:
    """ZeRO-0 and 1 sum over all who hold a set of shards; 2 and 3 have done so inside each group. Then each share over
    those who hold it besides: in other sets, and of ZeRO-2 and 3 on other groups."""
    b, out = h.bucket, list[_WantedSum]()
    if h.level < 2 and h.inside * len(b.owners) > 1:
        kind = PerStepOp.REDUCE if h.level == 1 else PerStepOp.ALL_REDUCE
        out.append(_WantedSum(kind, h.over, b.owners, h.share * h.inside * len(b.owners)))
    together = [b.owners] if h.level >= 2 else [(g,) for g in b.owners]
    if h.times * len(together[0]) > 1:
        out += [_WantedSum(PerStepOp.ALL_REDUCE, h.across, groups, h.share) for groups in together]
    return out


def _check_sums(graph: Graph, h: HeldShards, found: Sequence[int]) -> None:
    """Exactly those that there have to be, each once; in `found` what others sum further stands before them."""
    b, wanted = h.bucket, _wanted(h) if h.adds else []
    if not wanted and found:
        raise illegal(f"{graph.nodes[found[0]].text()} sums what nobody else holds")
    for k, want in enumerate(wanted):
        if k >= len(found):
            over = f", {' '.join(sorted(want.axes))}" if h.across else ""
            raise illegal(f"nothing sums {b.key} over groups {list(want.groups)}{over}", "reduce it once per step")
        node = graph.nodes[found[k]]
        if node.kind is not want.kind:
            raise illegal(f"{node.text()}: zero = {h.level} takes a {want.kind}")
        _check_message(graph, node, want, 0)
    if len(found) > len(wanted):
        last, more = (graph.nodes[i].text() for i in (found[len(wanted) - 1], found[len(wanted)]))
        raise illegal(f"{more} and {last} both sum {b.key}", "one sum")


def _check_update(n: GraphNode, own: Sequence[HeldShards]) -> None:
    held = [(h.share if h.level else h.bucket.numel, h.bucket.matrices) for h in own]
    numel, matrices = sum(m for m, _ in held), sum(m for m, whole in held if whole)
    if n.numel != numel:
        raise illegal(f"{n.text()} updates {n.numel} elements, not {numel}")
    others = sum(h.bucket.numel - h.share for h in own if h.level == 1)
    if n.others != others:
        raise illegal(f"{n.text()} leaves {n.others} elements to others, not {others}")
    if n.matrices != matrices:
        raise illegal(f"{n.text()} orthogonalises {n.matrices} elements, not {matrices}")


def _check_gathers(graph: Graph, h: HeldShards, t: StepTail) -> None:
    """ZeRO-1 divides over all owners, who gather together; ZeRO-2 inside each group, which gathers by itself."""
    b, found = h.bucket, t.gathers.get(h.bucket.key, [])
    together = h.level == 1 and h.inside * len(b.owners) > 1
    wanted = [b.owners] if together else [(g,) for g in b.owners] if h.level == 2 and h.inside > 1 else []
    if sorted(graph.nodes[i].groups for i in found) != sorted(wanted):
        got = [list(graph.nodes[i].groups) for i in found]
        raise illegal(f"{b.key} is gathered by groups {got}, not {[list(w) for w in wanted]}")
    for i in found:
        want = _WantedSum(PerStepOp.GATHER, h.over, graph.nodes[i].groups, h.share * b.ranks)
        _check_message(graph, graph.nodes[i], want, 1)


def _check_message(graph: Graph, n: GraphNode, want: _WantedSum, way: int) -> None:
    """way: 0 for gradients, 1 for weights. Shares travel, or all of it, padded to equal shares."""
    assert graph.source is not None
    m, size, kind = n.message, want.numel * graph.source.sync_bytes(whole=True)[way], _COMM[want.kind]
    if n.groups != want.groups:
        raise illegal(f"{n.text()} is over groups {list(n.groups)}, but {n.bucket} is on {list(want.groups)}")
    if m is None or m.kind is not kind or set(m.axes) != want.axes or m.bytes != size:
        raise illegal(f"{n.text()} is no {kind} of {size} bytes over {sorted(want.axes)}: {m}")


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
            for node in reversed(t.summing(plan.graph, b, p)):
                out.append((op[node, p], after))
                after = op[node, p]
            if len(mine):
                out.append((mine.max(), after))
            for gather in t.gathers.get(b.key, ()):
                if p in plan.graph.nodes[gather].groups:
                    out.append((op[t.updates[p], p], op[gather, p]))
    if t.norm is not None:
        out += [(op[t.norm, p], op[update, p]) for p, update in t.updates.items()]
    return np.array(out, dtype=np.int64).reshape(-1, 2)
