"""Seconds on one grid: multiples of 2^-40 s (0.9 ps), whose sums are exact in any order."""

import math

import numpy as np

from ir.core.order import FloatArray

GRID = 2.0**40  # steps of a second


def quantise(seconds: float) -> float:
    """A duration to the nearest multiple of 2^-40 s. Raises ValueError: negative, infinite or not a number.

    Multiples of 2^-40 below 2^13 s (2.3 hours) are exact in a double, and so are their sums, in any order. Two paths of
    equal work therefore end at *equal* times: ties are true, and two engines that add in different order agree bitwise.

    >>> quantise(0.1) + quantise(0.2) == quantise(0.3)
    True
    """
    if not (0.0 <= seconds < math.inf):
        raise ValueError(f"not a duration: {seconds}")
    return round(seconds * GRID) / GRID


def quantised(seconds: FloatArray | float) -> FloatArray:
    """Seconds of any sign and shape to the nearest multiples of 2^-40 s, as `quantise` rounds each.

    >>> quantised(np.array([0.1, 0.3])).tolist() == [quantise(0.1), quantise(0.3)]
    True
    """
    return np.asarray(np.rint(np.asarray(seconds) * GRID) / GRID)
