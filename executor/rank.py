"""What one rank of a run does: rebuild the plan, build its part of the model, train, hand back what happened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from executor.chunk import Gradients, Stage
from executor.data import Batch, Data
from executor.interpreter import Interpreter, StepResult, boundary
from executor.memory import PeakMemory
from executor.modules.base import TORCH
from executor.modules.llama import Llama
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
    """The target of `launch`: train `steps` steps as this rank's program says."""
    s = Spec(**{**spec, "sets": tuple(spec["sets"])})
    prepared, plan = rebuild(s)
    local = Local.of(prepared, plan, ctx.rank)
    transport = ctx.gloo(topology(plan))
    run = local.interpreter(ctx, transport)
    data = _data(prepared)
    needed = run.program.batches()

    def batches(step: int) -> dict[int, Batch]:
        return {mb: data.batch(step, 0, mb) for mb in needed}

    transport.barrier()
    results: list[StepResult] = []
    for step in range(s.steps):
        results.append(run.step(step, batches(step)))
    rows = list(run.rows)
    if s.dump is not None:
        _dump(Path(s.dump), ctx.rank, local)
    # One more step, not timed and not reported, as following every storage makes it slower.
    with PeakMemory(local.tensors()) as memory:
        run.step(s.steps, batches(s.steps))
    ctx.progress.wait(text="end")
    run.close()
    transport.close()
    return {
        "losses": [sorted(r.losses.items()) for r in results],
        "grad_norms": [r.grad_norm for r in results],
        "squares": [r.squares for r in results],
        "peak_bytes": memory.peak,
        "rows": rows,
    }


def topology(plan: Plan) -> Topology:
    """Channels and groups that the plan's programs need."""
    send = np.flatnonzero(plan.kind == OpKind.SEND)
    pairs = zip(plan.program[send].tolist(), plan.program[plan.partner[send]].tolist(), strict=True)
    groups = {group_name(n): n.groups for n in plan.graph.nodes if n.once and n.message is not None}
    return Topology.of(plan.programs, set(pairs), groups)


@dataclass(frozen=True)
class Local:
    """What lives on one rank: stages, every parameter once (two uses are one tensor, one gradient), optimizer."""

    prepared: Prepared
    program: Program
    stages: dict[int, Stage]
    extras: dict[str, tuple[str, ...]]
    params: dict[str, torch.Tensor]
    grads: Gradients
    sync: Sync

    @classmethod
    def of(cls, prepared: Prepared, plan: Plan, rank: int) -> Local:
        """Build this rank's part of the model, with the values every rank would give it."""
        job, precision = prepared.job, precision_of(prepared.job)
        dtype, compute = TORCH[precision.params], TORCH[precision.compute]
        model = Llama(prepared.config, job.model.seed, dtype, compute, parts=True)
        entries = prepared.base.entries
        mine = sorted({n.stage for n in plan.graph.nodes if not n.once and rank in n.groups})
        built = model.build(list(dict.fromkeys(e.chunk.name for e in entries if e.stage in mine)))
        params: dict[str, torch.Tensor] = dict(built.params)
        grads = Gradients(params, TORCH[precision.grads])
        again = [u for u in built.units if u.startswith("l")] if job.schedule.recompute == "full" else []
        stages = {}
        for s in mine:
            units = {e.name: built.units[e.name] for e in entries if e.stage == s}
            stages[s] = Stage(units, params, grads=grads, recompute=[u for u in again if u in units])
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
        return cls(prepared, Program.of(plan, rank), stages, dict(built.extras), params, grads, sync)

    def interpreter(self, ctx: RankContext, transport: Any) -> Interpreter:
        """Ready for the first step."""
        job = self.prepared.job
        shape = job.schedule.microbatch_size, job.model.seq_len, self.prepared.config.hidden
        empty = boundary(*shape, TORCH[precision_of(job).compute])
        return Interpreter(self.program, self.stages, self.extras, self.sync, transport, ctx.progress, empty)

    def tensors(self) -> list[torch.Tensor]:
        """All that persists from step to step."""
        return [*self.params.values(), *self.grads.sums.values(), *self.sync.tensors()]


def _data(prepared: Prepared) -> Data:
    job = prepared.job
    return Data(
        source_name(job),
        vocab=prepared.config.vocab,
        length=job.model.seq_len,
        microbatches=prepared.mbs,
        size=job.schedule.microbatch_size,
        seed=job.data.seed,
    )


def _dump(folder: Path, rank: int, local: Local) -> None:
    """Parameters, and this rank's share of the reduced gradients; NaN stands where another rank has the value."""
    arrays = {f"param/{n}": p.detach().double().numpy() for n, p in local.params.items()}
    for name, (first, piece) in local.sync.reduced().items():
        whole = np.full(local.params[name].numel(), np.nan)
        whole[first : first + len(piece)] = piece.double().numpy()
        arrays[f"grad/{name}"] = whole.reshape(local.params[name].shape)
    np.savez(folder / f"rank-{rank}.npz", **arrays)  # type: ignore[arg-type]
