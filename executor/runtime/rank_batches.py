"""The microbatches that one rank reads: of training, of evaluation, or of nothing at all."""

from __future__ import annotations

from collections.abc import Callable

import torch

from executor.data.tokens import source_name
from executor.device.device import Device, HostDevice
from executor.runtime.batch import Microbatch, MicrobatchLoader, PendingMicrobatch
from executor.runtime.program import RankPlan
from ir.job.build import PreparedJob

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
    nothing = PendingMicrobatch(Microbatch(torch.zeros(0), torch.zeros(0), 1.0), HostDevice.torch)
    one = dict.fromkeys(program.batches(), nothing)
    return lambda step: one


def rank_tests(prepared: PreparedJob, program: RankPlan, device: Device) -> Batches | None:
    """What is evaluated."""
    source = prepared.job.run.eval_source
    return None if source is None else rank_batches(prepared, program, device, source)
