"""One program's order as a value: four integer columns, one row per action. Equal units interleave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ir.core.ops import OpToken, ScheduledOp, cell_text, parse_cell

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Order:
    """What a program does, in order. Rows with the same `unit` form an interleave group (a fused F/B pair).

    stage, token, mb, unit: int64 arrays of one length; `unit` counts 0, 0, 1, 2, … without gaps.

    >>> Order.of(["0F0", "(0F1;3B0)OVERLAP_F_B"]).unit.tolist()
    [0, 1, 1]
    """

    stage: IntArray
    token: IntArray
    mb: IntArray
    unit: IntArray

    def __len__(self) -> int:
        return len(self.stage)

    def __eq__(self, other: object) -> bool:
        """Whether all rows are equal."""
        if self is other:
            return True
        return isinstance(other, Order) and all(map(np.array_equal, self._columns, other._columns))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(c.tobytes() for c in self._columns))

    @property
    def _columns(self) -> tuple[IntArray, ...]:
        return self.stage, self.token, self.mb, self.unit

    @classmethod
    def of(cls, cells: Sequence[str]) -> Order:
        """From op texts, e.g. a row of PyTorch's schedule CSV (empty cells already dropped)."""
        rows = [(a.stage, a.token, a.mb, u) for u, cell in enumerate(cells) for a in parse_cell(cell)]
        table = np.array(rows, dtype=np.int64).reshape(-1, 4)
        return cls(table[:, 0], table[:, 1], table[:, 2], table[:, 3])

    def actions(self) -> list[ScheduledOp]:
        """The rows as values."""
        columns = zip(self.stage.tolist(), self.token.tolist(), self.mb.tolist(), strict=True)
        return [ScheduledOp(s, OpToken(t), m) for s, t, m in columns]

    def cells(self) -> list[str]:
        """The op texts; the inverse of `of`.

        >>> Order.of(["0F0", "(0F1;3B0)OVERLAP_F_B"]).cells()
        ['0F0', '(0F1;3B0)OVERLAP_F_B']
        """
        units: list[list[ScheduledOp]] = []
        last = -1
        for action, unit in zip(self.actions(), self.unit.tolist(), strict=True):
            if unit != last:
                units.append([])
                last = unit
            units[-1].append(action)
        return [cell_text(u) for u in units]
