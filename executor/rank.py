"""What one rank of a run does: rebuild the plan, build its part of the model, train, hand back what happened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from executor.chunk import Gradients, Stage
from executor.data import Batch, Data
from executor.device import Cuda, Device, Host
from executor.interpreter import Interpreter, boundary
from executor.kernels import BlankStage, BlankSync, Real, Timed
from executor.memory import PeakMemory
from executor.modules.base import TORCH
from executor.modules.choose import model_of, recomputed
from executor.optimizer import OptimizerConfig
from executor.program import Program
from executor.spec import Spec, rebuild, source_name
from executor.sync import Sync, group_name
from executor.transport.base import Topology
from executor.worker import RankContext
from ir.job.build import Prepared, precision_of
from ir.plan import OpKind, Plan
from ir.sync import buckets


def train_rank(ctx: RankContext, **spec: Any) -> dict[str, Any]:
    """The target of `launch`: run `steps` steps as this rank's program says."""
    s = Spec.of(spec)
    prepared, plan = rebuild(s)
    program = Program.of(plan, ctx.rank)
    device = device_of(s, ctx)
    local = Local.of(prepared, plan, ctx.rank, device) if s.real else None
    transport = ctx.connect(s.backend, topology(plan), device)
    kernels = local.kernels() if local is not None else blank(prepared, plan, program, s)
    empty = crossing(prepared, device)
    run = Interpreter(program, kernels, transport, ctx.progress, device, empty, s.emulate_comm)
    batches = _batches(prepared, program, device) if s.real else _blank_batches(program)
    device.mark().wait()
    transport.barrier()
    results = [run.step(step, batches(step)) for step in range(s.steps)]
    rows = list(run.rows)
    peak = None
    if local is not None:
        if s.dump is not None:
            _dump(Path(s.dump), ctx.rank, local)
        # One more step, not timed and not reported, as following every storage makes it slower.
        with PeakMemory(local.tensors()) as memory:
            run.step(s.steps, batches(s.steps))
        peak = memory.peak
    ctx.progress.wait(text="end")
    run.close()
    transport.close()
    return {
        "losses": [sorted(r.losses.items()) for r in results] if s.real else None,
        "grad_norms": [r.grad_norm for r in results] if s.real else None,
        "squares": [r.squares for r in results],
        "peak_bytes": peak,
        "rows": rows,
    }


def device_of(spec: Spec, ctx: RankContext) -> Device:
    """Where this rank computes. What computes nothing needs no GPU."""
    if spec.backend == "nccl":
        return Cuda(ctx.local_rank)
    return Cuda(0) if spec.backend == "local" and spec.real and torch.cuda.is_available() else Host()


def crossing(prepared: Prepared, device: Device) -> Callable[[], torch.Tensor]:
    """Makes an empty tensor of what crosses a stage boundary."""
    job = prepared.job
    shape = job.schedule.microbatch_size, job.model.seq_len, prepared.config.hidden
    return boundary(*shape, TORCH[precision_of(job).compute], device.torch)


def blank(prepared: Prepared, plan: Plan, program: Program, spec: Spec) -> Timed:
    """All that a rank needs where ops take a given time: no model."""
    entries, graph, precision = prepared.base.entries, plan.graph, precision_of(prepared.job)
    mine = sorted({n.stage for n in graph.nodes if not n.once and program.rank in n.groups})
    empty = crossing(prepared, Host())
    stages = {s: BlankStage([e.name for e in entries if e.stage == s], empty, last=s == graph.stages - 1) for s in mine}
    params = len({p.name for e in entries for p in e.part.params})
    reduce, gather = TORCH[precision.reduce], TORCH[precision.params]
    sync = BlankSync(program.rank, buckets(graph), params, reduce, gather)
    return Timed(stages, sync, spec.seconds(plan))


def topology(plan: Plan) -> Topology:
    """Channels and groups that the plan's programs need."""
    send = np.flatnonzero(plan.kind == OpKind.SEND)
    pairs = zip(plan.program[send].tolist(), plan.program[plan.partner[send]].tolist(), strict=True)
    groups = {group_name(n): n.groups for n in plan.graph.nodes if n.once and n.message is not None}
    return Topology.of(plan.programs, set(pairs), groups)


@dataclass(frozen=True)
class Local:
    """What lives on one rank: stages, every parameter once (two uses are one tensor, one gradient), optimizer."""

    stages: dict[int, Stage]
    extras: dict[str, tuple[str, ...]]
    params: dict[str, torch.Tensor]
    grads: Gradients
    sync: Sync

    @classmethod
    def of(cls, prepared: Prepared, plan: Plan, rank: int, device: Device) -> Local:
        """Build this rank's part of the model, with the values every rank would give it."""
        job, precision = prepared.job, precision_of(prepared.job)
        model = model_of(prepared)
        entries = prepared.base.entries
        mine = sorted({n.stage for n in plan.graph.nodes if not n.once and rank in n.groups})
        built = model.build(list(dict.fromkeys(e.chunk.name for e in entries if e.stage in mine)))
        for unit in built.units.values():
            unit.to(device.torch)  # moves the parameters themselves, so that ties stay ties
        device.bind()
        params: dict[str, torch.Tensor] = dict(built.params)
        grads = Gradients(params, TORCH[precision.grads])
        again = recomputed(prepared)
        stages = {}
        for s in mine:
            units = {e.name: built.units[e.name] for e in entries if e.stage == s}
            stages[s] = Stage(units, params, grads=grads, recompute=again, reads=built.reads)
        sync = Sync(
            rank,
            buckets(plan.graph),
            params,
            grads,
            list(model.shapes),
            OptimizerConfig(job.optimizer.name, job.optimizer.lr, job.optimizer.clip_norm),
            reduce=TORCH[precision.reduce],
            moments=TORCH[precision.optimizer],
        )
        return cls(stages, dict(built.extras), params, grads, sync)

    def kernels(self) -> Real:
        """As the interpreter takes it."""
        return Real(self.stages, self.extras, self.sync)

    def tensors(self) -> list[torch.Tensor]:
        """All that persists from step to step."""
        return [*self.params.values(), *self.grads.sums.values(), *self.sync.tensors()]


def _batches(prepared: Prepared, program: Program, device: Device) -> Callable[[int], dict[int, Batch]]:
    """Step → the microbatches that this rank reads, on its device."""
    job, needed = prepared.job, program.batches()
    data = Data(
        source_name(job),
        vocab=prepared.config.vocab,
        length=job.model.seq_len,
        microbatches=prepared.mbs,
        size=job.schedule.microbatch_size,
        seed=job.data.seed,
    )

    def one(step: int, mb: int) -> Batch:
        batch = data.batch(step, 0, mb)
        return Batch(batch.ids.to(device.torch), batch.labels.to(device.torch), batch.scale)

    return lambda step: {mb: one(step, mb) for mb in needed}


def _blank_batches(program: Program) -> Callable[[int], dict[int, Batch]]:
    """Nobody reads them."""
    one = dict.fromkeys(program.batches(), Batch(torch.zeros(0), torch.zeros(0), 1.0))
    return lambda step: one


def _dump(folder: Path, rank: int, local: Local) -> None:
    """Parameters, and this rank's share of the reduced gradients; NaN stands where another rank has the value."""
    arrays = {f"param/{n}": p.detach().double().cpu().numpy() for n, p in local.params.items()}
    for name, (first, piece) in local.sync.reduced().items():
        whole = np.full(local.params[name].numel(), np.nan)
        whole[first : first + len(piece)] = piece.double().cpu().numpy()
        arrays[f"grad/{name}"] = whole.reshape(local.params[name].shape)
    np.savez(folder / f"rank-{rank}.npz", **arrays)  # type: ignore[arg-type]
