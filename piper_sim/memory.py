"""Memory of a plan, from its buffers in host dispatch order. No formula: every byte is a buffer someone wrote."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from cost_models import Recipe, StateBytes, state_bytes
from ir.order import BoolArray, FloatArray, IntArray
from ir.plan import AT_START, CATEGORIES, OpKind, Plan
from ir.sync import buckets
from ir.trace import MemorySamples

WORKSPACE = len(CATEGORIES)
_COLUMNS = (*CATEGORIES, "workspace")


@dataclass(frozen=True, eq=False)
class Memory:
    """Bytes over one step. peak: per program, all that is allocated; at: the op that makes the peak.

    dynamic: [program, column] at the peak, columns activations, buffers, workspace. level: [op] bytes after each op,
    high: [op] the most while it runs; both without `state`.
    """

    state: tuple[StateBytes, ...]
    peak: IntArray
    at: IntArray
    dynamic: IntArray
    level: IntArray
    high: IntArray

    def breakdown(self, program: int) -> dict[str, int]:
        """What the peak consists of, context left out."""
        s = self.state[program]
        out = {"parameters": s.parameters, "gradients": s.gradients, "optimizer": s.optimizer}
        return out | {name: int(self.dynamic[program, i]) for i, name in enumerate(_COLUMNS)}


def state(plan: Plan, recipe: Recipe) -> tuple[StateBytes, ...]:
    """Parameters, gradients and optimizer of each program, one copy of each parameter, sharded as its bucket says."""
    out = []
    found = buckets(plan.graph)
    for p in range(plan.programs):
        mine = [b for b in found if p in b.owners]
        parts = []
        for b in mine:
            zero = b.replica.zero
            shards = [b.ranks if zero >= level else 1 for level in (3, 2, 1)]
            parts.append(state_bytes(b.numel, recipe, *shards))
        out.append(
            StateBytes(
                sum(x.parameters for x in parts), sum(x.gradients for x in parts), sum(x.optimizer for x in parts)
            )
        )
    return tuple(out)


def memory(plan: Plan, persistent: tuple[StateBytes, ...]) -> Memory:
    """Walk every program's dispatch order, cover by cover: allocate, note the level, free."""
    key, size, column = _events(plan)
    order = np.argsort(key, kind="stable")
    key, size, column = key[order], size[order], column[order]
    op = key // _stride(plan)
    total = np.cumsum(size)
    cuts = np.searchsorted(op, plan.bounds)
    before = np.where(cuts > 0, total[cuts - 1], 0) if len(total) else cuts
    total -= np.repeat(before[:-1], np.diff(cuts))
    peak = np.array([s.total for s in persistent], dtype=np.int64)
    at = np.zeros(plan.programs, dtype=np.int64)
    dynamic = np.zeros((plan.programs, len(_COLUMNS)), dtype=np.int64)
    for p, (a, b) in enumerate(pairwise(cuts.tolist())):
        if a < b:
            k = a + int(np.argmax(total[a:b])) + 1
            peak[p] += total[k - 1]
            at[p] = op[k - 1]
            dynamic[p] = [size[a:k][column[a:k] == c].sum() for c in range(len(_COLUMNS))]
    after, high = _per_op(plan, op, total, key % _stride(plan) >= 3)
    return Memory(persistent, peak, at, dynamic, after, high)


def _stride(plan: Plan) -> int:
    return 3 * (2 + max((len(s.covers) for s in plan.shapes), default=0))


def _events(plan: Plan) -> tuple[IntArray, IntArray, IntArray]:
    """(sort key, signed bytes, column). Within each cover of each op: allocations, end of the workspace, frees.

    What is freed at an op's start (cover AT_START) stands before its first cover.
    """
    b, stride = plan.buffers, _stride(plan)
    freed = b.free >= 0
    place = 3 * (b.free_cover[freed] - AT_START)
    keys = [b.alloc * stride + 3 * (b.alloc_cover - AT_START), b.free[freed] * stride + place + 2]
    sizes = [b.bytes, -b.bytes[freed]]
    columns = [b.category, b.category[freed]]
    nodes = plan.graph.nodes
    by = np.argsort(plan.shape, kind="stable")
    cuts = np.cumsum(np.bincount(plan.shape, minlength=len(plan.shapes)))[:-1]
    for s, rows in zip(plan.shapes, np.split(by, cuts), strict=True):
        if s.kind is OpKind.COMPUTE:
            work = [(c, nodes[n].workspace) for c, (n, _) in enumerate(s.covers) if nodes[n].workspace]
            for c, size in work:
                at = rows * stride + 3 * (c - AT_START)
                keys += [at, at + 1]
                sizes += [np.full(len(rows), size), np.full(len(rows), -size)]
                columns += [np.full(len(rows), WORKSPACE)] * 2
    return np.concatenate(keys), np.concatenate(sizes), np.concatenate(columns)


def _per_op(plan: Plan, op: IntArray, total: IntArray, running: BoolArray) -> tuple[IntArray, IntArray]:
    """[op] bytes after it, and the most while it runs: from what it finds when its first frees are done."""
    n, b = len(plan), plan.buffers
    last = np.searchsorted(op, np.arange(n), side="right") - 1
    valid = last >= 0
    valid[valid] = plan.program[op[last[valid]]] == plan.program[valid]
    after = np.zeros(n, dtype=np.int64)
    after[valid] = total[last[valid]]
    high = np.roll(after, 1)
    high[plan.bounds[:-1]] = 0
    early = np.flatnonzero((b.free >= 0) & (b.free_cover == AT_START))
    np.subtract.at(high, b.free[early], b.bytes[early])
    np.maximum.at(high, op[running], total[running])
    return after, high


def samples(plan: Plan, found: Memory, start: FloatArray, end: FloatArray) -> MemorySamples:
    """The level over time, at compute ops: the most while each runs, and what is left behind it.

    What communication allocates counts with the compute op dispatched behind it: the highest sample is the peak.
    """
    rows = np.flatnonzero(plan.kind == OpKind.COMPUTE)
    program = plan.program[rows]
    owner = np.minimum(np.searchsorted(rows, np.arange(len(plan))), len(rows) - 1)
    owner -= program[owner] != plan.program
    high = np.zeros(len(rows), dtype=np.int64)
    np.maximum.at(high, owner, found.high)
    fixed = np.array([s.total for s in found.state], dtype=np.int64)[program]
    time = np.stack([start[rows], end[rows]], axis=1).ravel()
    value = np.stack([high + fixed, found.level[rows] + fixed], axis=1).ravel()
    return MemorySamples(np.repeat(program, 2), time, value)
