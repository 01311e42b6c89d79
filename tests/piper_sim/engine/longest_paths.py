"""The second computation: when things happen, said again in plain Python and on purpose without the engine's ideas.

`times` follows a plan and durations; `paragraph` follows CONTRACT.md's words on `--p2p-mode` from a schedule's orders
alone, without graph, plan or streams. Both are longest paths, found by going on wherever something can go on.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence

from ir.core.ops import OpToken, ScheduledOp
from ir.plan.plan import OpKind, Plan
from ir.schedules.schedule import Schedule

Cell = tuple[ScheduledOp, ...]


class Stuck(Exception):
    """Nothing can go on, but something is left."""


def times(
    plan: Plan, duration: Sequence[float], buffered: bool, steps: int, carried: Mapping[int, Sequence[int]] = {}
) -> tuple[list[list[float]], list[list[float]]]:
    """(start, end) of every op by step, each the longest way to it. carried: op -> ops of the step before."""
    n = len(plan)
    members: dict[int, list[int]] = {}
    for i in range(n):
        c = int(plan.collective[i])
        if c >= 0:
            members.setdefault(c, []).append(i)
    lanes: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for step in range(steps):
        for i in range(n):
            lanes[f"{plan.program[i]} {plan.shapes[plan.shape[i]].stream}"].append((step, i))
    start: dict[tuple[int, int], float] = {}
    end: dict[tuple[int, int], float] = {}

    def end_of(step: int, i: int) -> float | None:
        """Known once everybody it meets has started."""
        kind, mate = plan.kind[i], int(plan.partner[i])
        if kind == OpKind.COMPUTE:
            return start[step, i] + duration[i]
        if kind == OpKind.SEND and buffered:
            return start[step, i] + duration[i]
        if kind == OpKind.RECV and buffered:
            return max(start[step, i], end[step, mate]) if (step, mate) in end else None
        if mate >= 0:
            send = i if kind == OpKind.SEND else mate
            both = [start.get((step, i)), start.get((step, mate))]
            return None if None in both else max(x for x in both if x is not None) + duration[send]
        group = members.get(int(plan.collective[i]), [i])
        begun = [start[step, j] for j in group if (step, j) in start]
        return max(begun) + duration[group[0]] if len(begun) == len(group) else None

    place, free = dict.fromkeys(lanes, 0), dict.fromkeys(lanes, 0.0)
    moved = True
    while moved:
        moved = False
        for lane, ops in lanes.items():
            while place[lane] < len(ops):
                step, i = ops[place[lane]]
                waits = [(step, int(w)) for w in plan.waits.row(i)]
                waits += [(step - 1, w) for w in carried.get(i, ()) if step]
                if any(w not in end for w in waits):
                    break
                if (step, i) not in start:
                    start[step, i] = max([free[lane], *(end[w] for w in waits)])
                    moved = True
                found = end_of(step, i)
                if found is None:
                    break
                end[step, i] = found
                free[lane] = start[step, i] if buffered and plan.kind[i] == OpKind.SEND else found
                place[lane] += 1
                moved = True
    if len(end) < n * steps:
        raise Stuck(sorted(plan.text(ops[place[lane]][1]) for lane, ops in lanes.items() if place[lane] < len(ops)))
    rows = range(n)
    return ([[x[s, i] for i in rows] for s in range(steps)] for x in (start, end))  # type: ignore[return-value]


def paragraph(
    s: Schedule, seconds: Callable[[Cell], float], p2p: float, rendezvous: bool
) -> list[list[tuple[str, float, float]]]:
    """(text, start, end) of every op by rank, read off CONTRACT.md: orders, who computes what where, and the wire."""
    home = {(stage, m): rank for p in s.placements for stage, rank in enumerate(p.rank_of_stage) for m in p.mbs}
    cells = [_units(o.actions(), o.unit.tolist()) for o in s.orders]
    where = {}
    for r, units in enumerate(cells):
        for k, unit in enumerate(units):
            for a in unit:
                for letter in {"F": "F", "I": "I", "W": "W", "B": "IW"}[a.token.name]:
                    where[letter, a.stage, a.mb] = (r, k)
    net = _Longest()
    posts: dict[tuple[int, int], list[tuple[tuple[int, int], tuple[int, int]]]] = defaultdict(list)
    for r, units in enumerate(cells):
        for k, unit in enumerate(units):
            net.edge(("start", r, k), ("end", r, k), seconds(unit))
            if k:
                net.edge(("end", r, k - 1), ("start", r, k), 0.0)
            for key in _needs(unit, s.stages):
                source = where[key]
                if source[0] == r and source != (r, k):
                    net.edge(("end", *source), ("start", r, k), 0.0)
                elif source[0] != r and not rendezvous:
                    net.edge(("end", *source), ("start", r, k), p2p)
                elif source[0] != r:
                    posts[source[0], r].append(((r, k), source))
            assert all(home[a.stage, a.mb] == r for a in unit)
    for (a, b), messages in posts.items():
        for n, (use, source) in enumerate(sorted(messages)):
            wire = ("wire", a, b, n)
            net.edge(("end", *source), wire, p2p)
            if use[1]:
                net.edge(("start", b, use[1] - 1), wire, p2p)
            if n:
                net.edge(("wire", a, b, n - 1), wire, p2p)
            net.edge(wire, ("start", *use), 0.0)
    found = net.solve()
    return [
        [(_text(u), found.get(("start", r, k), 0.0), found["end", r, k]) for k, u in enumerate(units)]
        for r, units in enumerate(cells)
    ]


def _units(actions: Sequence[ScheduledOp], unit: Sequence[int]) -> list[Cell]:
    out: dict[int, list[ScheduledOp]] = defaultdict(list)
    for a, u in zip(actions, unit, strict=True):
        out[u].append(a)
    return [tuple(v) for v in out.values()]


def _needs(unit: Cell, stages: int) -> list[tuple[str, int, int]]:
    """Results of other ops that an op reads: (pass, stage, microbatch)."""
    out = []
    for a in unit:
        if a.token is OpToken.F and a.stage:
            out.append(("F", a.stage - 1, a.mb))
        if a.token in (OpToken.I, OpToken.B):
            out.append(("F", a.stage, a.mb))
            if a.stage < stages - 1:
                out.append(("I", a.stage + 1, a.mb))
        if a.token is OpToken.W:
            out.append(("I", a.stage, a.mb))
    return out


def _text(unit: Cell) -> str:
    texts = [str(a) for a in unit]
    return texts[0] if len(texts) == 1 else f"({';'.join(texts)})OVERLAP_F_B"


class _Longest:
    """Longest paths from nothing: a point without edges into it is at 0."""

    def __init__(self) -> None:
        self.into: dict[Hashable, list[tuple[Hashable, float]]] = defaultdict(list)
        self.out: dict[Hashable, list[Hashable]] = defaultdict(list)

    def edge(self, a: Hashable, b: Hashable, length: float) -> None:
        """b is at least `length` after a."""
        self.into[b].append((a, length))
        self.out[a].append(b)

    def solve(self) -> dict[Hashable, float]:
        """Every point's time. Raises Stuck on a cycle."""
        left = {b: len(edges) for b, edges in self.into.items()}
        ready = [a for a in self.out if a not in left]
        at: dict[Hashable, float] = {}
        while ready:
            a = ready.pop()
            at[a] = max((at[b] + length for b, length in self.into.get(a, ())), default=0.0)
            for b in self.out.get(a, ()):
                left[b] -= 1
                if not left[b]:
                    ready.append(b)
        if len(at) < len(set(self.into) | set(self.out)):
            raise Stuck(sorted(map(str, left.keys() - at.keys())))
        return at
