"""`piper-sim calibrate`: a job's op classes and messages timed on processes of this machine. No plan is run.

On a CPU each process times its own rank's stages while the others time theirs, as they would compute side by side in
a step; then messages are timed on idle ranks. On a GPU ops stand between events, behind a flush of the cache; messages
between GPUs were never timed.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from executor.device.device import CudaDevice, Device
from executor.launch.launch import launch
from executor.launch.refusals import refuse
from executor.measure.kernels import KernelSample, piece_samples, recipes
from executor.measure.links import link_rows, link_samples, met, wanted
from executor.measure.ops import Note, names_of, op_samples, watch_of
from executor.runtime.given import given_text
from executor.runtime.target import Target
from executor.runtime.worker import RankContext
from ir.core.errors import ErrorKind, PiperError
from ir.job.build import PreparedJob
from ir.plan.places import RankPlacement
from ir.plan.plan import Plan

AXES = ("tp", "cp", "ep", "etp")
RANK: Target = "executor.measure.calibrate:measure_rank"
Size = tuple[PreparedJob, Plan]  # a job and its plan


@dataclass(frozen=True)
class ProfileSamples:
    """What was timed, in seconds. ops: by class of node and size of the job. links: by class of message, on one node.

    pieces, recipes: by size, where single kernels were timed instead: samples by piece, and the (piece, times) that
    each class of node consists of. gpu: its name, "" for a CPU. threads: of a process.
    """

    ops: tuple[dict[str, list[float]], ...]
    pieces: tuple[dict[int, list[float]], ...]
    recipes: tuple[dict[str, list[tuple[int, int]]], ...]
    links: dict[str, list[float]]
    gpu: str
    gpus: int
    threads: int


def measure(
    sizes: Sequence[Size], *, processes: int, backend: str, repeats: int, by: str, watchdog_s: float
) -> ProfileSamples:
    """Time every op class of a job in each of its sizes, and the messages of the first.

    Raises PiperError: what cannot be timed so (exit 2), RankFailed (exit 4).
    """
    prepared, plan = sizes[0]
    refuse_processes(backend, processes, prepared.ranks)
    for other, _ in sizes:
        if by == "modules":
            refuse_modules(other)
    wants = wanted(prepared, plan, processes)
    told = []
    for _, its in sizes:
        names = [[*key, found] for key, found in names_of(its).items()]
        told.append({"names": names, "pieces": msgspec.to_builtins(recipes(its)[0]) if by == "kernels" else []})
    args = {"sizes": told, "wants": msgspec.to_builtins(wants), "by": by, "backend": backend, "repeats": repeats}
    given = [given_text(one, its) for one, its in sizes]
    found = launch(RANK, processes, args, given=given, watchdog_s=watchdog_s)
    return _gathered(sizes, found, by, link_samples(wants, [r["links"] for r in found]))


def _gathered(
    sizes: Sequence[Size], found: Sequence[dict[str, Any]], by: str, links: dict[str, list[float]]
) -> ProfileSamples:
    merged: list[dict[str, list[float]]] = []
    for i in range(len(sizes)):
        one: dict[str, list[float]] = {}
        for r in found:
            for name, samples in r["ops"][i].items():
                one[name] = [*one.get(name, []), *samples]
        merged.append(one)
    gpu = str(found[0]["gpu"])
    kernels = by == "kernels"
    return ProfileSamples(
        ops=() if kernels else tuple(merged),
        pieces=tuple({int(k): v for k, v in one.items()} for one in merged) if kernels else (),
        recipes=tuple(recipes(plan)[1] for _, plan in sizes) if kernels else (),
        links=links,
        gpu=gpu,
        gpus=len(found) if gpu else 0,
        threads=int(found[0]["threads"]),
    )


def devices(backend: str) -> int:
    """What there is to compute on: processors, or GPUs."""
    if backend != "nccl":
        return len(os.sched_getaffinity(0))
    return torch.cuda.device_count()


def refuse_processes(backend: str, processes: int, ranks: int) -> None:
    """Raise PiperError: more processes than ranks, or than GPUs where each needs one."""
    if not 1 <= processes <= ranks:
        message = f"{processes} processes for a job of {ranks} ranks"
        raise PiperError(ErrorKind.USAGE, message, key="-n", allowed=f"1 to {ranks}", suggestion=f"-n {ranks}")
    if backend == "nccl" and (gpus := devices(backend)) < processes:
        has = f"this machine has {gpus}" if gpus else "torch sees none here"
        message = f"nccl needs a CUDA GPU for each of {processes} processes, and {has}"
        fix = f"-n {gpus}" if gpus else "--backend gloo, which times ops on the CPU"
        raise PiperError(ErrorKind.USAGE, message, key="--backend", allowed="gloo, nccl", suggestion=fix)


def refuse_modules(prepared: PreparedJob) -> None:
    """Raise PiperError: this executor's modules are not what a rank of the job would compute."""
    for axis in AXES:
        if (size := prepared.mesh.sizes[axis]) > 1:
            message = f"{axis} = {size}: modules are timed one rank at a time, and these would exchange messages"
            raise PiperError(ErrorKind.JOB, message, key=f"parallel.{axis}", allowed="1", suggestion="--by kernels")
    refuse(prepared)


def measure_rank(
    ctx: RankContext, sizes: list[dict[str, Any]], wants: list[dict[str, Any]], by: str, backend: str, repeats: int
) -> dict[str, Any]:
    """The target of `launch`. sizes: the job in each of its sizes, its classes or its kernels. by: which of the two."""
    device, transport, asked, note = met(ctx, wants, backend)
    transport.barrier()  # all compute at once, as in a step
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
        mine = list(enumerate(msgspec.convert(size["pieces"], list[KernelSample])))[ctx.rank :: ctx.world]
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
