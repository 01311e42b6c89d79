"""Piper's `order` rows of filters, completed by dataflow into one full order per program."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from ir.core.errors import directive_error
from ir.core.filters import DirectiveFilter
from ir.core.ops import OpToken, Pass, ScheduledOp, cell_text
from ir.core.order import Order
from ir.directives.select import select
from ir.graph.graph import COMPUTE, Graph, illegal

Row = Sequence[Sequence[DirectiveFilter]]
_TOKENS = {
    "F": (OpToken.F,),
    "I": (OpToken.I,),
    "BI": (OpToken.I,),
    "W": (OpToken.W,),
    "BW": (OpToken.W,),
    "B": (OpToken.B,),
}
# What runs first when several actions are ready: backward before forward keeps memory low.
_RANK = {OpToken.B: 0, OpToken.I: 0, OpToken.F: 1, OpToken.W: 2}


def orders_from_rows(graph: Graph, rows: Sequence[Row], who: str = "order") -> dict[int, Order]:
    """Full orders of every program that runs anything.

    rows: each a chain of filter groups on one program. Actions that no row names run when their data is there.
    Raises PiperError: a filter that names part of a stage or nothing (directive); a row that crosses programs
    (directive); rows that close a cycle with the data (illegal_plan).
    """
    chains = [[_members(graph, group, who) for group in row] for row in rows]
    named = [a for c in chains for g in c for acts in g for a in acts]
    split = {(a.stage, a.mb) for a in named if a.token in (OpToken.I, OpToken.W)}
    if both := next((a for a in named if a.token is OpToken.B and (a.stage, a.mb) in split), None):
        half = str(ScheduledOp(both.stage, OpToken.I, both.mb)), str(ScheduledOp(both.stage, OpToken.W, both.mb))
        raise directive_error(
            f"{who}: {both} is ordered whole and in halves", fix=f"either {both}, or {half[0]} and {half[1]}"
        )
    home = homes(graph)
    if lost := next((a for a in named if (a.stage, a.mb) not in home), None):
        raise illegal(f"{who}: {lost} is placed nowhere", f'place({{"PP": {lost.stage}}}, …)')
    units: list[tuple[ScheduledOp, ...]] = []
    of: dict[ScheduledOp, int] = {}
    after: list[tuple[int, int]] = []
    barrier: set[int] = set()
    for chain in chains:
        programs = {home[a.stage, a.mb] for g in chain for acts in g for a in acts}
        if len(programs) > 1:
            raise directive_error(
                f"{who}: a row names actions of programs {sorted(programs)}",
                fix="one row per program; data edges order programs among each other",
            )
        before: list[int] = []
        for group in chain:
            new = [tuple(a for acts in group for a in acts)] if len(group) > 1 else [(a,) for a in group[0]]
            ids = [_add(units, of, u, who) for u in new]
            gate = len(units)
            units.append(())
            barrier.add(gate)
            after += [(b, i) for b in before for i in ids] + [(i, gate) for i in ids]
            before = [gate]
    for (stage, mb), _ in sorted(home.items()):
        tokens = (OpToken.F, OpToken.I, OpToken.W) if (stage, mb) in split else (OpToken.F, OpToken.B)
        for token in tokens:
            if ScheduledOp(stage, token, mb) not in of:
                _add(units, of, (ScheduledOp(stage, token, mb),), who)
    after += _dataflow(graph, units, of)
    return _dry_run(units, after, home, graph.programs, barrier, who)


def homes(graph: Graph) -> dict[tuple[int, int], int]:
    """The program of each (stage, microbatch)."""
    out: dict[tuple[int, int], int] = {}
    for node in graph.nodes:
        if node.kind is Pass.F and not all((node.stage, s.mbs.start) in out for s in node.spans if s.mbs):
            out.update(((node.stage, m), s.group) for s in node.spans for m in s.mbs or ())
    return out


def _members(graph: Graph, group: Sequence[DirectiveFilter], who: str) -> list[list[ScheduledOp]]:
    members = [_actions(graph, f, who) for f in group]
    if len(members) > 1 and any(len(m) != 1 for m in members):
        raise directive_error(
            f"{who}: an interleave group needs filters of one action each: {'; '.join(map(str, group))}",
            fix="name PP, MB and PASS in each",
        )
    return members


def _actions(graph: Graph, f: DirectiveFilter, who: str) -> list[ScheduledOp]:
    hits = {i for i in select(graph, f, who) if graph.nodes[i].stream == COMPUTE}
    stages = sorted({graph.nodes[i].stage for i in hits})
    whole = f.passes is None
    passes = f.passes or tuple(Pass)
    for i, n in enumerate(graph.nodes):
        if n.stream == COMPUTE and n.stage in stages and n.kind in passes and i not in hits:
            raise directive_error(
                f"{who}: {f} names a part of stage {n.stage} ({n.text()} is outside)",
                fix='order whole stages: {"PP": …, "MB": …, "PASS": …}; cut stages finer with `parallel.layers`',
            )
    text = None if whole else str(dict(f.json())["PASS"])
    tokens = (OpToken.F, OpToken.B) if text is None else _TOKENS[text]
    mbs = [m for r in f.microbatches(graph.dim, graph.mbs) for m in r]
    return [ScheduledOp(s, t, m) for t in tokens for m in mbs for s in stages]


def _add(
    units: list[tuple[ScheduledOp, ...]], of: dict[ScheduledOp, int], unit: tuple[ScheduledOp, ...], who: str
) -> int:
    for a in unit:
        if a in of:
            why = f"{who}: {a} is ordered twice"
            raise directive_error(why, "once", "name it once")
        of[a] = len(units)
    units.append(unit)
    return len(units) - 1


def _dataflow(graph: Graph, units: list[tuple[ScheduledOp, ...]], of: dict[ScheduledOp, int]) -> list[tuple[int, int]]:
    ends = [(graph.nodes[e.src], graph.nodes[e.dst]) for e in graph.edges]
    pairs = {(a.stage, _letter(a.kind), b.stage, _letter(b.kind)) for a, b in ends if not a.once and not b.once}
    into: dict[tuple[int, OpToken], set[tuple[int, OpToken]]] = defaultdict(set)
    for s, made, t, wanted in pairs:
        if (s, made) != (t, wanted):
            into[t, wanted].add((s, made))
    out = []
    for i, unit in enumerate(units):
        for act in unit:
            for half in (OpToken.I, OpToken.W) if act.token is OpToken.B else (act.token,):
                for stage, needed in into[act.stage, half]:
                    src = of.get(ScheduledOp(stage, needed, act.mb), of.get(ScheduledOp(stage, OpToken.B, act.mb)))
                    if src is not None and src != i:
                        out.append((src, i))
    return out


def _letter(kind: object) -> OpToken:
    return {Pass.F: OpToken.F, Pass.R: OpToken.I, Pass.I: OpToken.I, Pass.W: OpToken.W}[Pass(str(kind))]


def _dry_run(
    units: list[tuple[ScheduledOp, ...]],
    after: Iterable[tuple[int, int]],
    home: dict[tuple[int, int], int],
    programs: int,
    barrier: set[int],
    who: str,
) -> dict[int, Order]:
    """One unit of time per action: every program takes the first unit that is ready."""
    readers: list[list[int]] = [[] for _ in units]
    left = [0] * len(units)
    for a, b in after:
        readers[a].append(b)
        left[b] += 1
    ready: list[list[tuple[tuple[int, int, int], int]]] = [[] for _ in range(programs)]
    cells: list[list[str]] = [[] for _ in range(programs)]
    done = 0

    def release(i: int) -> None:
        nonlocal done
        if i in barrier:
            done += 1
            settle(i)
        else:
            a = units[i][0]
            heappush(ready[home[a.stage, a.mb]], ((_RANK[a.token], a.mb, a.stage), i))

    def settle(i: int) -> None:
        for j in readers[i]:
            left[j] -= 1
            if not left[j]:
                release(j)

    for i in [i for i in range(len(units)) if not left[i]]:
        release(i)
    while any(ready):
        now = [heappop(heap)[1] for heap in ready if heap]
        for i in now:
            first = units[i][0]
            cells[home[first.stage, first.mb]].append(cell_text(units[i]))
        done += len(now)
        for i in now:
            settle(i)
    if done < len(units):
        stuck = [cell_text(units[i]) for i in range(len(units)) if left[i] and i not in barrier]
        raise illegal(
            f"{who}: the rows and the data edges close a cycle; none of {', '.join(stuck[:8])} can come first",
            "swap the rows so that each action stands behind what it needs",
        )
    return {p: Order.of(c) for p, c in enumerate(cells) if c}
