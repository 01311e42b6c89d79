"""What one process of a calibration does: time its share of the ops, meet the others, time messages with them."""

from __future__ import annotations

from typing import Any

import torch

from executor.device.device import CudaDevice, Device, HostDevice, gpu_of
from executor.measure.kernels import KernelSample, piece_samples
from executor.measure.links import MessageSample, link_rows, topology
from executor.measure.ops import Note, op_samples
from executor.measure.watch import watch_of
from executor.runtime.worker import RankContext
from ir.core.work import DType, MessageKind
from ir.plan.places import RankPlacement
from ir.plan.plan import Plan


def measure_rank(
    ctx: RankContext, sizes: list[dict[str, Any]], wants: list[dict[str, Any]], by: str, backend: str, repeats: int
) -> dict[str, Any]:
    """The target of `launch`. sizes: the job in each of its sizes, its classes or its kernels. by: which of the two."""
    device: Device = CudaDevice(gpu_of(ctx.local_rank)) if backend == "nccl" else HostDevice()
    device.bind()
    asked = [_want(w) for w in wants]
    transport = ctx.connect(backend, topology(asked, ctx.world), device)
    transport.barrier()  # all compute at once, as in a step
    done = 0

    def note(text: str) -> None:
        nonlocal done
        done += 1
        ctx.progress.op(done, text)

    ops = [_ops(ctx, number, size, device, by, repeats, note) for number, size in enumerate(sizes)]
    ctx.progress.wait(text="the other ranks")
    transport.barrier()
    rows = link_rows(asked, transport, device, repeats, note)
    ctx.progress.wait(text="end")
    transport.close()
    gpu = torch.cuda.get_device_name(device.torch) if isinstance(device, CudaDevice) else ""
    return {"ops": ops, "links": rows, "gpu": gpu, "threads": torch.get_num_threads()}


def _ops(
    ctx: RankContext, number: int, size: dict[str, Any], device: Device, by: str, repeats: int, note: Note
) -> dict[str, list[float]]:
    prepared, plan = ctx.given(number)
    watch = watch_of(device)
    if by == "kernels":
        mine = list(enumerate(map(KernelSample.of, size["pieces"])))[ctx.rank :: ctx.world]
        return piece_samples(prepared, mine, device.torch, watch, repeats, note)
    names = {(int(stage), kind, part): name for stage, kind, part, name in size["names"]}
    out: dict[str, list[float]] = {}
    for rank in _mine(ctx, plan):
        for name, samples in op_samples(prepared, plan, names, rank, device, watch, repeats, note).items():
            out[name] = [*out.get(name, []), *samples]
    return out


def _mine(ctx: RankContext, plan: Plan) -> list[int]:
    """The ranks of the job that this process stands for: one of each program that is its to time."""
    places = RankPlacement.of(plan)
    if places.ranks == ctx.world:
        return [ctx.rank]
    return [ranks[0] for ranks in places.table][ctx.rank :: ctx.world]


def _want(fields: dict[str, Any]) -> MessageSample:
    members, sizes = tuple(fields["members"]), tuple(fields["sizes"])
    return MessageSample(MessageKind(fields["kind"]), members, sizes, DType(fields["dtype"]))
