"""ZeRO-2 and ZeRO-3 needs: how many gathers and reductions there are depends on the final order, so they are born here."""

from __future__ import annotations

from collections import OrderedDict, defaultdict

import numpy as np

from ir.graph import COMPUTE, Graph, Once
from ir.lower.draft import STEP, Draft
from ir.ops import Pass
from ir.plan import CATEGORIES, OpKind, Shape
from ir.sync import Bucket
from ir.work import CommKind, Message


def cut_nodes(graph: Graph, found: tuple[Bucket, ...]) -> frozenset[int]:
    """Nodes before which compute must not coalesce: where a ZeRO-3 chunk begins, its weights must have arrived."""
    gathered = [b for b in found if b.replica.zero == 3 and b.ranks > 1]
    if not gathered:
        return frozenset()
    chunk = {(graph.entries[k].stage, graph.entries[k].name): b.key for b in gathered for k in b.members}
    cuts = set()
    before: dict[tuple[int, object], str | None] = {}
    for i, n in enumerate(graph.nodes):
        if isinstance(n.kind, Pass) and n.stream == COMPUTE:
            direction = n.kind is Pass.F
            mine = chunk.get((n.stage, n.part))
            if before.get((n.stage, direction)) != mine:
                cuts.add(i)
            before[n.stage, direction] = mine
    return frozenset(cuts)


def zero_rows(draft: Draft, found: tuple[Bucket, ...]) -> None:
    """Add the reductions after each microbatch's W (zero >= 2) and the gathers before each use (zero 3)."""
    sharded = [b for b in found if b.replica.zero >= 2 and b.ranks > 1]
    if not sharded or draft.graph.source is None:
        return
    reduce_bytes, gather_bytes = draft.graph.source.sync_bytes()
    tail: dict[int, list[int]] = defaultdict(list)
    for b in sharded:
        _reductions(draft, b, reduce_bytes, tail)
    gathered = [b for b in sharded if b.replica.zero == 3]
    for p in range(len(draft.start) - 1):
        _gathers(draft, p, [b for b in gathered if p in b.owners], gather_bytes)
    for p, rows in tail.items():
        for (node, program), row in draft.once_rows.items():
            if program == p and draft.graph.nodes[node].kind in (Once.NORM, Once.UPDATE):
                draft.wait(np.full(len(rows), row), np.array(rows, dtype=np.int64))


def _weight_nodes(draft: Draft, b: Bucket) -> list[int]:
    parts = {(draft.graph.entries[k].stage, draft.graph.entries[k].name) for k in b.members}
    return [i for i, n in enumerate(draft.graph.nodes) if n.kind is Pass.W and (n.stage, n.part) in parts]


def _reductions(draft: Draft, b: Bucket, element: int, tail: dict[int, list[int]]) -> None:
    """One reduce-scatter per microbatch, behind the bucket's last W; its full-size gradient lives from W to there."""
    rows = draft.rows
    ws = _weight_nodes(draft, b)
    if not ws:
        return
    inst = draft.inst[ws]
    first, last = inst.min(axis=0), inst.max(axis=0)
    message = Message(CommKind.REDUCE_SCATTER, b.shard * b.ranks * element, b.axes)
    shape = draft.shape(Shape(OpKind.COLLECTIVE, b.replica.reduce_stream, f"{b.stage}RS*/{b.name}", message=message))
    mbs = np.arange(draft.graph.mbs)
    order = np.lexsort((last, rows.program[last]))
    mbs, first, last = mbs[order], first[order], last[order]
    key = draft.local(last) * STEP + STEP // 2 - 1
    ids = rows.extend(program=rows.program[last], shape=np.full(len(mbs), shape), mb=mbs, key=key, sub=np.arange(len(mbs)))
    draft.wait(ids, last)
    for p in b.owners:
        mine = np.flatnonzero(rows.program[last] == p)
        tail[p] += ids[mine].tolist()
        free = np.full(len(mine), -1, dtype=np.int64)
        free[:-1] = first[mine[1:]]  # the next microbatch's W reuses the bucket, and waits for its reduction
        draft.wait(free[:-1], ids[mine[:-1]])
        update = next(r for (n, q), r in draft.once_rows.items() if q == p and draft.graph.nodes[n].kind is Once.UPDATE)
        free[-1:] = update
        _buffer(draft, alloc=first[mine], name=ids[mine], free=free, size=b.numel * element)


def _gathers(draft: Draft, p: int, found: list[Bucket], element: int) -> None:
    """Gathers of one program: a bucket stays until `prefetch + 1` others have pushed it out."""
    if not found:
        return
    graph, rows = draft.graph, draft.rows
    of: dict[int, list[Bucket]] = defaultdict(list)
    for b in found:
        parts = {(graph.entries[k].stage, graph.entries[k].name) for k in b.members}
        for i, n in enumerate(graph.nodes):
            if isinstance(n.kind, Pass) and n.stream == COMPUTE and (n.stage, n.part) in parts:
                of[i].append(b)
    uses: list[tuple[int, Bucket]] = []
    for row in range(int(draft.start[p]), int(draft.start[p + 1])):
        shape = draft.templates.shapes[int(rows.shape[row])]
        if shape.kind is OpKind.COMPUTE:
            seen = {b.key: b for node, _ in shape.covers for b in of.get(node, ())}
            uses += [(row, b) for b in seen.values()]
    resident: OrderedDict[str, list[int]] = OrderedDict()  # key -> [gather row, last use]
    budget = max(graph.prefetch + 1, 1)
    wide = max((sum(1 for r, _ in uses if r == row) for row in {r for r, _ in uses[:64]}), default=1)
    evicted: list[tuple[list[int], Bucket, int]] = []
    named = {b.key: b for b in found}
    for k, (row, b) in enumerate(uses):
        if b.key not in resident:
            while len(resident) >= max(budget, wide):
                old, state = resident.popitem(last=False)
                evicted.append((state, named[old], row))
            early = uses[max(0, k - graph.prefetch)][0]
            resident[b.key] = [_gather(draft, p, b, row, early, element), row]
            draft.wait(np.array([row]), np.array([resident[b.key][0]]))
        resident.move_to_end(b.key)
        resident[b.key][1] = row
    evicted += [(state, named[key], -1) for key, state in resident.items()]
    for (gather, last), b, _ in evicted:
        one = np.array([gather])
        _buffer(draft, alloc=one, name=one, free=np.array([last]), size=b.shard * b.ranks * element)


def _gather(draft: Draft, p: int, b: Bucket, row: int, early: int, element: int) -> int:
    rows = draft.rows
    user = draft.graph.nodes[draft.templates.shapes[int(rows.shape[row])].covers[0][0]]
    way = "F" if user.kind is Pass.F else str(user.kind)
    message = Message(CommKind.ALL_GATHER, b.shard * b.ranks * element, b.axes)
    text = f"{b.stage}AG_{way}*/{b.name}"
    shape = draft.shape(Shape(OpKind.COLLECTIVE, b.replica.gather_stream, text, message=message))
    key = (early - int(draft.start[p])) * STEP - STEP // 2
    one = np.ones(1, dtype=np.int64)
    ids = rows.extend(program=one * p, shape=one * shape, mb=rows.mb[row : row + 1], key=one * key, sub=one * row)
    return int(ids[0])


def _buffer(draft: Draft, *, alloc: np.ndarray, name: np.ndarray, free: np.ndarray, size: int) -> None:  # type: ignore[type-arg]
    """A buffer called after the communication op `name` that makes or empties it."""
    n = len(alloc)
    zero = np.zeros(n, dtype=np.int64)
    draft.buffers.append(
        dict(
            node=np.full(n, -1),
            slot=name,
            mb=draft.rows.mb[name],
            bytes=np.full(n, size),
            alloc=alloc,
            alloc_cover=zero,
            free=free,
            free_cover=zero,
            category=np.full(n, CATEGORIES.index("buffers")),
        )
    )
