"""What a plan's waits prove: that one op has ended before another starts."""

from __future__ import annotations

import numpy as np

from ir.core.order import BoolArray, IntArray
from ir.core.waits import running_max, segments
from ir.plan.plan import Plan


class Waits:
    """A plan's waits, per pair of streams as one running maximum: how far into the one has the other waited."""

    def __init__(self, plan: Plan) -> None:
        self._stream, self._streams, self._ops = plan.stream, len(plan.streams), len(plan)
        row, on = plan.waits.rows(), plan.waits.items
        pair = self._pair(row, on)
        key = pair * self._ops + row
        by = np.argsort(key)
        self._key = key[by]
        self._reach = running_max(on[by], segments(pair[by]))

    def _pair(self, row: IntArray, on: IntArray) -> IntArray:
        return self._stream[row] * self._streams + self._stream[on]

    def prove(self, row: IntArray, on: IntArray) -> BoolArray:
        """For each pair: do stream order and the waits of `row`'s stream say that op `on` has ended before `row`?"""
        same = self._stream[row] == self._stream[on]
        ok: BoolArray = same & (on < row)
        if not len(self._key):
            return ok
        pair = self._pair(row, on)
        at = np.searchsorted(self._key, pair * self._ops + row, side="right") - 1
        found = (at >= 0) & (self._key[at] // self._ops == pair)
        ok |= ~same & found & (self._reach[at] >= on)
        return ok
