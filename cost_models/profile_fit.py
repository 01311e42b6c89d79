"""A straight line through measured messages: seconds = latency + bytes · seconds per byte, relative errors counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Curve:
    """alpha_s: seconds of an empty message. beta_s_per_byte: of each further byte. error: the largest, relative."""

    alpha_s: float
    beta_s_per_byte: float
    error: float

    def seconds(self, size: int) -> float:
        """Of a message of so many bytes."""
        return self.alpha_s + self.beta_s_per_byte * size


def fit(points: Sequence[tuple[int, float]]) -> Curve:
    """The curve of least squared relative error through (bytes, seconds); neither of its numbers is negative.

    >>> c = fit([(1000, 3e-3), (2000, 5e-3), (4000, 9e-3)]); round(c.alpha_s, 9), round(c.beta_s_per_byte, 12)
    (0.001, 2e-06)
    >>> fit([(1000, 3e-3), (4000, 2e-3)]).beta_s_per_byte  # a larger message was faster
    0.0
    """
    ordered = sorted(points)
    size, seconds = np.array([p[0] for p in ordered], float), np.array([p[1] for p in ordered], float)
    seconds = np.maximum(seconds, 1e-12)
    columns = np.stack([1 / seconds, size / seconds], axis=1)
    best: tuple[float, float, float] | None = None
    for use in ([0, 1], [0], [1]):  # the best of two numbers, or of one alone where the other would be negative
        numbers = np.zeros(2)
        numbers[use] = np.linalg.lstsq(columns[:, use], np.ones(len(points)), rcond=None)[0]
        off = columns @ numbers - 1
        if (numbers >= 0).all() and (best is None or float(off @ off) < best[0]):
            best = float(off @ off), float(numbers[0]), float(numbers[1])
    assert best is not None
    _, alpha, beta = best
    return Curve(alpha, beta, float(np.abs(columns @ np.array([alpha, beta]) - 1).max()))
