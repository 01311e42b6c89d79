"""Which replicas behave alike: the coarsest partition of positions that nothing they meet can tell apart.

A position's own attributes are, on every program: its rank's speed, how its groups lie on nodes, and whether the ends
of its channels share a node. Transfers join equal positions of different programs, so one partition serves all. Then
positions whose groups hold other classes are told apart, until nothing changes. Which classes a group holds decides
when a meeting begins, its last member; how many of each is all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ir.core.order import IntArray
from ir.plan.kept import once_per_plan
from ir.plan.plan import OpKind, Plan
from piper_sim.folding.ground import DevicePlacement, RankPositions
from piper_sim.folding.uses import shape_axes, uses


@dataclass(frozen=True, eq=False)
class RankClasses:
    """of: [position] class. size: [class] positions in it. first: [class] its least position, which stands for it."""

    of: IntArray
    size: IntArray
    first: IntArray

    @property
    def count(self) -> int:
        """Number of classes: replicas that are simulated."""
        return len(self.size)

    @classmethod
    def by(cls, colour: IntArray) -> RankClasses:
        """Classes of equal colour, numbered in the order of their first positions.

        >>> RankClasses.by(np.array([7, 5, 7])).of.tolist()
        [0, 1, 0]
        """
        _, first, of, size = np.unique(colour, return_index=True, return_inverse=True, return_counts=True)
        order = np.argsort(first)
        return cls(np.argsort(order)[of.reshape(-1)], size[order], first[order])

    @classmethod
    def each(cls, positions: int) -> RankClasses:
        """Nothing folded."""
        return cls.by(np.arange(positions))


def classes(plan: Plan, ground: DevicePlacement, more: IntArray | None = None) -> RankClasses:
    """The partition of a plan's positions. more: [attribute, position] what else is their own, such as routing."""
    if more is None:
        return _usual(plan, ground)
    return _classes(plan, ground, np.concatenate([attributes(plan, ground), more]))


@once_per_plan
def _usual(plan: Plan, ground: DevicePlacement) -> RankClasses:
    return _classes(plan, ground, attributes(plan, ground))


def _classes(plan: Plan, ground: DevicePlacement, columns: IntArray) -> RankClasses:
    return RankClasses.by(refined(coloured(columns), ground.positions, axes_of(plan, ground)))


def axes_of(plan: Plan, ground: DevicePlacement) -> list[tuple[str, ...]]:
    """The axis sets that positions meet over. A group of one or of all tells nothing apart."""
    at = ground.positions
    found = dict.fromkeys(shape_axes(plan))
    return [axes for axes in found if axes is not None and 1 < at.mesh.size(axes) < len(at)]


def attributes(plan: Plan, ground: DevicePlacement) -> IntArray:
    """[attribute, position], only those in which positions differ."""
    rows = [_numbered(ground.speed)]
    for use in uses(plan, ground.positions.programs):
        rows += ground.lie(use)
    rows += [ground.near(a, b).astype(np.int64)[None] for a, b in channels(plan)]
    table = np.concatenate(rows)
    return np.asarray(table[np.ptp(table, axis=1) > 0])


def channels(plan: Plan) -> list[tuple[int, int]]:
    """Pairs of programs between which something is sent."""
    send = np.flatnonzero(plan.kind == OpKind.SEND)
    pair = np.unique(plan.program[send] * plan.programs + plan.program[plan.partner[send]])
    return sorted({(min(p), max(p)) for p in (divmod(int(x), plan.programs) for x in pair)})


def coloured(columns: IntArray) -> IntArray:
    """[position] numbers from 0, equal where all columns are."""
    colour = np.zeros(columns.shape[1], dtype=np.int64)
    for column in columns:
        colour = _numbered(colour * len(colour) + _numbered(column))
    return colour


def refined(colour: IntArray, at: RankPositions, axes: Sequence[tuple[str, ...]]) -> IntArray:
    """Colours split until all positions of one meet the same colours over each set of axes."""
    groups = [at.members(a) for a in axes]
    before, count = 1, int(colour.max()) + 1
    while before < count:
        met = [colour]
        for members in groups:
            met.append(np.empty_like(colour))
            met[-1][members] = _sets(colour[members])[:, None]
        colour = coloured(np.array(met))
        before, count = count, int(colour.max()) + 1
    return colour


def _sets(rows: IntArray) -> IntArray:
    """A number for each row's set of values, equal where the sets are."""
    rows = np.sort(rows, axis=1)
    rows[:, 1:][np.diff(rows, axis=1) == 0] = -1
    seen: dict[bytes, int] = {}
    return np.array([seen.setdefault(r.tobytes(), len(seen)) for r in np.sort(rows, axis=1)], dtype=np.int64)


def _numbered(values: np.ndarray) -> IntArray:
    """Equal numbers from 0 for equal values, of the same shape."""
    return np.unique(values, return_inverse=True)[1].reshape(values.shape).astype(np.int64)
