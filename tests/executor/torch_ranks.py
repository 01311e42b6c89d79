"""Ranks that train by torch's pipelining runtime, several plans one after the other in one set of processes."""

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from executor.runtime.batch import MicrobatchLoader
from executor.runtime.worker import RankContext
from experiments.step_time import TorchPipeline


def train(ctx: RankContext, steps: int, folders: list[str]) -> list[list[list[float]]]:
    """[plan][step] the microbatches' losses where the last stage is; gradients and parameters go to its folder."""
    dist.init_process_group("gloo", store=ctx.store(), rank=ctx.rank, world_size=ctx.world)
    out = [_one(ctx, number, steps, Path(folder)) for number, folder in enumerate(folders)]
    dist.barrier()
    dist.destroy_process_group()
    return out


def _one(ctx: RankContext, number: int, steps: int, folder: Path) -> list[list[float]]:
    prepared, plan = ctx.given(number)
    job, config = prepared.job, prepared.config
    pipe = TorchPipeline(prepared, plan, ctx.rank, folder / "order.csv")
    optimizer = torch.optim.SGD(pipe.params.values(), lr=job.optimizer.lr)
    size, length = job.schedule.microbatch_size, job.model.seq_len
    data = MicrobatchLoader("synthetic", vocab=config.vocab, length=length, microbatches=prepared.mbs, size=size)
    losses = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        losses.append(pipe.step([data.batch(step, 0, mb) for mb in range(prepared.mbs)]))
        optimizer.step()
    arrays = {f"grad/{n}": g for n, g in pipe.grads().items()}
    arrays |= {f"param/{n}": p.detach() for n, p in pipe.params.items()}
    save_file(arrays, folder / f"rank-{ctx.rank}.safetensors")
    return losses
