"""ZeRO-2 and ZeRO-3 needs: how many gathers and reductions there are depends on the final order: they are born here."""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ir.core.ops import Pass
from ir.core.order import IntArray
from ir.graph.graph import PerStepOp
from ir.graph.sync import Bucket
from ir.graph.zero import gathered, part_nodes, per_microbatch
from ir.lower.plan_builder import STEP, PlanBuilder
from ir.plan.names import gather_shape, reduction_shape
from ir.plan.plan import AT_START, CATEGORIES, OpKind, OpShape


def zero_rows(draft: PlanBuilder, found: tuple[Bucket, ...]) -> None:
    """Add the reductions after each microbatch's W (zero >= 2) and the gathers before each use (zero 3)."""
    sharded = per_microbatch(found)
    if not sharded or draft.graph.source is None:
        return
    reduce_bytes, gather_bytes = draft.graph.source.sync_bytes()
    nodes = draft.graph.nodes
    after: dict[int, list[tuple[int, Bucket | None]]] = defaultdict(list)
    updates: dict[int, int] = {}
    for (i, p), row in draft.once_rows.items():
        if nodes[i].kind is PerStepOp.UPDATE:
            updates[p] = row
        if nodes[i].kind in (PerStepOp.NORM, PerStepOp.UPDATE):
            after[p].append((row, None))
        elif nodes[i].kind is PerStepOp.ALL_REDUCE:
            after[p] += [(row, b) for b in sharded if b.key == nodes[i].bucket]
    pools = {p: _opens(draft, [b for b in sharded if p in b.owners], p) for p in updates}
    for b in sharded:
        for p in b.owners:
            made = _reductions(draft, b, p, reduce_bytes, updates[p], pools[p])
            for row, only in after[p]:
                if only in (None, b):
                    draft.wait(np.full(len(made), row), made)
    users = gathered(draft.graph, found)
    if users:
        for p in range(len(draft.start) - 1):
            _Gathers(draft, p, users, gather_bytes).run()


def _opens(draft: PlanBuilder, sharded: list[Bucket], p: int) -> IntArray:
    """The base rows of a program at which a whole gradient begins, in order: one for each bucket and microbatch.

    Behind them, and for a microbatch of other programs: a row behind all.
    """
    found, none = list[IntArray](), len(draft.rows)
    for b in sharded:
        inst = draft.inst[part_nodes(draft.graph, b, frozenset({Pass.W}))]
        found.append(np.where(draft.rows.program[inst] == p, inst, none).min(axis=0))
    return np.sort(np.concatenate([*found, [none]]))


def _reductions(draft: PlanBuilder, b: Bucket, p: int, element: int, update: int, pool: IntArray) -> IntArray:
    """One reduce-scatter per microbatch, behind the bucket's last W here; its whole gradient lives from the first W on.

    The next microbatch's W waits for the reduction, so that one whole gradient is alive, not two; and so does the W
    that begins the `prefetch + 1`-st whole gradient behind this one, whichever bucket's it is.
    """
    rows = draft.rows
    ws = np.array(part_nodes(draft.graph, b, frozenset({Pass.W})), dtype=np.int64)
    inst = draft.inst[ws]
    mine = rows.program[inst] == p
    mbs = np.flatnonzero(mine.any(axis=0))
    last = (inst * mine)[:, mbs].max(axis=0)
    mbs = mbs[np.argsort(last, kind="stable")]
    last = np.sort(last)
    scale = 1 + int(draft.cover.max(initial=0))
    opens = np.where(mine, inst * scale + draft.cover[ws], np.iinfo(np.int64).max)[:, mbs].min(axis=0)
    first, alloc_cover = opens // scale, opens % scale
    shape = draft.templates.add(reduction_shape(b, element))
    one = np.ones(len(mbs), dtype=np.int64)
    key = draft.local(last) * STEP + STEP // 2 - 1
    ids = rows.extend(program=one * p, shape=one * shape, mb=mbs, key=key)
    draft.wait(ids, last)
    begins = np.sort(first)
    at = np.searchsorted(begins, last, side="right")
    free = np.append(begins, update)[at]
    room = np.searchsorted(pool, first, side="right") + max(draft.graph.prefetch, 0)
    room = np.maximum(room, np.searchsorted(pool, last, side="right"))
    free = np.minimum(free, pool[np.minimum(room, len(pool) - 1)])
    draft.wait(free, ids)
    _buffers(
        draft,
        alloc=first,
        alloc_cover=alloc_cover,
        name=ids,
        free=free,
        free_cover=one * AT_START,
        size=b.numel * element,
    )
    return ids


@dataclass
class _Copy:
    """Gathered weights while they stay: which gather of its program, the last row that used them and its cover."""

    gather: int
    size: int
    last: int
    cover: int


class _Gathers:
    """Gathers of one program: a bucket stays until others push it out; `prefetch + 1` may be there at a time."""

    def __init__(self, draft: PlanBuilder, program: int, users: Mapping[int, list[Bucket]], element: int) -> None:
        self.draft, self.program, self.users, self.element = draft, program, users, element
        self.prefetch = 0 if draft.policy.gather_on_demand else max(draft.graph.prefetch, 0)
        self.start = int(draft.start[program])
        self.here: OrderedDict[str, _Copy] = OrderedDict()
        self.gone: list[_Copy] = []
        self.again: Counter[tuple[str, Pass, int]] = Counter()
        self.front = 0  # no gather is dispatched before this row: there is no room
        self.uses: list[int] = []
        self.made: list[tuple[int, int, int, int]] = []  # shape, microbatch, row it is dispatched before, row it is for

    def run(self) -> None:
        """Walk the program's rows, gather what is not there, and free what was pushed out at its last use."""
        draft, rows = self.draft, self.draft.rows
        wants = [self._wanted(s) if s.kind is OpKind.COMPUTE else [] for s in draft.templates.shapes]
        end = int(draft.start[self.program + 1])
        columns = (rows.shape[self.start : end], rows.mb[self.start : end], rows.mb2[self.start : end])
        for row, (shape, mb, mb2) in enumerate(zip(*(c.tolist() for c in columns), strict=True), self.start):
            if wants[shape]:
                self._use(row, (mb, mb2), wants[shape])
        if self.made:
            self._add()

    def _add(self) -> None:
        """All gathers at once, with their waits and buffers."""
        draft = self.draft
        shape, mb, before, row = np.array(self.made, dtype=np.int64).T
        one = np.ones(len(row), dtype=np.int64)
        # What nobody foresaw is waited for: it goes ahead of the reductions that are ready at the same time.
        key = (before - self.start) * STEP - STEP // 2 - (2 if self.prefetch == 0 else 0)
        ids = draft.rows.extend(program=one * self.program, shape=shape, mb=mb, key=key, sub=row)
        draft.wait(row, ids)
        copies = [*self.gone, *self.here.values()]
        gather, size, last, cover = np.array([(c.gather, c.size, c.last, c.cover) for c in copies], dtype=np.int64).T
        alloc, zero = ids[gather], np.zeros(len(copies), dtype=np.int64)
        _buffers(draft, alloc=alloc, alloc_cover=zero, name=alloc, free=last, free_cover=cover, size=size)

    def _wanted(self, shape: OpShape) -> list[tuple[Bucket, int, int, Pass]]:
        """(bucket, last cover that reads it, its member, pass) of one op."""
        out: dict[str, tuple[Bucket, int, int, Pass]] = {}
        for c, (node, member) in enumerate(shape.covers):
            for b in self.users.get(node, ()):
                way = out[b.key][3] if b.key in out else Pass(self.draft.graph.nodes[node].kind)
                out[b.key] = (b, c, member, way)
        return list(out.values())

    def _use(self, row: int, mbs: tuple[int, int], wanted: list[tuple[Bucket, int, int, Pass]]) -> None:
        keys = {b.key for b, _, _, _ in wanted}
        for b, cover, member, way in sorted(wanted, key=lambda w: w[0].key not in self.here):
            self.uses.append(row)
            if b.key not in self.here:
                while len(self.here) > max(self.prefetch, len(keys) - 1):
                    self.gone.append(self.here.popitem(last=False)[1])  # those this op needs lie behind it
                    self.front = max(self.front, self.gone[-1].last + 1)
                self.front = max(self.front, self.uses[max(0, len(self.uses) - 1 - self.prefetch)])
                self.here[b.key] = self._gather(b, way, mbs[member], row, cover)
            self.here.move_to_end(b.key)
            self.here[b.key].last, self.here[b.key].cover = row, cover

    def _gather(self, b: Bucket, way: Pass, mb: int, row: int, cover: int) -> _Copy:
        again = self.again[b.key, way, mb]
        self.again[b.key, way, mb] += 1
        shape = self.draft.templates.add(gather_shape(b, way, again, self.element))
        self.made.append((shape, mb, self.front, row))
        return _Copy(len(self.made) - 1, b.shard * b.ranks * self.element, row, cover)


def _buffers(draft: PlanBuilder, *, name: IntArray, size: IntArray | int, **times: IntArray) -> None:
    """Buffers called after the communication ops `name` that make or empty them."""
    n = len(name)
    draft.buffers.append(
        dict(
            node=np.full(n, -1),
            slot=name,
            mb=draft.rows.mb[name],
            bytes=np.broadcast_to(np.asarray(size, dtype=np.int64), (n,)),
            category=np.full(n, CATEGORIES.index("buffers")),
            **times,
        )
    )
