"""Equal rows kept once."""

from __future__ import annotations

import numpy as np

from ir.core.order import IntArray


def distinct(rows: IntArray) -> tuple[IntArray, IntArray]:
    """(the different rows in the order of their first, [row] which one it is).

    >>> values, which = distinct(np.array([[2, 1], [0, 5], [2, 1]]))
    >>> values.tolist(), which.tolist()
    ([[2, 1], [0, 5]], [0, 1, 0])
    """
    rows = np.ascontiguousarray(rows)
    seen: dict[bytes, int] = {}
    which = np.array([seen.setdefault(r.tobytes(), len(seen)) for r in rows], dtype=np.int64)
    first = np.empty(len(seen), dtype=np.int64)
    first[which[::-1]] = np.arange(len(rows))[::-1]
    return rows[first], which
