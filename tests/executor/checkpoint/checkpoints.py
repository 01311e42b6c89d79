"""Helpers of the checkpoint tests: the state of every rank of a plan, without a model, and training runs that save."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from executor.checkpoint.keeper import RankCheckpoint
from executor.checkpoint.manifest import read_manifest
from executor.checkpoint.pieces import ShardPiece
from executor.checkpoint.reader import digests
from executor.modules.base import TORCH
from executor.optim.optimizer import ParamGradients
from executor.optim.sync import BucketSync, BucketSyncConfig
from executor.parallel.shares import ParamShard, shares
from ir.graph.sync import buckets
from ir.job.build import PreparedJob, precision_of
from ir.job.run_options import CheckpointOptions
from ir.plan.places import RankPlacement
from ir.plan.plan import Plan
from tests.executor.pairwise import cover
from tests.executor.runs import Ran, judged, run

Values = dict[str, dict[str, Tensor]]  # slot → parameter → all of it


class Alone:
    """A transport, or a pen, for a rank whose others are looked after one by one."""

    def barrier(self) -> None:
        pass

    def op(self, index: int, text: str) -> None:
        pass

    def wait(self, peers: Any = (), text: str | None = None) -> None:
        pass

    def go_on(self) -> None:
        pass


@dataclass(frozen=True)
class State:
    """What the ranks of a plan hold, and the keeper of each."""

    prepared: PreparedJob
    plan: Plan
    held: list[dict[str, ParamShard]]
    syncs: list[BucketSync]

    @classmethod
    def of(cls, folder: Path, *sets: str) -> State:
        """All zero."""
        folder.mkdir(exist_ok=True)
        prepared, plan = judged(folder, *sets)
        places, held, syncs = RankPlacement.of(plan), [], []
        for rank in range(prepared.ranks):
            held.append(shares(plan.graph, places.mesh.coordinates(rank)))
            syncs.append(_sync(prepared, plan, rank, held[-1]))
        return cls(prepared, plan, held, syncs)

    def keepers(self, saving: CheckpointOptions) -> list[RankCheckpoint]:
        """One for each rank."""
        pen: Any = Alone()
        both = zip(self.syncs, self.held, strict=True)
        return [
            RankCheckpoint(saving, self.prepared, self.plan, r, sync, held, pen) for r, (sync, held) in enumerate(both)
        ]

    def fill(self, values: Values) -> None:
        """Give every rank its part of these, and its parameters what follows from the weights."""
        for sync, held in zip(self.syncs, self.held, strict=True):
            for name, (first, flat) in sync.weights().items():
                flat.copy_(part(values["weight"][name], held[name], first, len(flat)))
            for name, first, slots in sync.kept():
                for slot, flat in slots.items():
                    flat.copy_(part(values[slot][name], held[name], first, len(flat)))

    def forget(self) -> None:
        """All zero again."""
        for sync in self.syncs:
            sync.optimizer.resume(0)
            flats = [flat for _, _, slots in sync.kept() for flat in slots.values()]
            for flat in (*flats, *(flat for _, flat in sync.weights().values())):
                flat.zero_()

    def save(self, folder: Path, step: int, **flags: Any) -> Path:
        """All ranks save."""
        transport: Any = Alone()
        keepers = self.keepers(CheckpointOptions(save=str(folder), **flags))
        for keeper in keepers:
            keeper.begin(transport)
        for keeper in reversed(keepers):  # rank 0 last: it finds what the others have written
            keeper.after(step, step, transport)
        keepers[0].close(transport)
        assert keepers[0].saved is not None
        return Path(keepers[0].saved)

    def load(self, checkpoint: Path) -> None:
        """All ranks load."""
        transport: Any = Alone()
        for keeper in self.keepers(CheckpointOptions(resume=str(checkpoint))):
            keeper.begin(transport)

    def check(self, values: Values) -> int:
        """Every rank holds its part of these, to the bit. Returns how many elements were compared."""
        count = 0
        for sync, held in zip(self.syncs, self.held, strict=True):
            for name, (first, flat) in sync.weights().items():
                assert torch.equal(flat, part(values["weight"][name], held[name], first, len(flat)).to(flat.dtype))
            for name, first, slots in sync.kept():
                for slot, flat in slots.items():
                    count += len(flat)
                    assert torch.equal(flat, part(values[slot][name], held[name], first, len(flat)).to(flat.dtype))
        return count


def _sync(prepared: PreparedJob, plan: Plan, rank: int, held: Mapping[str, ParamShard]) -> BucketSync:
    job, precision, places = prepared.job, precision_of(prepared.job), RankPlacement.of(plan)
    found = buckets(plan.graph)
    here = {n for b in found if places.program(rank) in b.owners for n in b.params}
    params = {n: torch.zeros(s.local, dtype=TORCH[precision.params]) for n, s in held.items() if n in here}
    optimizer = job.optimizer
    config = BucketSyncConfig(optimizer, TORCH[precision.reduce], TORCH[precision.optimizer])
    grads = ParamGradients(params, TORCH[precision.grads])
    return BucketSync(rank, places, found, params, grads, list(held), config)


def part(whole: Tensor, share: ParamShard, first: int, count: int) -> Tensor:
    """A piece, by plain indexing."""
    return share.take(whole).reshape(-1)[first : first + count]


def drawn(state: State, slots: tuple[str, ...], dtype: torch.dtype) -> Values:
    """Values for every parameter of a model."""
    draw = torch.Generator().manual_seed(5)
    shapes = {p.name: p.shape for e in state.prepared.base.entries for p in e.part.params}
    return {s: {n: torch.rand(shape, generator=draw, dtype=dtype) for n, shape in shapes.items()} for s in slots}


def elements(pieces: list[ShardPiece]) -> Tensor:
    """How many of these pieces each element of the whole parameter is in, by plain indexing."""
    shape = pieces[0].share.shape
    count, index = torch.zeros(shape).reshape(-1), torch.arange(count_of(shape)).view(shape)
    for p in pieces:
        count[part(index, p.share, p.first, p.count)] += 1
    return count


def count_of(shape: tuple[int, ...]) -> int:
    """Elements."""
    return ShardPiece.whole(shape).count


# -- runs -------------------------------------------------------------------------------------------------------------


def saved(folder: Path, *sets: str, steps: int, every: int | None = None, **options: Any) -> Ran:
    """A run that saves."""
    return run(*sets, steps=steps, saving=CheckpointOptions(save=str(folder), every=every), **options)


def resumed(
    folder: Path, *sets: str, steps: int, save: Path | None = None, every: int | None = None, **options: Any
) -> Ran:
    """A run that takes up what another has saved."""
    saving = CheckpointOptions(resume=str(folder), save=None if save is None else str(save), every=every)
    return run(*sets, steps=steps, saving=saving, **options)


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every value in a checkpoint, by name."""
    return digests(folder, read_manifest(folder))


SCHEDULES = ("1f1b", "gpipe", "zb1p", "interleaved-1f1b", "zbv", "dualpipe")
FORMATS = {
    "fp64": ("precision.compute=fp64",),
    "fp32": ("precision.compute=fp32",),
    "bf16": ("precision.compute=bf16", "precision.optimizer=fp32", "precision.grads=fp32"),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "mesh": ((1, 1), (1, 2), (2, 1), (2, 2), (1, 4)),
    "zero": (0, 1, 2, 3),
    "schedule": SCHEDULES,
    "optimizer": ("adamw", "sgd"),
    "format": tuple(FORMATS),
    "tied": (False, True),
    "clip": (0.0, 0.3),
}


@dataclass(frozen=True)
class Case:
    """A training run that is interrupted. mesh: pp and dp."""

    mesh: tuple[int, int]
    zero: int
    schedule: str
    optimizer: str
    format: str
    tied: bool
    clip: float

    @property
    def legal(self) -> bool:
        """Whether there is such a job, and its level of ZeRO means something."""
        pp, dp = self.mesh
        return not (self.schedule == "dualpipe" and pp == 1) and not (self.zero and dp == 1)

    def __str__(self) -> str:
        pp, dp = self.mesh
        words = [w for w in ("tied", "clip") if getattr(self, w)]
        return " ".join([f"pp{pp} dp{dp} zero{self.zero}", self.schedule, self.optimizer, self.format, *words])

    @property
    def sets(self) -> tuple[str, ...]:
        """As overrides of the tests' job."""
        pp, dp = self.mesh
        falls = ("schedule=cosine", "warmup_steps=2", "decay_steps=4", "weight_decay=0.5", 'no_decay=["*norm*"]')
        more = tuple(f"optimizer.{k}" for k in falls if self.optimizer == "adamw")
        tied = ("model.tie_word_embeddings=true",) if self.tied else ()
        return (
            f"parallel.pp={pp}",
            f"parallel.dp={dp}",
            f"parallel.zero={self.zero}",
            f"schedule.name={self.schedule}",
            f"schedule.microbatches={4 // dp}",
            f"optimizer.name={self.optimizer}",
            f"optimizer.lr={0.2 if self.optimizer == 'sgd' else 0.01}",
            f"optimizer.clip_norm={self.clip}",
            *FORMATS[self.format],
            *tied,
            *more,
        )


def covering(seed: int = 5) -> list[Case]:
    """Few cases in which every two values of two factors meet, those that bring most together first.

    >>> found = covering(); len(found) < 40, {c.schedule for c in found[:6]} == set(SCHEDULES)
    (True, True)
    """
    cases = [c for row in product(*FACTORS.values()) if (c := Case(*row)).legal]
    random.Random(seed).shuffle(cases)
    return cover(cases, [f.name for f in fields(Case)])
