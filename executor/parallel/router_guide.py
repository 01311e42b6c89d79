"""What a rank's routers are told and note: forced choices, counts of rows, the loss that evens them out."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from executor.device.device import Device, upload
from executor.parallel.expert_all_to_all import ExpertGroup, ExpertRoute
from ir.graph.graph import Graph
from ir.job.build import PreparedJob
from ir.job.routing.forced import ForcedExperts
from ir.plan.places import RankPlacement

Choice = Callable[[int, int], Tensor]  # (layer, number of the microbatch in the global batch) → [token, copy] experts
Noted = dict[tuple[int, int], Any]


class ExpertRouterGuide:
    """One for all routers of a rank. forced: their choice, instead of their own. note: keep the first step's counts.

    balance: the weight of a layer's f · P of one sequence in the loss, its coefficient over the sequences of a step.
    ahead: the host reads losses where they are taken, not where they are made.
    """

    def __init__(
        self, forced: Choice | None = None, *, note: bool = False, balance: float = 0.0, ahead: bool = False
    ) -> None:
        self.forced, self.note, self.balance, self.ahead = forced, note, balance, ahead
        self._counts: Noted = {}
        self._losses: Noted = {}

    @property
    def active(self) -> bool:
        """Whether routers must know which microbatch they have."""
        return self.forced is not None or self.note or self.balance > 0

    def chosen(self, layer: int, number: int, experts: int, indices: Tensor) -> None:
        """Note how many rows go to each expert; again where a layer is recomputed."""
        if self.note and not is_fake(indices):
            self._counts[layer, number] = rows_of_each(indices, experts)

    def weighed(self, layer: int, number: int, loss: Tensor) -> None:
        """Note a layer's loss of a microbatch."""
        if not is_fake(loss):
            self._losses[layer, number] = loss if self.ahead else loss.item()

    def take(self) -> tuple[list[tuple[int, int, list[int]]], list[tuple[int, int, float]]]:
        """(layer, microbatch, rows by expert) of the first step, and (layer, microbatch, loss), since the last call."""
        counts = [(*at, rows.tolist()) for at, rows in sorted(self._counts.items())]
        losses = [(*at, float(loss)) for at, loss in sorted(self._losses.items())]
        self._counts, self._losses, self.note = {}, {}, False
        return counts, losses


def rows_of_each(indices: Tensor, experts: int) -> Tensor:
    """(experts,) how many of the indices are each, left on the device: `bincount` would have the host wait.

    >>> rows_of_each(torch.tensor([[2, 0], [2, 3]]), 4).tolist()
    [1, 0, 2, 1]
    """
    ends = torch.arange(experts, device=indices.device)
    ends = torch.searchsorted(indices.flatten().sort().values, ends, right=True)
    return torch.diff(ends, prepend=ends.new_zeros(1))


def guide_of(
    prepared: PreparedJob, graph: Graph, places: RankPlacement, rank: int, device: Device, *, note: bool
) -> ExpertRouterGuide:
    """As the job and its config have it. note: keep counts."""
    moe = prepared.config.moe
    if moe is None:
        return ExpertRouterGuide()
    sequences = prepared.mesh.sizes["dp"] * prepared.mbs * prepared.job.schedule.microbatch_size
    forced, each = _forced(prepared, graph, places, rank, device), moe.balance / sequences
    return ExpertRouterGuide(forced, note=note, balance=each, ahead=device.ahead)


def _forced(prepared: PreparedJob, graph: Graph, places: RankPlacement, rank: int, device: Device) -> Choice | None:
    if not prepared.job.routing.forced:
        return None
    found, first = ForcedExperts.of(prepared, graph), places.replica(rank) * prepared.mbs
    source, at, sizes = places.position(rank), places.mesh.coordinates(rank), places.mesh.sizes
    part = at["tp"] + sizes["tp"] * at["cp"]

    def choice(layer: int, number: int) -> Tensor:
        experts = found.experts(layer, source, number - first, number, part)
        return upload(torch.from_numpy(np.array(experts, dtype=np.int64)), device.torch)

    return choice


def planned_routes(
    prepared: PreparedJob, graph: Graph, places: RankPlacement, rank: int
) -> Callable[[str, int], ExpertRoute]:
    """(chunk, microbatch) → how many rows a rank would send and get under the job's `[routing]`."""
    found, group, ranks = ForcedExperts.of(prepared, graph), ExpertGroup.of(places, rank), places.expert_group(rank)
    sources, mine = [places.position(r) for r in ranks], ranks.index(rank)
    numbers = {x.entry.chunk.name: x.number for x in found.layers}

    def route(chunk: str, mb: int) -> ExpertRoute:
        counts = found.counts.tokens(numbers[chunk], mb)[sources].reshape(len(ranks), group.spread, -1)
        here = counts[:, group.experts[mine]].tolist()
        return ExpertRoute(group, counts[mine].tolist(), group.by_columns(here))

    return route
