"""Ranks that train the same model under torch's FSDP2: every unit sharded, gradients reduced by every microbatch."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from executor.modules.base import evaluate
from executor.modules.choose import model_of
from executor.runtime.batch import MicrobatchLoader
from executor.runtime.worker import RankContext


class Whole(nn.Module):
    """The model as one module, and the loss behind it."""

    def __init__(self, built: Any) -> None:
        super().__init__()
        self.built, self.units = built, nn.ModuleList(built.units.values())

    def forward(self, ids: Tensor, extras: dict[str, tuple[object, ...]]) -> Tensor:
        return evaluate(self.built, ids, extras)


def train(ctx: RankContext, steps: int, folders: list[str]) -> list[list[float]]:
    """The global losses of each job that was given; gradients and parameters of the first step and the last go to its
    folder, whole."""
    dist.init_process_group("gloo", store=ctx.store(), rank=ctx.rank, world_size=ctx.world)
    out = [_one(ctx, number, steps, Path(folder)) for number, folder in enumerate(folders)]
    dist.barrier()
    dist.destroy_process_group()
    return out


def _one(ctx: RankContext, number: int, steps: int, folder: Path) -> list[float]:
    prepared, _ = ctx.given(number)
    job, model = prepared.job, model_of(prepared)
    built = model.build(list(model.chunks))
    whole, parts = Whole(built), job.parallel.dp_replicate
    ranks, names = torch.arange(ctx.world).view(parts, -1), ("dp_replicate", "dp_shard")
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names) if parts > 1 else DeviceMesh("cpu", ranks[0])
    sharded = [fully_shard(u, mesh=mesh, reshard_after_forward=job.parallel.zero == 3) for u in whole.units]
    for module in [*sharded, fully_shard(whole, mesh=mesh)]:
        module.set_gradient_divide_factor(1.0)
    known = {id(p): n for n, p in built.params.items()}
    assert not known.keys() & {id(p) for p in whole.parameters()}, "FSDP2 has parameters of its own"
    params = dict(zip(built.params, whole.parameters(), strict=True))
    make = torch.optim.SGD if job.optimizer.name == "sgd" else torch.optim.AdamW
    optimizer = make(params.values(), lr=job.optimizer.lr)
    replicas, size = prepared.mesh.sizes["dp"], job.schedule.microbatch_size
    sizes = dict(length=job.model.seq_len, replicas=replicas, microbatches=prepared.mbs, size=size)
    data = MicrobatchLoader("synthetic", vocab=prepared.config.vocab, **sizes)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for mb in range(prepared.mbs):
            batch = data.batch(step, ctx.rank, mb)
            loss = whole(batch.ids, {u: batch.extras(w) for u, w in built.extras.items()})
            loss.backward()
            total += loss.detach()
        told = step in (0, steps - 1)
        grads = {n: p.grad.full_tensor().clone() for n, p in params.items()} if told else {}
        if job.optimizer.clip_norm:
            nn.utils.clip_grad_norm_(params.values(), job.optimizer.clip_norm)
        optimizer.step()
        dist.all_reduce(total)
        losses.append(total.item())
        if not told:
            continue
        arrays = {f"grad/{n}": g.numpy() for n, g in grads.items()}
        arrays |= {f"param/{n}": p.full_tensor().detach().numpy() for n, p in params.items()}
        if ctx.rank == 0:
            np.savez(folder / ("first.npz" if step == 0 else "last.npz"), **arrays)
    return losses
