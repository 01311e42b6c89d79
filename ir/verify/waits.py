"""What a plan's waits prove: that one op has ended before another starts."""

from __future__ import annotations

import numpy as np

from ir.core.order import BoolArray, IntArray
from ir.plan.plan import Plan


class Waits:
    """A plan's waits, per pair of streams as one running maximum: how far into the one has the other waited."""

    def __init__(self, plan: Plan) -> None:
        self._stream, self._streams, self._ops = plan.stream, len(plan.streams), len(plan)
        row, on = plan.waits.rows(), plan.waits.items
        before = self._pair(row, on) * self._ops
        by = np.argsort(before + row)
        self._key = (before + row)[by]
        # A later pair's numbers are larger than any of those before it, so that its maximum starts anew.
        self._reach = np.maximum.accumulate((before + on)[by])

    def _pair(self, row: IntArray, on: IntArray) -> IntArray:
        return self._stream[row] * self._streams + self._stream[on]

    def prove(self, row: IntArray, on: IntArray) -> BoolArray:
        """For each pair: do stream order and the waits of `row`'s stream say that op `on` has ended before `row`?"""
        same = self._stream[row] == self._stream[on]
        ok: BoolArray = same & (on < row)
        if not len(self._key):
            return ok
        before = self._pair(row, on) * self._ops
        at = np.searchsorted(self._key, before + row, side="right") - 1
        ok |= ~same & (at >= 0) & (self._reach[at] >= before + on)
        return ok
