"""Rows that exist once per step: each behind its last contribution, collectives in one order for all programs."""

import numpy as np

from ir.core.order import IntArray
from ir.graph.graph import Graph
from ir.lower.plan_builder import STEP, PlanBuilder
from ir.lower.template import TAIL
from ir.plan.names import node_shape


def once_rows(draft: PlanBuilder) -> None:
    """Add a row per once-node and member program, with the waits for what it joins."""
    graph, new = draft.graph, _New(draft)
    groups = {i: n.groups for i, n in enumerate(graph.nodes) if n.once}
    sources, latest = _sources(graph), _latest(draft)
    reductions = [i for i in groups if graph.nodes[i].kind not in TAIL]
    first = {i: next((s for s in sources[i] if s in groups), i) for i in reductions}
    last = {(i, p): latest[first[i]][p] for i in reductions for p in groups[i]}
    end = [int(n) for n in np.diff(draft.start)]
    front = [(n - 1) * draft.policy.reduce_behind for n in end]
    for rank, i in enumerate(canonical(draft, groups, first, last)):
        members, contributions, shape = [], [], draft.templates.add(node_shape(graph, i))
        for p in groups[i]:
            own = last[i, p]
            front[p] = max(front[p], own)
            members.append(new.row(i, p, shape, front[p] * STEP + STEP // 2, rank, own))
            if first[i] != i:
                draft.further.append((members[-1], draft.once_rows[first[i], p]))
            contributions.append(new.start[p] + own)
        draft.reductions.append((members, contributions))
        new.meet(members)
    for rank, kind in enumerate(TAIL):
        for i in [i for i in groups if graph.nodes[i].kind is kind]:
            members, shape = [], draft.templates.add(node_shape(graph, i))
            for p in groups[i]:
                members.append(new.row(i, p, shape, (end[p] + rank) * STEP, i, latest[i][p]))
                before = [draft.once_rows[s, p] for s in sources[i] if (s, p) in draft.once_rows]
                new.waits += [(members[-1], b) for b in before]
            new.meet(members)
    new.waits += draft.further
    new.add()


class _New:
    """Rows to be added, all at once."""

    def __init__(self, draft: PlanBuilder) -> None:
        self.draft, self.first, self.start = draft, len(draft.rows), draft.start.tolist()
        self.rows: list[tuple[int, int, int, int]] = []  # program, shape, key, sub
        self.waits: list[tuple[int, int]] = []

    def row(self, node: int, program: int, shape: int, key: int, sub: int, own: int) -> int:
        """The row of one member, which waits for its program's last contribution (a local position; -1: none)."""
        row = self.first + len(self.rows)
        self.rows.append((program, shape, key, sub))
        self.draft.once_rows[node, program] = row
        if own >= 0:
            self.waits.append((row, self.start[program] + own))
        return row

    def meet(self, members: list[int]) -> None:
        """Members on several programs meet; equal replicas inside one program are folded and need no meeting."""
        if len(members) > 1:
            self.draft.collectives.append(members)

    def add(self) -> None:
        """Append the rows."""
        program, shape, key, sub = np.array(self.rows, dtype=np.int64).reshape(len(self.rows), 4).T
        self.draft.rows.extend(program=program, shape=shape, key=key, sub=sub)
        row, on = np.array(self.waits, dtype=np.int64).reshape(len(self.waits), 2).T
        self.draft.wait(row, on)


def canonical(
    draft: PlanBuilder, groups: dict[int, tuple[int, ...]], first: dict[int, int], last: dict[tuple[int, int], int]
) -> list[int]:
    """One order of collectives for all programs: by the latest last contribution over the owners, owners, chunk.

    How late a contribution is, is counted in units to its program's end, which all programs reach together; within one,
    by the first owner's ops. Each owner has a gradient of each of its buckets.

    groups: of each node. first: of each collective the one that it sums further, behind which it stands, or itself.
    """
    unit, start = draft.rows.unit.tolist(), draft.start.tolist()
    ends = [unit[e - 1] for e in start[1:]]

    def place(i: int) -> tuple[int, tuple[int, ...], int, int]:
        slack = min(ends[p] - unit[start[p] + last[i, p]] for p in groups[i])
        return -slack, groups[i], last[i, groups[i][0]], i  # within a unit: as they are whole

    return sorted(first, key=lambda i: (place(first[i]), i))


def _sources(graph: Graph) -> list[list[int]]:
    out: list[list[int]] = [[] for _ in graph.nodes]
    for src, dst, _ in graph.ends[graph.joins].tolist():
        out[dst].append(src)
    return out


def _latest(draft: PlanBuilder) -> list[list[int]]:
    """[node][program] local position of the last base row there that contributes to it, -1 if none does."""
    inst, programs = draft.inst, len(draft.start) - 1
    row, node = inst[inst >= 0], np.nonzero(inst >= 0)[0]
    own = np.full((len(inst), programs), -1, dtype=np.int64)
    np.maximum.at(own, (node, draft.rows.program[row]), draft.local(row))
    out = np.full_like(own, -1)
    src, dst, _ = draft.graph.ends[draft.graph.joins].T
    np.maximum.at(out, dst, own[src])
    found: list[list[int]] = out.tolist()
    return found


def collective_ids(draft: PlanBuilder) -> IntArray:
    """The collective of each row, -1 for none."""
    out = np.full(len(draft.rows), -1, dtype=np.int64)
    for c, members in enumerate(draft.collectives):
        out[members] = c
    return out
