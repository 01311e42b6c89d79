"""What a rank's routers are told and note: forced choices, counts of rows, the loss that evens them out."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from executor.parallel.expert_all_to_all import ExpertRoute
from ir.graph.graph import Graph
from ir.job.build import PreparedJob
from ir.job.routing.forced import ForcedExperts
from ir.plan.places import RankPlacement

Choice = Callable[[int, int], Tensor]  # (layer, number of the microbatch in the global batch) → [token, copy] experts
Noted = dict[tuple[int, int], Any]


class ExpertRouterGuide:
    """One for all routers of a rank. forced: their choice, instead of their own. note: keep the first step's counts.

    balance: the weight of a layer's f · P of one sequence in the loss, its coefficient over the sequences of a step.
    """

    def __init__(self, forced: Choice | None = None, *, note: bool = False, balance: float = 0.0) -> None:
        self.forced, self.note, self.balance = forced, note, balance
        self._counts: Noted = {}
        self._losses: Noted = {}

    @property
    def active(self) -> bool:
        """Whether routers must know which microbatch they have."""
        return self.forced is not None or self.note or self.balance > 0

    def chosen(self, layer: int, number: int, experts: int, indices: Tensor) -> None:
        """Note how many rows go to each expert; again where a layer is recomputed."""
        if self.note and not is_fake(indices):
            self._counts[layer, number] = torch.bincount(indices.flatten(), minlength=experts).tolist()

    def weighed(self, layer: int, number: int, loss: Tensor) -> None:
        """Note a layer's loss of a microbatch."""
        if not is_fake(loss):
            self._losses[layer, number] = loss.item() if loss.device.type == "cpu" else loss

    def take(self) -> tuple[list[tuple[int, int, list[int]]], list[tuple[int, int, float]]]:
        """(layer, microbatch, rows by expert) of the first step, and (layer, microbatch, loss), since the last call."""
        counts = [(*at, rows) for at, rows in sorted(self._counts.items())]
        losses = [(*at, float(loss)) for at, loss in sorted(self._losses.items())]
        self._counts, self._losses, self.note = {}, {}, False
        return counts, losses


def guide_of(
    prepared: PreparedJob, graph: Graph, places: RankPlacement, rank: int, device: torch.device, *, note: bool
) -> ExpertRouterGuide:
    """As the job and its config have it. note: keep counts."""
    moe = prepared.config.moe
    if moe is None:
        return ExpertRouterGuide()
    sequences = prepared.mesh.sizes["dp"] * prepared.mbs * prepared.job.schedule.microbatch_size
    return ExpertRouterGuide(_forced(prepared, graph, places, rank, device), note=note, balance=moe.balance / sequences)


def _forced(
    prepared: PreparedJob, graph: Graph, places: RankPlacement, rank: int, device: torch.device
) -> Choice | None:
    if not prepared.job.routing.forced:
        return None
    found, first = ForcedExperts.of(prepared, graph), places.replica(rank) * prepared.mbs
    source, at, sizes = places.position(rank), places.mesh.coordinates(rank), places.mesh.sizes
    part = at["tp"] + sizes["tp"] * at["cp"]

    def choice(layer: int, number: int) -> Tensor:
        experts = found.experts(layer, source, number - first, number, part)
        return torch.tensor(experts.tolist(), device=device)

    return choice


def planned_routes(
    prepared: PreparedJob, graph: Graph, places: RankPlacement, rank: int
) -> Callable[[str, int], ExpertRoute]:
    """(chunk, microbatch) → how many rows a rank would send and get under the job's `[routing]`."""
    found, program = ForcedExperts.of(prepared, graph), places.program(rank)
    ranks = places.group(rank, ("ep",), (program,))
    sources, mine = [places.position(r) for r in ranks], ranks.index(rank)
    numbers = {x.entry.chunk.name: x.number for x in found.layers}

    def route(chunk: str, mb: int) -> ExpertRoute:
        counts = found.counts.tokens(numbers[chunk], mb)[sources].reshape(len(ranks), len(ranks), -1)
        return ExpertRoute(counts[mine].tolist(), counts[:, mine].tolist())

    return route
