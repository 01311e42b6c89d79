"""Which elements of a whole parameter a piece is, and where two pieces of different cuts have elements in common."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from executor.parallel.shares import Share


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements first … first + count of a share, laid flat: what ZeRO leaves of it on one rank.

    >>> Piece(Share((2, 3)), 1, 4).runs()
    (array([1]), array([4]))
    """

    share: Share
    first: int
    count: int

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Piece:
        """A whole parameter."""
        return cls(Share(shape), 0, prod(shape))

    @property
    def is_share(self) -> bool:
        """Whether it is all that the share has."""
        return self.count == prod(self.share.local)

    def runs(self) -> tuple[np.ndarray, np.ndarray]:
        """Its elements as stretches of the whole parameter laid flat: where each starts, how long it is; ascending.

        >>> from executor.parallel.shares import Cut
        >>> Piece(Share((2, 6), (Cut(1, 1, 2, (4, 2)),)), 1, 4).runs()
        (array([3, 5, 8]), array([1, 1, 2]))
        """
        starts, lengths = _stretches(self.share)
        ends = np.cumsum(lengths)
        low = np.clip(self.first - (ends - lengths), 0, lengths)  # what of each stretch lies before the piece
        high = np.clip(self.first + self.count - (ends - lengths), 0, lengths)
        kept = high > low
        return (starts + low)[kept], (high - low)[kept]

    def shared(self, other: Piece) -> Iterator[tuple[int, int, int]]:
        """What two pieces of one parameter have in common: (from where in this one, in the other, how many).

        >>> from executor.parallel.shares import Cut
        >>> a, b = Piece(Share((2, 3)), 0, 4), Piece(Share((2, 3), (Cut(1, 0, 1, (3,)),)), 2, 4)
        >>> list(a.shared(b)), list(Piece(Share((4, 1)), 0, 2).shared(Piece(Share((4, 1)), 2, 2)))
        ([(2, 0, 1), (3, 1, 1)], [])
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


def _stretches(share: Share) -> tuple[np.ndarray, np.ndarray]:
    """A share's elements, in its own order, as stretches of the whole parameter."""
    if not share.cuts:
        return np.array([0]), np.array([prod(share.shape)])
    last = max(c.dim for c in share.cuts)
    rows = [np.arange(n) for n in share.shape[: last + 1]]
    for c in share.cuts:
        rows[c.dim] = c.rows().cpu().numpy()
    breaks = np.flatnonzero(np.diff(rows[last]) != 1) + 1
    firsts, counts = zip(*((part[0], len(part)) for part in np.split(rows[last], breaks)), strict=True)
    starts = np.zeros(1, dtype=np.int64)
    for dim, found in enumerate([*rows[:last], np.array(firsts)]):
        starts = (starts[:, None] + found[None] * prod(share.shape[dim + 1 :])).reshape(-1)
    lengths = np.array(counts) * prod(share.shape[last + 1 :])
    return starts, np.tile(lengths, len(starts) // len(lengths))
