"""Bytes that a plan's ops allocate and free, in host dispatch order: every byte is a buffer someone wrote."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ir.core.order import BoolArray, IntArray
from ir.core.waits import order_by
from ir.graph.casts import cast_spans
from ir.plan.plan import AT_START, CATEGORIES, OpKind, OpShape, Plan, covers_of, spread

WORKSPACE = len(CATEGORIES)
GRADIENTS = WORKSPACE + 1
BUFFERS = CATEGORIES.index("buffers")
COLUMNS = (*CATEGORIES, "workspace", "gradients")
_NOTHING = OpShape(OpKind.SEND, "", "")


@dataclass(frozen=True, eq=False)
class MemoryEvents:
    """Allocations and frees of a plan in host order: what does not depend on bytes.

    Within each cover of each op: allocations, end of the workspace, frees. What is freed at an op's start (cover
    AT_START) stands before its first cover. request: a >= 0 makes an allocation, ~a frees it; they are numbered as the
    plan's buffers, then the workspaces, then gradients that a step makes anew, then copies of weights. running: behind
    an op's first frees. node, mb: of each workspace. made: bytes of each gradient and copy. cuts: of programs.
    """

    op: IntArray
    running: BoolArray
    column: IntArray
    request: IntArray
    node: IntArray
    mb: IntArray
    cuts: IntArray
    made: IntArray

    @classmethod
    def of(cls, plan: Plan, made: IntArray | None = None) -> MemoryEvents:
        """Of a plan. made: as in `memory`; a program gives them up with its last op."""
        b = plan.buffers
        stride = 3 * (2 + max((len(s.covers) for s in plan.shapes), default=0))
        freed = np.flatnonzero(b.free >= 0)
        frees = b.free[freed] * stride + 3 * (b.free_cover[freed] - AT_START) + 2
        at, cover, node, mb = _instances(plan, np.array([n.workspace > 0 for n in plan.graph.nodes], dtype=np.bool_))
        at, number = at * stride + 3 * (cover - AT_START), len(b) + np.arange(len(at))
        first, over, size = _first_made(plan, made, stride)
        begin, end, copied = _copies(plan, stride)
        more = len(b) + len(at) + np.arange(len(first) + len(begin))
        grads, copies = more[: len(first)], more[len(first) :]
        alloc = b.alloc * stride + 3 * (b.alloc_cover - AT_START)
        key = np.concatenate([alloc, frees, at, at + 1, first, over, begin, end])
        order = order_by(key)
        kinds = (np.full(2 * len(x), c) for x, c in ((at, WORKSPACE), (grads, GRADIENTS), (copies, BUFFERS)))
        column = np.concatenate([b.category, b.category[freed], *kinds])[order]
        pairs = (x for asked in (number, grads, copies) for x in (asked, ~asked))
        request = np.concatenate([np.arange(len(b)), ~freed, *pairs])[order]
        key = key[order]
        op = key // stride
        cuts, made_bytes = np.searchsorted(op, plan.bounds), np.append(size, copied)
        return cls(op, key - op * stride >= 3, column, request, node, mb, cuts, made_bytes)

    def sizes(self, plan: Plan, workspace: IntArray | None = None, buffers: IntArray | None = None) -> IntArray:
        """[allocation] bytes, where given those of workspaces [node, microbatch] and of buffers, else the plan's."""
        usual = np.array([n.workspace for n in plan.graph.nodes], dtype=np.int64)
        more = usual[self.node] if workspace is None else workspace[self.node, self.mb]
        return np.concatenate([plan.buffers.bytes if buffers is None else buffers, more, self.made])

    def signed(self, sizes: IntArray) -> IntArray:
        """[event] bytes more or less in use."""
        made = self.request >= 0
        return np.where(made, 1, -1) * sizes[np.where(made, self.request, ~self.request)]

    def levels(self, size: IntArray) -> IntArray:
        """[event] bytes in use on its program, behind it."""
        total = np.cumsum(size)
        before = np.where(self.cuts > 0, total[self.cuts - 1], 0) if len(total) else self.cuts
        return np.asarray(total - np.repeat(before[:-1], np.diff(self.cuts)))

    def peaks(self, sizes: IntArray) -> IntArray:
        """[program] the most bytes in use."""
        total = self.levels(self.signed(sizes))
        return np.array([total[a:b].max(initial=0) for a, b in pairwise(self.cuts.tolist())], dtype=np.int64)


def _first_made(plan: Plan, made: IntArray | None, stride: int) -> tuple[IntArray, IntArray, IntArray]:
    """(key of the allocation, key of the free, bytes) of every gradient of every program that a step makes anew."""
    if made is None:
        return (np.zeros(0, dtype=np.int64),) * 3
    op, cover, node, _ = _instances(plan, made > 0)
    owner = plan.program[op]
    _, first = np.unique(owner * len(made) + node, return_index=True)  # instances stand in dispatch order
    last = plan.bounds[1:][owner[first]] - 1
    return op[first] * stride + 3 * (cover[first] - AT_START), last * stride + stride - 1, made[node[first]]


def _copies(plan: Plan, stride: int) -> tuple[IntArray, IntArray, IntArray]:
    """(key of the allocation, key of the free, bytes) of every part's copies of its weights: from where a program's
    first microbatch holds them to where none does."""
    turns, part, size = cast_spans(plan.graph)
    op, cover, node, _ = _instances(plan, turns != 0)
    key = op * stride + 3 * (cover - AT_START)
    by = np.lexsort((key, part[node]))
    turn, key, of = turns[node][by], key[by], part[node][by]
    held = np.cumsum(turn)  # of its part and program: those before let go of all they held
    begin, end = (turn > 0) & (held == 1), (turn < 0) & (held == 0)
    return key[begin], key[end] + 2, size[of[begin]]


def _instances(plan: Plan, has: BoolArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """(op, cover, node, microbatch) of all runs of these nodes, op by op."""
    covers = covers_of([s if s.kind is OpKind.COMPUTE else _NOTHING for s in plan.shapes])
    shape, cover, node, member = covers[has[covers[:, 2]]].T
    op, at = spread(shape, plan.shape, len(plan.shapes))
    return op, cover[at], node[at], np.where(member[at] == 0, plan.mb[op], plan.mb2[op])
