"""What is trained on, and what of it one rank reads: any plan sees the same (step, sequence of the global batch)."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor.data.tokens import source_name, source_of
from executor.device.device import Device, HostDevice, upload
from executor.modules.base import DRAWS, NUMBER
from executor.runtime.program import RankPlan
from ir.job.build import PreparedJob


@dataclass(frozen=True)
class Microbatch:
    """One microbatch: (sequences, length) of token ids and of labels; scale: 1 / the step's valid tokens.

    number: in the global batch. step: counted over resumes.
    """

    ids: Tensor
    labels: Tensor
    scale: float
    number: int = 0
    step: int = 0

    @property
    def following(self) -> Tensor:
        """Of each token the next one, also where it counts for nothing as a label; the last one's is known as that."""
        return torch.cat((self.ids[:, 1:], self.labels[:, -1:].clamp_min(0)), 1)

    @property
    def draws(self) -> Tensor:
        """What dropout depends on, where one trains."""
        return torch.tensor([self.step, self.number, 1], device="cpu")

    def extras(self, wants: tuple[str, ...]) -> tuple[object, ...]:
        return tuple(getattr(self, w) for w in wants)


@dataclass(frozen=True)
class PendingMicrobatch:
    """A microbatch that is still the loader's: who asks for a part of it gets a copy on the device, his own."""

    batch: Microbatch
    device: torch.device

    @property
    def ids(self) -> Tensor:
        return upload(self.batch.ids, self.device)

    def extras(self, wants: tuple[str, ...]) -> tuple[object, ...]:
        found = self.batch.extras(wants)
        return tuple(upload(x, self.device) if isinstance(x, Tensor) else x for x in found)


def unit_extras(
    wants: tuple[str, ...], known: tuple[int, int, bool], batch: PendingMicrobatch | None, device: torch.device
) -> tuple[object, ...]:
    """What a unit reads of a microbatch. known: step, microbatch's number, whether to drop. batch: if one is here."""
    if wants == NUMBER:
        return known[1:2]
    rest = tuple(w for w in wants if w != DRAWS)
    found = iter(batch.extras(rest) if batch is not None and rest else ())
    return tuple(upload(torch.tensor(known, device="cpu"), device) if w == DRAWS else next(found) for w in wants)


class MicrobatchLoader:
    """The microbatches of each step: replica r's microbatch m is sequences (r·M + m)·size … of the global batch.

    source: "synthetic", or a path to text or tokens.

    >>> data = MicrobatchLoader("synthetic", vocab=100, length=8, replicas=2, microbatches=3, size=2)
    >>> data.batch(0, replica=1, mb=2).ids.shape, data.valid_tokens(0)
    (torch.Size([2, 8]), 96)
    """

    def __init__(
        self,
        source: str,
        *,
        vocab: int,
        length: int,
        replicas: int = 1,
        microbatches: int = 1,
        size: int = 1,
        seed: int = 0,
    ) -> None:
        self.length, self.replicas, self.microbatches, self.size = length, replicas, microbatches, size
        self.source = source_of(source, vocab, seed, self.sequences)

    @property
    def sequences(self) -> int:
        return self.replicas * self.microbatches * self.size

    def batch(self, step: int, replica: int, mb: int) -> Microbatch:
        number = replica * self.microbatches + mb
        first = number * self.size
        rows = np.stack([self.source.sequence(step, first + i, self.length) for i in range(self.size)])
        ids, labels = (torch.from_numpy(np.ascontiguousarray(rows[:, k])) for k in (0, 1))
        scale = 1.0 / max(1, self.valid_tokens(step))
        return Microbatch(ids, labels, scale, number, step)

    def valid_tokens(self, step: int) -> int:
        """Labels of the whole global batch that count; every rank finds the same without asking another."""
        return self.sequences * self.length - self.source.missing(step, self.length)


Batches = Callable[[int], dict[int, PendingMicrobatch]]


def rank_batches(prepared: PreparedJob, program: RankPlan, device: Device, source: str | None = None) -> Batches:
    """Step → the microbatches that this rank reads; what of them is on its device, is so while it is used."""
    job, needed = prepared.job, program.batches()
    data = MicrobatchLoader(
        source_name(job, source),
        vocab=prepared.config.vocab,
        length=job.model.seq_len,
        replicas=prepared.mesh.sizes["dp"],
        microbatches=prepared.mbs,
        size=job.schedule.microbatch_size,
        seed=job.data.seed,
    )

    def one(step: int, mb: int) -> PendingMicrobatch:
        return PendingMicrobatch(data.batch(step, program.places.replica(program.rank), mb), device.torch)

    return lambda step: {mb: one(step, mb) for mb in needed}


def blank_batches(program: RankPlan) -> Batches:
    """Nobody reads them."""
    none = torch.zeros(0, device="cpu")
    nothing = PendingMicrobatch(Microbatch(none, none, 1.0), HostDevice.torch)
    one = dict.fromkeys(program.batches(), nothing)
    return lambda step: one


def rank_tests(prepared: PreparedJob, program: RankPlan, device: Device) -> Batches | None:
    """What is evaluated."""
    source = prepared.job.run.eval_source
    return None if source is None else rank_batches(prepared, program, device, source)
