"""Who reads whom inside a stage of the executor, and what crosses stages: read off the plan's graph once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from ir.core.alloc import AllocList
from ir.core.errors import ErrorKind, PiperError, nearest
from ir.core.ops import Pass
from ir.graph import expert_rows
from ir.graph.classes import node_classes, recomputed
from ir.graph.expert_rows import spread_over
from ir.graph.graph import Graph, Node
from ir.plan.plan import Plan

EMPTY = AllocList(())


@dataclass(frozen=True)
class Unit:
    """A part of a stage. reads: the units whose outputs it takes, in order, or what else is read by name: a port (some
    of a unit's outputs), or an exchange (what it brings). "" is the stage's outside.

    ports: by name, which of its outputs; none: all under its own. readers: of each port; again: those that take it when
    it is made again; again_reads: what it takes again itself. first, last: in its stage. has_w: whether the plan has a
    W for it.
    """

    stage: int
    name: str
    reads: tuple[str, ...]
    ports: Mapping[str, tuple[int, ...]]
    readers: Mapping[str, int]
    again: Mapping[str, int]
    again_reads: frozenset[str]
    recomputed: bool
    first: bool
    last: bool
    has_w: bool

    def ported(self, outs: int) -> Mapping[str, tuple[int, ...]]:
        """Under which names its outputs are read, so many of them."""
        return self.ports or {self.name: tuple(range(outs))}


@dataclass(frozen=True)
class Wiring:
    """What of a plan all its programs share.

    lists: by node. again: R's, by stage and part. units: by stage and part. ends: the units of a stage that none of it
    reads. outside: how many read what enters it. outer: node → the (node, slot) of another stage that it reads.
    crosses: node → its slot that another stage reads. brought: node → the exchanges, as nodes, whose rows it reads.
    makers: (stage, port or exchange) → the unit that it comes from.
    """

    lists: tuple[AllocList, ...]
    again: Mapping[tuple[int, str], AllocList]
    units: Mapping[tuple[int, str], Unit]
    ends: Mapping[int, tuple[str, ...]]
    outside: Mapping[int, int]
    outer: Mapping[int, tuple[int, int]]
    crosses: Mapping[int, int]
    brought: Mapping[int, tuple[int, ...]]
    makers: Mapping[tuple[int, str], str]

    @classmethod
    def of(cls, plan: Plan, lists: Mapping[str, AllocList]) -> Wiring:
        """Raises PiperError (job): a node whose class has no list."""
        g = plan.graph
        listed = zip(g.nodes, node_classes(g), strict=True)
        found = tuple(EMPTY if n.once or n.message is not None else _list(n, c, lists) for n, c in listed)
        again = {(n.stage, n.part): made for n, made in zip(g.nodes, found, strict=True) if n.kind is Pass.R}
        units = {(u.stage, u.name): u for u in _units(g)}
        ends: dict[int, tuple[str, ...]] = defaultdict(tuple)
        outside: Counter[int] = Counter()
        for u in units.values():
            ends[u.stage] += () if any(u.readers.values()) else (u.name,)
            outside[u.stage] += u.reads.count("")
        outer, crosses = {}, {}
        brought: dict[int, tuple[int, ...]] = defaultdict(tuple)
        for edge in g.edges:
            src, dst = g.nodes[edge.src], g.nodes[edge.dst]
            if not edge.join and src.kind in (Pass.F, Pass.I) and src.kind is dst.kind and src.stage != dst.stage:
                outer[edge.dst], crosses[edge.src] = (edge.src, edge.slot), edge.slot
            if not src.once and src.message is not None and dst.message is None:
                brought[edge.dst] += (edge.src,)
        makers = {(u.stage, port): u.name for u in units.values() for port in u.ports}
        return cls(found, again, units, ends, outside, outer, crosses, brought, makers)


def _units(g: Graph) -> list[Unit]:
    names: dict[int, list[str]] = defaultdict(list)
    ports: dict[str, Mapping[str, tuple[int, ...]]] = {}
    reads, carried, spread = _reads(g), dict[str, str](), spread_over(g)
    for e in g.entries:
        names[e.stage].append(e.name)
        if e.chunk.name in spread and e.part.name == "router":
            ports[e.name] = expert_rows.ports(e.chunk.name, shared="shared" in {p.name for p in e.chunk.parts})
            carried |= {f"{e.chunk.name}.{x}": f"{e.chunk.name}.{port}" for x, port in expert_rows.CARRIES.items()}
    if names[0] and not reads[0, names[0][0]]:
        reads[0, names[0][0]] = [""]  # tokens
    makers = {port: unit for unit, found in ports.items() for port in found}
    makers |= {x: makers.get(port, port) for x, port in carried.items()}
    again = recomputed(g)
    with_w = {(n.stage, n.part) for n in g.nodes if n.kind is Pass.W}
    out = []
    for stage, parts in names.items():
        pairs = [(u, r) for u in parts for r in reads[stage, u]]
        through = [
            (next((u for u, r in pairs if r == x), ""), port) for x, port in carried.items() if makers[x] in parts
        ]
        every = [*pairs, *through]
        tied = [(u, r) for u, r in every if {(stage, u), (stage, makers.get(r, r))} <= again and _chunk(u) == _chunk(r)]
        for u in parts:
            named = ports.get(u, (u,))
            out.append(
                Unit(
                    stage,
                    u,
                    tuple(reads[stage, u]),
                    ports.get(u, {}),
                    {port: sum(r == port for _, r in every) for port in named},
                    {port: sum(r == port for _, r in tied) for port in named},
                    frozenset(r for v, r in tied if v == u and r in reads[stage, u]),
                    (stage, u) in again,
                    u == parts[0],
                    u == parts[-1],
                    (stage, u) in with_w,
                )
            )
    return out


def _reads(g: Graph) -> dict[tuple[int, str], list[str]]:
    """What every part reads, by stage and name."""
    out: dict[tuple[int, str], list[str]] = defaultdict(list)
    for edge in g.edges:
        src, dst = g.nodes[edge.src], g.nodes[edge.dst]
        if src.kind is Pass.F and dst.kind is Pass.F:
            out[dst.stage, dst.part].append(src.part if src.stage == dst.stage else "")
    spread = spread_over(g)
    for e in g.entries:
        if e.chunk.name in spread and e.part.name in expert_rows.READS:
            found = expert_rows.reads(e.part.name, e.part.inputs)
            out[e.stage, e.name] = [f"{e.chunk.name}.{r}" for r in found]
    return out


def _chunk(part: str) -> str:
    return part.split(".")[0]


def _list(node: Node, name: str, lists: Mapping[str, AllocList]) -> AllocList:
    if name in lists:
        return lists[name]
    fix = "take the lists of this model, with these sizes and formats"
    message = f"no alloc list for {node.text()} ({name})"
    raise PiperError(ErrorKind.JOB, message, key="costs.profile", allowed=nearest(name, lists), suggestion=fix)
