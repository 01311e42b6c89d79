"""Where replicas stand: positions, their groups, how groups lie on nodes, how fast ranks are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ir.core.mesh import DENSE, Mesh
from ir.core.order import BoolArray, FloatArray, IntArray
from piper_sim.folding.uses import CollectiveUse

MOST_PLACEMENTS = 8  # of a hundred thousand ranks about 3 MB each


@dataclass(frozen=True, slots=True)
class RankSlot:
    """One rank: the program it runs and its position among the replicas that run it."""

    program: int
    position: int


@dataclass(frozen=True, slots=True)
class RankSpread:
    """How a group lies on nodes: its ranks, the fewest of them on any of its nodes, and its nodes."""

    ranks: int
    per_node: int
    nodes: int


class RankPositions:
    """The replicas of a program. A position is a rank's coordinate on all axes but pp: 0, 1, … in the order of ranks.

    offset: [position] global rank of the one that runs program 0. `program * stride` leads to the others.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.stride, self.programs = mesh, mesh.program_stride, mesh.sizes["pp"]
        self.offset: IntArray = np.array(mesh.offsets(DENSE), dtype=np.int64)
        self._groups: dict[tuple[str, ...], IntArray] = {}

    def __len__(self) -> int:
        return len(self.offset)

    def group(self, axes: Iterable[str]) -> IntArray:
        """[position] the least position of its group over these axes."""
        key = tuple(axes)
        if key not in self._groups:
            least = self.offset.copy()
            for t in {t for a in key for t in self.mesh.axes[a]}:
                least -= self.offset // t.stride % t.size * t.stride
            self._groups[key] = np.searchsorted(self.offset, least)
        return self._groups[key]

    def members(self, axes: Iterable[str]) -> IntArray:
        """[group, member] positions, groups in the order of their least."""
        group = self.group(axes)
        return np.argsort(group, kind="stable").reshape(len(np.unique(group)), -1)

    def seat(self, rank: int) -> RankSlot:
        """Where a global rank is."""
        program = self.mesh.coordinates(rank)["pp"]
        return RankSlot(program, int(np.searchsorted(self.offset, rank - program * self.stride)))


class DevicePlacement:
    """Positions on the nodes of a cluster. rank, node, speed: [program, position] global rank, its node, its factor."""

    _made: ClassVar[dict[object, DevicePlacement]] = {}

    def __init__(self, mesh: Mesh, per_node: int, speed: Mapping[str, float] | None = None) -> None:
        self.positions = at = RankPositions(mesh)
        self.rank: IntArray = at.offset + np.arange(at.programs)[:, None] * at.stride
        self.node: IntArray = self.rank // per_node
        self.speed: FloatArray = np.ones(self.rank.shape)
        for name, factor in (speed or {}).items():
            seat = at.seat(int(name))
            self.speed[seat.program, seat.position] = factor
        self._spreads: dict[CollectiveUse, tuple[IntArray, IntArray]] = {}

    @classmethod
    def of(cls, mesh: Mesh, per_node: int, speed: Mapping[str, float]) -> DevicePlacement:
        """The same object for the same mesh, nodes and speeds, with all that was found of it."""
        key = tuple(mesh.sizes.items()), tuple(mesh.axes.items()), per_node, tuple(speed.items())
        if key not in cls._made:
            if len(cls._made) >= MOST_PLACEMENTS:
                cls._made.pop(next(iter(cls._made)))
            cls._made[key] = cls(mesh, per_node, speed)
        return cls._made[key]

    def lie(self, use: CollectiveUse) -> tuple[IntArray, IntArray]:
        """(fewest on a node, nodes) of the own group of each [program, position]; of joined ones, [0, position]."""
        if use not in self._spreads:
            self._spreads[use] = self._lie(use)
        return self._spreads[use]

    def _lie(self, use: CollectiveUse) -> tuple[IntArray, IntArray]:
        group, size = self.positions.group(use.axes), len(self.positions)
        node = self.node[list(use.programs)] if use.programs else self.node
        # Joined programs share one group; else each has its own.
        label = group + (0 if use.programs else size) * np.arange(len(node))[:, None]
        wide = int(self.node.max()) + 1
        pair, ranks = np.unique(label * wide + node, return_counts=True)
        first = np.flatnonzero(np.diff(pair // wide, prepend=-1))
        fewest, nodes = np.minimum.reduceat(ranks, first), np.diff(np.append(first, len(pair)))
        row = np.searchsorted(pair[first] // wide, label[:1] if use.programs else label)
        return fewest[row], nodes[row]

    def spread(self, use: CollectiveUse, seat: RankSlot) -> RankSpread:
        """The group that a rank is in."""
        fewest, nodes = self.lie(use)
        at = (0 if use.programs else seat.program), seat.position
        ranks = self.positions.mesh.size(use.axes) * max(1, len(use.programs))
        return RankSpread(ranks, int(fewest[at]), int(nodes[at]))

    def near(self, a: int, b: int) -> BoolArray:
        """[position] whether the ranks that run programs a and b share a node."""
        return np.asarray(self.node[a] == self.node[b])

    def slowest(self, axes: Iterable[str]) -> FloatArray:
        """[program, position] speed of the slowest rank of its program in its group."""
        members = self.positions.members(axes)
        out = np.empty_like(self.speed)
        out[:, members] = self.speed[:, members].min(axis=2)[:, :, None]
        return out
