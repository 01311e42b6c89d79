"""Who runs what: a program runs at every position of its group, and ranks of equal positions exchange messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ir.core.mesh import DENSE, Mesh
from ir.graph.sync import Bucket
from ir.plan.plan import Plan


@dataclass(frozen=True)
class RankPlacement:
    """The ranks of a mesh, by program (pipeline rank) and position (where in the group that runs the program).

    >>> places = RankPlacement(Mesh.of(tp=1, cp=1, dp=2, pp=2, order=("tp", "cp", "ep", "dp", "pp")))
    >>> places.table, places.program(3), places.position(3), places.peer(3, 0)
    (((0, 1), (2, 3)), 1, 1, 1)
    >>> places.group(3, ("dp",), (1,)), places.group(3, (), (0, 1)), places.group(3, ("dp", "pp"), (0, 1))
    ((2, 3), (1, 3), (0, 1, 2, 3))
    """

    mesh: Mesh

    @classmethod
    def of(cls, plan: Plan) -> RankPlacement:
        """A plan without a mesh has one rank for each program."""
        return cls(plan.graph.mesh or Mesh.of(tp=1, cp=1, dp=1, pp=plan.programs))

    @cached_property
    def table(self) -> tuple[tuple[int, ...], ...]:
        """[program][position] the global rank."""
        return tuple(tuple(self.mesh.offsets(DENSE, (p,))) for p in range(self.mesh.sizes["pp"]))

    @cached_property
    def _where(self) -> dict[int, tuple[int, int]]:
        return {r: (p, q) for p, ranks in enumerate(self.table) for q, r in enumerate(ranks)}

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.mesh.ranks

    def program(self, rank: int) -> int:
        """What a rank runs."""
        return self._where[rank][0]

    def position(self, rank: int) -> int:
        """Where in its group it is."""
        return self._where[rank][1]

    def replica(self, rank: int) -> int:
        """Which share of the global batch it reads."""
        return self.mesh.coordinates(rank)["dp"]

    def peer(self, rank: int, program: int) -> int:
        """The rank that runs another program at the same position."""
        return self.table[program][self.position(rank)]

    def group(self, rank: int, axes: Iterable[str], programs: Sequence[int]) -> tuple[int, ...]:
        """The ranks that meet over mesh axes, joined over programs, in ascending order: theirs is the n-th share."""
        inner = [a for a in axes if a != "pp"]  # which the programs stand for
        base = self.peer(rank, 0)
        base -= sum(base // t.stride % t.size * t.stride for a in inner for t in self.mesh.axes[a])
        return tuple(base + offset for offset in self.mesh.offsets(inner, programs))

    def expert_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the experts of a rank's layers between them, in ascending order."""
        return self.group(rank, ("etp", "ep"), (self.program(rank),))


def sharers(bucket: Bucket, places: RankPlacement, rank: int) -> tuple[int, ...]:
    """The ranks that a bucket is sharded over, or kept in step on: between programs too, if reduced once per step."""
    joined = bucket.replica.zero < 2
    return places.group(rank, bucket.inside, bucket.owners if joined else (places.program(rank),))


def copiers(bucket: Bucket, places: RankPlacement, rank: int) -> tuple[int, ...]:
    """The ranks that hold the same shard of a bucket, of whom the first stands for all."""
    apart = bucket.replica.zero >= 2
    return places.group(rank, bucket.across, bucket.owners if apart else (places.program(rank),))


def several(found: Iterable[Bucket], program: int) -> list[Bucket]:
    """The buckets of a program that other ranks hold too."""
    return [b for b in found if program in b.owners and not b.alone]
