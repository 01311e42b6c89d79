"""What one rank of a run does: rebuild the plan, build its part of the model, train, hand back what happened."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from executor.chunk import Gradients, Stage
from executor.data import Data
from executor.interpreter import Interpreter, empty_like_activation
from executor.modules.base import TORCH
from executor.modules.llama import Llama
from executor.optimizer import OptimizerConfig
from executor.sync import Sync
from executor.transport.base import Topology
from executor.worker import RankContext
from ir.errors import ErrorKind, PiperError
from ir.job import Job, load_job
from ir.job.build import Prepared, precision_of, prepare
from ir.plan import OpKind, Plan
from ir.plan_text import plan_digest
from ir.rules import check_plan
from ir.sync import buckets
from ir.work import DType


@dataclass(frozen=True)
class Spec:
    """A run as the launcher hands it to every rank: the job, the strategy that was judged, the digest it must have."""

    job: str
    sets: tuple[str, ...]
    strategy: str
    schedule: str
    digest: str
    steps: int
    dump: str | None = None


def rebuild(spec: Spec) -> tuple[Prepared, Plan]:
    """The plan that was judged, built again from job and strategy. Raises PiperError where the digest differs."""
    job = load_job(spec.job, spec.sets)
    schedule = replace(job.schedule, name=None, directives=spec.strategy, builder=None, csv=None)
    prepared = replace(prepare(replace(job, schedule=schedule)), schedule=spec.schedule)
    plan = prepared.plan()
    if (found := plan_digest(plan)) != spec.digest:
        raise PiperError(ErrorKind.ILLEGAL_PLAN, f"the plan's digest is {found}, {spec.digest} was to be run")
    check_plan(plan)
    return prepared, plan


def refuse(job: Job, prepared: Prepared) -> None:
    """Refuse what the executor does not run yet, before any process starts."""
    sizes = prepared.mesh.sizes
    for axis in ("tp", "cp", "dp", "ep"):
        if sizes[axis] > 1:
            message = f"{axis} = {sizes[axis]} is planned and simulated, but not executed yet"
            raise PiperError(ErrorKind.JOB, message, key=f"parallel.{axis}", suggestion=f"{axis} = 1")
    if job.parallel.zero > 1:
        message = f"ZeRO-{job.parallel.zero} is planned and simulated, but not executed yet"
        raise PiperError(ErrorKind.JOB, message, key="parallel.zero", suggestion="zero = 1")
    if job.schedule.recompute not in ("none", "full"):
        message = f"recompute = {job.schedule.recompute!r} is not executed yet"
        raise PiperError(ErrorKind.JOB, message, key="schedule.recompute", suggestion='"none" or "full"')
    if job.model.module is not None:
        raise PiperError(ErrorKind.JOB, "a module of your own is not executed yet", key="model.module")
    if DType(job.precision.compute) not in (DType.FP64, DType.FP32, DType.BF16):
        message = f"run does not compute in {job.precision.compute}"
        raise PiperError(ErrorKind.JOB, message, key="precision.compute", allowed="bf16, fp32, fp64", suggestion="fp32")
    Llama(prepared.config)


def train_rank(ctx: RankContext, **spec: Any) -> dict[str, Any]:
    """The target of `launch`: train `steps` steps as this rank's program says."""
    s = Spec(**{**spec, "sets": tuple(spec["sets"])})
    prepared, plan = rebuild(s)
    job = prepared.job
    precision = precision_of(job)
    model = Llama(
        prepared.config,
        seed=job.model.seed,
        dtype=TORCH[precision.params],
        compute=TORCH[precision.compute],
        parts=True,
    )
    stages, extras, params, grads = _stages(prepared, plan, ctx.rank, model, TORCH[precision.grads])
    size, length = job.schedule.microbatch_size, job.model.seq_len
    data = Data(
        job.data.source,
        vocab=prepared.config.vocab,
        length=length,
        microbatches=prepared.mbs,
        size=size,
        seed=job.data.seed,
    )
    config = OptimizerConfig(job.optimizer.name, job.optimizer.lr, job.optimizer.clip_norm)
    order = list(model.shapes)
    sync = Sync(ctx.rank, buckets(prepared.graph()), params, grads, order, config, TORCH[precision.optimizer])
    act = empty_like_activation(size, length, prepared.config.hidden, TORCH[precision.compute])
    transport = ctx.gloo(topology(plan))
    run = Interpreter(plan, ctx.rank, stages, extras, sync, transport, ctx.progress, act)
    transport.barrier()
    results = []
    for step in range(s.steps):
        results.append(run.step(step, lambda mb, step=step: data.batch(step, 0, mb)))  # type: ignore[misc]
    transport.close()
    if s.dump is not None:
        _dump(Path(s.dump), ctx.rank, grads, params)
    return {
        "losses": [sorted(r.losses.items()) for r in results],
        "grad_norms": [r.grad_norm for r in results],
        "rows": run.rows,
    }


def topology(plan: Plan) -> Topology:
    """Channels and groups that the plan's programs need."""
    send = np.flatnonzero(plan.kind == OpKind.SEND)
    pairs = zip(plan.program[send].tolist(), plan.program[plan.partner[send]].tolist(), strict=True)
    groups = {n.text(): n.groups for n in plan.graph.nodes if n.once and n.message is not None}
    return Topology.of(plan.programs, set(pairs), groups)


def _stages(
    prepared: Prepared, plan: Plan, rank: int, model: Llama, dtype: torch.dtype
) -> tuple[dict[int, Stage], dict[str, tuple[str, ...]], dict[str, torch.Tensor], Gradients]:
    """The stages this rank holds; copies of a parameter used by two of them are one tensor, one gradient."""
    mine = sorted({n.stage for n in plan.graph.nodes if not n.once and rank in n.groups})
    entries = prepared.base.entries
    chunks = list(dict.fromkeys(e.chunk.name for e in entries if e.stage in mine))
    built = model.build(chunks)
    params: dict[str, torch.Tensor] = dict(built.params)
    grads = Gradients(params, dtype)
    recompute = [u for u in built.units if u.startswith("l")] if prepared.job.schedule.recompute == "full" else []
    stages = {}
    for s in mine:
        names = [e.name for e in entries if e.stage == s]
        units = {n: built.units[n] for n in names}
        stages[s] = Stage(units, params, grads=grads, recompute=[u for u in recompute if u in units])
    return stages, dict(built.extras), params, grads


def _dump(folder: Path, rank: int, grads: Gradients, params: dict[str, torch.Tensor]) -> None:
    arrays = {f"grad/{n}": g.double().numpy() for n, g in grads.sums.items()}
    arrays |= {f"param/{n}": p.detach().double().numpy() for n, p in params.items()}
    np.savez(folder / f"rank-{rank}.npz", **arrays)  # type: ignore[arg-type]
