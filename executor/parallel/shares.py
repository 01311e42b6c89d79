"""Which elements of a parameter a rank holds where tensor or expert parallelism cuts it; ZeRO cuts what is left."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from ir.graph.graph import Graph
from ir.workload.part import Param, PartLayout


@dataclass(frozen=True, slots=True)
class ShardCut:
    """One of equal parts along a dim."""

    dim: int
    index: int  # which part
    count: int  # of how many
    blocks: tuple[int, ...]  # sizes of the stretches that are cut one by one (fused q, k, v)

    def rows(self) -> Tensor:
        """The indices along the dim that are held.

        >>> ShardCut(0, 1, 2, (4, 2)).rows().tolist()
        [2, 3, 5]
        """
        out, first = [], 0
        for size in self.blocks:
            low, high = (i * size // self.count for i in (self.index, self.index + 1))
            out.append(torch.arange(first + low, first + high, device="cpu"))
            first += size
        return torch.cat(out)

    def __len__(self) -> int:
        """How many these are.

        >>> len(ShardCut(0, 1, 2, (4, 2)))
        3
        """
        return sum((self.index + 1) * size // self.count - self.index * size // self.count for size in self.blocks)


@dataclass(frozen=True, slots=True)
class ParamShard:
    """A rank's part of a parameter of global shape `shape`; without cuts, all of it.

    >>> share = ParamShard((4, 3), (ShardCut(0, 1, 2, (4,)),))
    >>> share.local, share.take(torch.arange(12).view(4, 3)).tolist()
    ((2, 3), [[6, 7, 8], [9, 10, 11]])
    """

    shape: tuple[int, ...]
    cuts: tuple[ShardCut, ...] = ()

    @property
    def local(self) -> tuple[int, ...]:
        out = list(self.shape)
        for c in self.cuts:
            out[c.dim] = len(c)
        return tuple(out)

    def stretches(self) -> tuple[np.ndarray, np.ndarray]:
        """Its elements, in its own order, as stretches of the whole parameter laid flat: starts, lengths.

        >>> ParamShard((2, 6), (ShardCut(1, 1, 2, (6,)),)).stretches()
        (array([3, 9]), array([3, 3]))
        """
        if not self.cuts:
            return np.array([0]), np.array([prod(self.shape)])
        last = max(c.dim for c in self.cuts)
        rows = [np.arange(n) for n in self.shape[: last + 1]]
        for c in self.cuts:
            rows[c.dim] = c.rows().numpy()
        breaks = np.flatnonzero(np.diff(rows[last]) != 1) + 1
        firsts, counts = zip(*((part[0], len(part)) for part in np.split(rows[last], breaks)), strict=True)
        starts = np.zeros(1, dtype=np.int64)
        for dim, found in enumerate([*rows[:last], np.array(firsts)]):
            starts = (starts[:, None] + found[None] * prod(self.shape[dim + 1 :])).reshape(-1)
        lengths = np.array(counts) * prod(self.shape[last + 1 :])
        return starts, np.tile(lengths, len(starts) // len(lengths))

    def take(self, whole: Tensor) -> Tensor:
        """This rank's part, a tensor of its own where it is not all."""
        for c in self.cuts:
            whole = whole.index_select(c.dim, c.rows().to(whole.device))
        return whole

    def put(self, whole: Tensor, part: Tensor) -> None:
        """Write this rank's part where it belongs.

        >>> whole = torch.zeros(3, 2)
        >>> ParamShard((3, 2), (ShardCut(1, 0, 2, (2,)),)).put(whole, torch.ones(3, 1)); whole[0].tolist()
        [1.0, 0.0]
        >>> whole = torch.zeros(()); ParamShard((), ()).put(whole, torch.ones(1)); whole.item()
        1.0
        """
        at = [torch.arange(n, device="cpu") for n in self.shape]
        for c in self.cuts:
            at[c.dim] = c.rows()
        whole[torch.meshgrid(*at, indexing="ij") if at else ...] = part.view(self.local)


def share_of(param: Param, layout: PartLayout, place: Mapping[str, int]) -> ParamShard:
    """What the rank at these coordinates holds of a parameter, as the model graph cuts it."""
    cuts = []
    for axis, dim in zip(param.sharded, param.dims, strict=True):
        count = int(getattr(layout, axis))
        if count > 1:
            blocks = param.blocks if param.blocks and axis != "ep" else (param.shape[dim],)
            cuts.append(ShardCut(dim, place[axis], count, blocks))
    return ParamShard(param.shape, tuple(cuts))


def shares(graph: Graph, place: Mapping[str, int]) -> dict[str, ParamShard]:
    """Every parameter of a plan's graph by global name, frozen ones too, as the rank at these coordinates holds it.

    place: `Mesh.coordinates` of the rank.
    """
    return {p.name: share_of(p, e.layout, place) for e in graph.entries for p in (*e.part.params, *e.part.frozen)}
