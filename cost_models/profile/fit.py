"""Curves through measured messages: seconds = latency + bytes · seconds per byte, in pieces where a library changes
its protocol. Relative errors count, so that small messages weigh as much as large ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import numpy as np
from msgspec import Meta

LEAST = 3  # sizes of a piece, where there are several
MOST_PIECES = 4
WORTH = 0.5  # a further piece must at least halve what is left over
EXACT = 0.01  # root mean square; a curve that is as near needs no further piece

Point = tuple[int, float]
Bytes = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class MessageCurvePiece:
    """alpha_s: of an empty message. beta_s_per_byte: of each further byte. first, last: the sizes it was fitted to."""

    first: Bytes
    last: Bytes
    alpha_s: Seconds
    beta_s_per_byte: Seconds

    def seconds(self, size: float) -> float:
        return self.alpha_s + self.beta_s_per_byte * size


@dataclass(frozen=True, slots=True)
class MessageCurve:
    """Pieces in the order of their sizes. error: the largest at a size it was fitted to, relative.

    spread: of the measurements behind it, between quartiles and relative: the median of all sizes.

    >>> curve = MessageCurve((MessageCurvePiece(1, 10, 1.0, 0.0), MessageCurvePiece(100, 1000, 0.0, 0.02)), 0.0)
    >>> curve.seconds(5), curve.seconds(55), curve.seconds(500), [curve.inside(n) for n in (0, 1, 1000, 1001)]
    (1.0, 1.5, 10.0, [False, True, True, False])
    """

    pieces: tuple[MessageCurvePiece, ...]
    error: Seconds
    spread: Seconds = 0.0

    def seconds(self, size: int) -> float:
        """Of a message of so many bytes; between two pieces on the line that joins their ends."""
        before = self.pieces[0]
        for piece in self.pieces:
            if size <= piece.last:
                if size >= piece.first or piece is before:
                    return piece.seconds(size)
                low, high = before.seconds(before.last), piece.seconds(piece.first)
                return low + (high - low) * (size - before.last) / (piece.first - before.last)
            before = piece
        return before.seconds(size)

    def inside(self, size: int) -> bool:
        """Whether larger and smaller messages were measured."""
        return self.pieces[0].first <= size <= self.pieces[-1].last

    def doubt_s(self, size: int) -> float:
        """By how much `seconds` may be off: the worst error or the spread; and beyond what was measured, more.

        A smaller message may take as long as the smallest that was measured; a larger one as long, byte by byte, as
        the largest.

        >>> curve = MessageCurve((MessageCurvePiece(10, 100, 1.0, 0.1),), 0.05)
        >>> [round(curve.doubt_s(n), 3) for n in (50, 5, 1000)]
        [0.3, 0.575, 14.05]
        """
        first, last = self.pieces[0].first, self.pieces[-1].last
        sure = self.seconds(size) * max(self.error, self.spread)
        if size < first:
            return sure + self.seconds(first) - self.seconds(size)
        return sure + self.seconds(last) * size / last - self.seconds(size) if size > last else sure

    @property
    def latency_s(self) -> float:
        return self.pieces[0].alpha_s

    @property
    def bytes_per_s(self) -> float:
        """Of the largest messages, each byte counted once."""
        beta = self.pieces[-1].beta_s_per_byte
        return 1 / beta if beta else math.inf


def fit(points: Sequence[Point], spread: float = 0.0) -> MessageCurve:
    """The curve of least squared relative error through (bytes, seconds), with as few pieces as will do.

    No latency and no slope is negative. A piece more must halve what is left over, and has three sizes at least.

    >>> one = fit([(1000, 3e-3), (2000, 5e-3), (4000, 9e-3)]).pieces[0]
    >>> round(one.alpha_s, 9), round(one.beta_s_per_byte, 12)
    (0.001, 2e-06)
    >>> fit([(1000, 3e-3), (4000, 2e-3)]).pieces[0].beta_s_per_byte  # a larger message was faster
    0.0
    >>> knee = [(n, min(1e-5 + n * 1e-9, 3e-5 + n * 1e-10)) for n in (2**k for k in range(8, 24))]
    >>> [(p.last, round(p.alpha_s * 1e6, 2)) for p in fit(knee).pieces]
    [(16384, 10.0), (8388608, 30.0)]
    """
    ordered = _merged(points)
    size = np.array([p[0] for p in ordered], float)
    seconds = np.maximum(np.array([p[1] for p in ordered], float), 1e-12)
    found = _Fits(size, seconds)
    cuts, left = found.cut(1)
    for pieces in range(2, min(MOST_PIECES, len(ordered) // LEAST) + 1):
        if math.sqrt(left / len(ordered)) <= EXACT:
            break
        more, rest = found.cut(pieces)
        if math.sqrt(rest) > WORTH * math.sqrt(left):
            break
        cuts, left = more, rest
    made = []
    for a, b in pairwise(cuts):
        alpha, beta, _ = found.line(a, b)
        made.append(MessageCurvePiece(ordered[a][0], ordered[b - 1][0], alpha, beta))
    curve = MessageCurve(tuple(made), 0.0, spread)
    off = [abs(curve.seconds(n) / t - 1) for n, t in zip(size.astype(int).tolist(), seconds.tolist(), strict=True)]
    return MessageCurve(curve.pieces, max(off), spread)


def _merged(points: Sequence[Point]) -> list[Point]:
    """One point for each size, in order: the mean of its times."""
    times: dict[int, list[float]] = {}
    for size, seconds in points:
        times.setdefault(size, []).append(seconds)
    return [(size, sum(ts) / len(ts)) for size, ts in sorted(times.items())]


class _Fits:
    """Lines through stretches of the points, each found once; and where to cut for a given number of pieces."""

    def __init__(self, size: np.ndarray, seconds: np.ndarray) -> None:
        self.columns = np.stack([1 / seconds, size / seconds], axis=1)
        self.known: dict[tuple[int, int], tuple[float, float, float]] = {}

    def line(self, a: int, b: int) -> tuple[float, float, float]:
        """(alpha, beta, squared relative error) of points a … b − 1."""
        if (a, b) not in self.known:
            self.known[a, b] = _line(self.columns[a:b])
        return self.known[a, b]

    def cut(self, pieces: int) -> tuple[list[int], float]:
        """(where pieces begin, and the end; squared relative error) of the best cut into so many."""
        n = len(self.columns)
        if pieces == 1:
            return [0, n], self.line(0, n)[2]
        best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
        for left in range(pieces - 1, -1, -1):
            ends: dict[int, tuple[float, list[int]]] = {}
            for a, (cost, cuts) in best.items():
                first = a + LEAST
                for b in [n] if not left else range(first, n - left * LEAST + 1):
                    total = cost + self.line(a, b)[2]
                    if b not in ends or total < ends[b][0]:
                        ends[b] = total, [*cuts, b]
            best = ends
        total, cuts = best[n]
        return cuts, total


def _line(columns: np.ndarray) -> tuple[float, float, float]:
    """The best of two numbers, or of one alone where the other would be negative."""
    best: tuple[float, float, float] | None = None
    for use in ([0, 1], [0], [1]):
        numbers = np.zeros(2)
        numbers[use] = np.linalg.lstsq(columns[:, use], np.ones(len(columns)), rcond=None)[0]
        off = columns @ numbers - 1
        if (numbers >= 0).all() and (best is None or float(off @ off) < best[2]):
            best = float(numbers[0]), float(numbers[1]), float(off @ off)
    assert best is not None
    return best
