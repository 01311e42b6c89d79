"""Which elements of a parameter a piece is, what two pieces have in common, which rank writes it, and to which file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
from torch import Tensor

from executor.parallel.shares import ParamShard, ShardCut
from ir.core.mesh import DENSE, EXPERT
from ir.graph.graph import Graph
from ir.graph.sync import Bucket, buckets
from ir.plan.places import RankPlacement, copiers, sharers

Held = dict[
    str, tuple["ShardPiece", dict[str, Tensor]]
]  # parameter → a piece of it, and that, flat, of each of its slots


@dataclass(frozen=True, slots=True)
class ShardPiece:
    """Elements first … first + count of a share, laid flat: what ZeRO leaves of it on one rank.

    >>> ShardPiece(ParamShard((2, 3)), 1, 4).runs()
    (array([1]), array([4]))
    """

    share: ParamShard
    first: int
    count: int

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> ShardPiece:
        return cls(ParamShard(shape), 0, prod(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Its share's, where it is all of it; else it is flat."""
        return self.share.local if self.count == prod(self.share.local) else (self.count,)

    @property
    def possible(self) -> bool:
        """Whether there is such a piece of a parameter of such a shape.

        >>> ShardPiece(ParamShard((4,)), 3, 1).possible, ShardPiece(ParamShard((4,)), 3, 2).possible
        (True, False)
        """
        shape, cuts = self.share.shape, self.share.cuts
        cut = len({c.dim for c in cuts}) == len(cuts) and all(_divides(c, shape) for c in cuts)
        return cut and self.first >= 0 < self.count <= prod(self.share.local) - self.first

    def runs(self) -> tuple[np.ndarray, np.ndarray]:
        """Its elements as stretches of the whole parameter laid flat: where each starts, how long it is; ascending.

        >>> from executor.parallel.shares import ShardCut
        >>> ShardPiece(ParamShard((2, 6), (ShardCut(1, 1, 2, (4, 2)),)), 1, 4).runs()
        (array([3, 5, 8]), array([1, 1, 2]))
        """
        starts, lengths = self.share.stretches()
        ends = np.cumsum(lengths)
        low = np.clip(self.first - (ends - lengths), 0, lengths)  # what of each stretch lies before the piece
        high = np.clip(self.first + self.count - (ends - lengths), 0, lengths)
        kept = high > low
        return (starts + low)[kept], (high - low)[kept]

    def shared(self, other: ShardPiece) -> Iterator[tuple[int, int, int]]:
        """What two pieces of one parameter have in common: (from where in this one, in the other, how many).

        >>> from executor.parallel.shares import ShardCut
        >>> flat = ShardPiece(ParamShard((2, 3)), 0, 4)
        >>> column = ShardPiece(ParamShard((2, 3), (ShardCut(1, 0, 1, (3,)),)), 2, 4)
        >>> list(flat.shared(column))
        [(2, 0, 1), (3, 1, 1)]
        >>> list(ShardPiece(ParamShard((4, 1)), 0, 2).shared(ShardPiece(ParamShard((4, 1)), 2, 2)))
        []
        """
        if self.share == other.share:
            low, high = max(self.first, other.first), min(self.first + self.count, other.first + other.count)
            if low < high:
                yield low - self.first, low - other.first, high - low
            return
        (here, mine), (there, theirs) = self.runs(), other.runs()
        at, to = np.cumsum(mine) - mine, np.cumsum(theirs) - theirs
        lowest = np.searchsorted(there + theirs, here, side="right")
        highest = np.searchsorted(there, here + mine, side="left")
        for i, (a, b) in enumerate(zip(lowest.tolist(), highest.tolist(), strict=True)):
            for j in range(a, b):
                low, high = max(here[i], there[j]), min(here[i] + mine[i], there[j] + theirs[j])
                yield int(at[i] + low - here[i]), int(to[j] + low - there[j]), int(high - low)


def _divides(cut: ShardCut, shape: tuple[int, ...]) -> bool:
    sizes = min(cut.blocks, default=0) > 0 and 0 <= cut.dim < len(shape) and sum(cut.blocks) == shape[cut.dim]
    return sizes and 0 <= cut.index < cut.count


def written(graph: Graph, places: RankPlacement, rank: int) -> frozenset[str]:
    """The parameters whose piece on this rank is this rank's to write.

    Ranks that hold the same part of a parameter (copies, and ranks that no axis of its cuts tells apart) stand first in
    one place only: index 0 on every axis that neither cuts it nor shards it, in the first program that owns it.
    """
    place, out = places.mesh.coordinates(rank), set()
    entries = {p.name: (p, e.layout) for e in reversed(graph.entries) for p in e.part.params}
    for b in buckets(graph):
        if places.program(rank) not in b.owners or not _first(b, places, rank):
            continue
        for name in b.params:
            param, layout = entries[name]
            cut = {axis for axis in param.sharded if getattr(layout, axis) > 1}
            view = EXPERT if param.expert else DENSE
            if all(place[axis] == 0 for axis in view if axis not in cut and axis not in b.axes):
                out.add(name)
    return frozenset(out)


def _first(b: Bucket, places: RankPlacement, rank: int) -> bool:
    """Whether what this rank updates of a bucket is no copy of what a rank before it does."""
    members = sharers(b, places, rank)
    sharded = b.replica.zero > 0 and len(members) > 1
    return copiers(b, places, rank)[0] == rank and (sharded or members[0] == rank)


def in_files(held: Iterable[tuple[str, tuple[ShardPiece, Mapping[str, Tensor]]]], most: int) -> Iterator[Held]:
    """What goes into each file, so that none has values of more than so many bytes; one file at least.

    >>> import torch
    >>> two = {"weight": torch.arange(6.0), "exp_avg": torch.zeros(6)}
    >>> files = in_files([("a", (ShardPiece.whole((2, 3)), two))], 32)
    >>> [{n: (p.first, p.count) for n, (p, _) in f.items()} for f in files]
    [{'a': (0, 4)}, {'a': (4, 2)}]
    """
    out: Held = {}
    size = 0
    for name, (piece, slots) in held:
        each = sum(t.element_size() for t in slots.values())
        for at in range(0, piece.count, most // each):
            count = min(most // each, piece.count - at)
            if size + count * each > most:
                yield out
                out, size = {}, 0
            part = {slot: flat[at : at + count] for slot, flat in slots.items()}
            out[name] = ShardPiece(piece.share, piece.first + at, count), part
            size += count * each
    yield out
