"""Who reads whom inside a stage of the executor, and what crosses stages: read off the plan's graph once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from ir.alloc import AllocList
from ir.classes import node_classes, recomputed
from ir.errors import ErrorKind, PiperError, nearest
from ir.graph import Graph, Node
from ir.ops import Pass
from ir.plan import Plan

EMPTY = AllocList(())


@dataclass(frozen=True)
class Unit:
    """A part of a stage. reads: the units whose outputs it takes, in order; "" is the stage's outside.

    readers: how many take its own. again: the readers that take it when it is made again; again_reads: the units that
    it takes again itself. first, last: in its stage. has_w: whether the plan has a W for it.
    """

    stage: int
    name: str
    reads: tuple[str, ...]
    readers: int
    again: tuple[str, ...]
    again_reads: frozenset[str]
    recomputed: bool
    first: bool
    last: bool
    has_w: bool


@dataclass(frozen=True)
class Wiring:
    """What of a plan all its programs share.

    lists: by node. again: R's, by stage and part. units: by stage and part. ends: the units of a stage that none of it
    reads. outside: how many read what enters it. outer: node → the (node, slot) of another stage that it reads.
    crosses: node → its slot that another stage reads.
    """

    lists: tuple[AllocList, ...]
    again: Mapping[tuple[int, str], AllocList]
    units: Mapping[tuple[int, str], Unit]
    ends: Mapping[int, tuple[str, ...]]
    outside: Mapping[int, int]
    outer: Mapping[int, tuple[int, int]]
    crosses: Mapping[int, int]

    @classmethod
    def of(cls, plan: Plan, lists: Mapping[str, AllocList]) -> Wiring:
        """Raises PiperError (job): a node whose class has no list."""
        g = plan.graph
        found = tuple(EMPTY if n.once else _list(n, c, lists) for n, c in zip(g.nodes, node_classes(g), strict=True))
        again = {(n.stage, n.part): made for n, made in zip(g.nodes, found, strict=True) if n.kind is Pass.R}
        units = {(u.stage, u.name): u for u in _units(g)}
        ends: dict[int, tuple[str, ...]] = defaultdict(tuple)
        outside: Counter[int] = Counter()
        for u in units.values():
            ends[u.stage] += () if u.readers else (u.name,)
            outside[u.stage] += u.reads.count("")
        outer, crosses = {}, {}
        for edge in g.edges:
            src, dst = g.nodes[edge.src], g.nodes[edge.dst]
            if not edge.join and src.kind in (Pass.F, Pass.I) and src.kind is dst.kind and src.stage != dst.stage:
                outer[edge.dst], crosses[edge.src] = (edge.src, edge.slot), edge.slot
        return cls(found, again, units, ends, outside, outer, crosses)


def _units(g: Graph) -> list[Unit]:
    names: dict[int, list[str]] = defaultdict(list)
    for e in g.entries:
        names[e.stage].append(e.name)
    reads: dict[tuple[int, str], list[str]] = defaultdict(list)
    for edge in g.edges:
        src, dst = g.nodes[edge.src], g.nodes[edge.dst]
        if src.kind is Pass.F and dst.kind is Pass.F:
            reads[dst.stage, dst.part].append(src.part if src.stage == dst.stage else "")
    if names[0] and not reads[0, names[0][0]]:
        reads[0, names[0][0]] = [""]  # tokens
    again = recomputed(g)
    with_w = {(n.stage, n.part) for n in g.nodes if n.kind is Pass.W}
    out = []
    for stage, parts in names.items():
        pairs = [(u, r) for u in parts for r in reads[stage, u]]
        tied = {(u, r) for u, r in pairs if {(stage, u), (stage, r)} <= again and _chunk(u) == _chunk(r)}
        for u in parts:
            out.append(
                Unit(
                    stage,
                    u,
                    tuple(reads[stage, u]),
                    sum(r == u for _, r in pairs),
                    tuple(v for v, r in tied if r == u),
                    frozenset(r for v, r in tied if v == u),
                    (stage, u) in again,
                    u == parts[0],
                    u == parts[-1],
                    (stage, u) in with_w,
                )
            )
    return out


def _chunk(part: str) -> str:
    return part.split(".")[0]


def _list(node: Node, name: str, lists: Mapping[str, AllocList]) -> AllocList:
    if name in lists:
        return lists[name]
    fix = "take the lists of this model, with these sizes and formats"
    message = f"no alloc list for {node.text()} ({name})"
    raise PiperError(ErrorKind.JOB, message, key="costs.profile", allowed=nearest(name, lists), suggestion=fix)
