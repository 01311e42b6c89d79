"""The plan: what every program dispatches, in order, with streams, waits, posts and frees. Both engines read this.

Columns, one entry per op, program after program, each in dispatch order. Ops that differ only in their microbatch
share a `OpShape`; the text of op i is its shape's pattern with the microbatches filled in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from functools import cached_property

import numpy as np

from ir.core.ops import Pass
from ir.core.order import IntArray
from ir.core.waits import grouped, order_by
from ir.core.work import Message
from ir.graph.graph import Graph


class OpKind(IntEnum):
    """How an op is executed."""

    COMPUTE = 0
    SEND = 1
    RECV = 2
    COLLECTIVE = 3


class CollectiveRole(StrEnum):
    """What a microbatch's collective does for a bucket: reduce its gradients, or gather its weights."""

    REDUCE = "RS"
    GATHER = "AG"


@dataclass(frozen=True, slots=True)
class OpShape:
    """What ops that differ only in their microbatch have in common.

    text: op text with * for a microbatch. covers: (node, member) pairs in the order they run; member says which of the
    op's microbatches. slot, peer: for a send or receive, the (node, slot) whose buffer travels, and the other program.
    bucket: `Bucket.key` of what a collective reduces or gathers. role: of one that does so for a microbatch and stands
    for no node; reads: the pass that a gather is for; again: how many came before it for that pass and microbatch.
    """

    kind: OpKind
    stream: str
    text: str
    covers: tuple[tuple[int, int], ...] = ()
    slot: tuple[int, int] | None = None
    message: Message | None = None
    peer: int = -1
    bucket: str = ""
    role: CollectiveRole | None = None
    reads: Pass | None = None
    again: int = 0

    def stamp(self, mb: int, mb2: int) -> str:
        """The text of one op.

        >>> OpShape(OpKind.COMPUTE, "compute", "(0F*;3B*)OVERLAP_F_B").stamp(7, 2)
        '(0F7;3B2)OVERLAP_F_B'
        """
        if "*" not in self.text:
            return self.text
        text = self.text.replace("*", str(mb), 1)
        return text.replace("*", str(mb2), 1)


def cover_table(shapes: Sequence[OpShape]) -> tuple[IntArray, IntArray]:
    """(node, member) of every shape's covers, each [cover, shape]; node -1 where a shape has fewer.

    >>> both = OpShape(OpKind.COMPUTE, "compute", "0B*", ((7, 0), (8, 0))), OpShape(OpKind.SEND, "send>1", "0SEND_F*")
    >>> cover_table(both)[0].tolist()
    [[7, -1], [8, -1]]
    """
    count = [len(s.covers) for s in shapes]
    pairs = np.array([c for s in shapes for c in s.covers], dtype=np.int64).reshape(-1, 2)
    shape = np.repeat(np.arange(len(shapes)), count)
    place = np.arange(len(shape)) - np.repeat(np.cumsum(count) - count, count)
    node = np.full((max(count, default=0), len(shapes)), -1, dtype=np.int64)
    member = np.zeros_like(node)
    node[place, shape], member[place, shape] = pairs.T
    return node, member


def covers_of(shapes: Sequence[OpShape]) -> IntArray:
    """[cover] its shape, its place among the shape's covers, node, member."""
    rows = [(k, c, n, member) for k, s in enumerate(shapes) for c, (n, member) in enumerate(s.covers)]
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


def spread(of: IntArray, shape: IntArray, shapes: int) -> tuple[IntArray, IntArray]:
    """(op, entry) of every op's entries in a table whose entries are of these shapes, in rising order.

    >>> [a.tolist() for a in spread(np.array([0, 2, 2]), np.array([2, 1, 0]), 3)]
    [[0, 0, 2], [1, 2, 0]]
    """
    each = np.bincount(of, minlength=shapes)
    count = each[shape]
    op = np.repeat(np.arange(len(shape)), count)
    ahead = (np.cumsum(each) - each)[shape] - (np.cumsum(count) - count)
    return op, np.arange(len(op)) + np.repeat(ahead, count)


@dataclass(frozen=True, eq=False)
class OpLists:
    """Lists of integers by row: `items[at[i]:at[i + 1]]` are row i's."""

    at: IntArray
    items: IntArray

    def row(self, i: int) -> IntArray:
        """One row."""
        return self.items[self.at[i] : self.at[i + 1]]

    @classmethod
    def of(cls, rows: int, row: IntArray, item: IntArray) -> OpLists:
        """From (row, item) pairs; items of a row keep their given order.

        >>> OpLists.of(3, np.array([2, 0, 2]), np.array([7, 8, 9])).row(2).tolist()
        [7, 9]
        """
        by = order_by(row)
        at = np.zeros(rows + 1, dtype=np.int64)
        np.cumsum(np.bincount(row, minlength=rows), out=at[1:])
        return cls(at, item[by])

    def rows(self) -> IntArray:
        """The row of each item."""
        return np.repeat(np.arange(len(self.at) - 1), np.diff(self.at))


@dataclass(frozen=True, eq=False)
class Buffers:
    """Every buffer of every microbatch. Times are positions: an op, and which of its covers.

    node, slot, mb: what it is called after; node = -1: after the communication op in row `slot` (a received or
    gathered copy, a gradient bucket). alloc, free: op rows, free = -1 where it lives to the step's end.
    alloc_cover, free_cover: index into the op's covers; free_cover = AT_START where no cover reads the buffer, and the
    op's waits prove its readers done: it is freed before the op runs.
    """

    node: IntArray
    slot: IntArray
    mb: IntArray
    bytes: IntArray
    alloc: IntArray
    alloc_cover: IntArray
    free: IntArray
    free_cover: IntArray
    category: IntArray

    def __len__(self) -> int:
        return len(self.node)


CATEGORIES = ("activations", "buffers")
AT_START = -1


@dataclass(frozen=True, eq=False)
class Plan:
    """All programs' ops. See the module's first line for the layout; see `ir.plan.text` for how it reads."""

    graph: Graph
    header: Mapping[str, str]
    shapes: tuple[OpShape, ...]
    program: IntArray
    shape: IntArray
    mb: IntArray
    mb2: IntArray
    waits: OpLists
    partner: IntArray
    collective: IntArray
    buffers: Buffers
    unit: IntArray = field(repr=False)

    def __len__(self) -> int:
        return len(self.program)

    @property
    def programs(self) -> int:
        """Number of programs."""
        return int(self.program[-1]) + 1 if len(self.program) else 0

    @cached_property
    def bounds(self) -> IntArray:
        """First op of each program, and the end."""
        return np.searchsorted(self.program, np.arange(self.programs + 1))

    @cached_property
    def kind(self) -> IntArray:
        """`OpKind` of each op."""
        return np.array([s.kind for s in self.shapes], dtype=np.int64)[self.shape]

    @cached_property
    def streams(self) -> tuple[tuple[int, str], ...]:
        """(program, stream name), in order of first use."""
        return self._streams[0]

    @cached_property
    def stream(self) -> IntArray:
        """Index into `streams` of each op."""
        return self._streams[1]

    @cached_property
    def _streams(self) -> tuple[tuple[tuple[int, str], ...], IntArray]:
        names = list(dict.fromkeys(s.stream for s in self.shapes))
        at = {n: i for i, n in enumerate(names)}
        of_shape = np.array([at[s.stream] for s in self.shapes], dtype=np.int64)
        key = self.program * len(names) + of_shape[self.shape]
        found = np.flatnonzero(np.bincount(key))
        index = np.zeros(int(key.max(initial=0)) + 1, dtype=np.int64)
        index[found] = np.arange(len(found))
        pairs = [(int(k) // len(names), names[int(k) % len(names)]) for k in found]
        return tuple(pairs), index[key]

    @cached_property
    def queues(self) -> list[list[int]]:
        """The ops of each stream, in order."""
        return [queue.tolist() for queue in grouped(self.stream, len(self.streams))]

    @cached_property
    def posts(self) -> IntArray:
        """Whether somebody waits for op i (0 or 1): exactly those ops post an event."""
        out = np.zeros(len(self), dtype=np.int64)
        out[self.waits.items] = 1
        return out

    def text(self, i: int) -> str:
        """Op text of op i."""
        return self.shapes[int(self.shape[i])].stamp(int(self.mb[i]), int(self.mb2[i]))

    def where(self, i: int) -> str:
        """`program 2: 2F0`, as errors begin."""
        return f"program {int(self.program[i])}: {self.text(i)}"

    @cached_property
    def texts(self) -> list[str]:
        """Op text of every op."""
        pieces = [s.text.split("*") for s in self.shapes]  # at most two stars
        columns = zip(self.shape.tolist(), self.mb.tolist(), self.mb2.tolist(), strict=True)
        return [
            f"{p[0]}{a}{p[1]}" if len(p := pieces[s]) == 2 else p[0] if len(p) == 1 else f"{p[0]}{a}{p[1]}{b}{p[2]}"
            for s, a, b in columns
        ]

    def buffer_name(self, i: int) -> str:
        """`2F0/l7.attn.act`, or the text of the op that received, gathered or reduces it."""
        b = self.buffers
        node = int(b.node[i])
        if node < 0:
            return self.text(int(b.slot[i]))
        n = self.graph.nodes[node]
        base = n.text(None if n.once else int(b.mb[i]))
        return f"{base}.{n.writes[int(b.slot[i])].slot}"


def sorted_buffers(columns: Mapping[str, IntArray]) -> Buffers:
    """Buffers in the plan's order: those called after nodes first, then those called after ops."""
    by = order_by((columns["node"] < 0).astype(np.int64), columns["node"], columns["slot"], columns["mb"])
    return Buffers(**{k: v[by] for k, v in columns.items()})


def first_use(ids: IntArray) -> tuple[IntArray, IntArray]:
    """The distinct ids in order of first use, and each entry's index among them.

    >>> [a.tolist() for a in first_use(np.array([7, 3, 7, 5]))]
    [[7, 3, 5], [0, 1, 0, 2]]
    """
    first = np.full(int(ids.max(initial=-1)) + 1, len(ids), dtype=np.int64)
    first[ids[::-1]] = np.arange(len(ids))[::-1]
    found = np.argsort(first, kind="stable")[: np.count_nonzero(first < len(ids))]
    rank = np.zeros(len(first), dtype=np.int64)
    rank[found] = np.arange(len(found))
    return found, rank[ids]
