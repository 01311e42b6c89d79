"""Bytes that a pass needs for a while: at its most, beyond what it writes."""

from __future__ import annotations


def beyond(most: int, *written: int) -> int:
    """What gradients and temporaries need at their most, less what is left in the end: that takes their place.

    >>> beyond(10, 3, 4), beyond(10, 20)
    (3, 0)
    """
    return max(0, most - sum(written))
