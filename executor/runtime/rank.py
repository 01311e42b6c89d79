"""What one rank of a run does: take its program, build its part of the model, train, hand back what happened."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from executor.autograd.stage import Stage
from executor.checkpoint.keeper import RankCheckpoint
from executor.device.device import CudaDevice, Device, HostDevice
from executor.device.memory import PeakMemory
from executor.device.race import RaceDevice
from executor.modules.base import TORCH
from executor.modules.choose import model_of, recomputed
from executor.modules.user.model import UserModel
from executor.optim.gradients import ParamGradients
from executor.optim.sync import BucketSync, BucketSyncConfig
from executor.parallel.collective import groups
from executor.parallel.expert_all_to_all import ExpertRoute
from executor.parallel.inline import RankRegion, inline_groups
from executor.parallel.router_guide import ExpertRouterGuide, guide_of, planned_routes
from executor.parallel.shares import ParamShard, shares
from executor.runtime.batch import Batches, PendingMicrobatch, blank_batches, rank_batches, rank_tests
from executor.runtime.interpreter import PlanInterpreter, StepResult, boundary
from executor.runtime.kernels import BlankBucketSync, BlankStage, RealKernels, TimedKernels
from executor.runtime.program import RankPlan
from executor.runtime.spec import PlanRun
from executor.runtime.worker import RankContext
from executor.transport.base import TransportTopology
from ir.graph.expert_rows import spread_over
from ir.graph.sync import buckets, repeated
from ir.job.build import PreparedJob, precision_of
from ir.job.run_options import JobRunOptions
from ir.plan.places import RankPlacement, several, sharers
from ir.plan.plan import OpKind, Plan

Losses = list[tuple[int, float]]  # (microbatch of the global batch, its share of the loss)


def train_rank(ctx: RankContext, **spec: Any) -> dict[str, Any]:
    """The target of `launch`: run `steps` steps as this rank's program says."""
    s = PlanRun.of(spec)
    o = s.options
    prepared, plan = ctx.given()
    program = RankPlan.of(plan, ctx.rank)
    device = device_of(o, ctx)
    transport = ctx.connect(o.backend, topology(plan), device)
    region = RankRegion.of(plan, ctx.rank, transport, ctx.progress)
    local = RankModel.of(prepared, plan, ctx.rank, device, region, note=s.note) if o.real else None
    kernels = local.kernels() if local is not None else blank(prepared, plan, program, s)
    empty = crossing(prepared, device, region)
    run = PlanInterpreter(program, kernels, transport, ctx.progress, device, empty, o.emulate_comm)
    batches = rank_batches(prepared, program, device) if o.real else blank_batches(program)
    keeper = None
    if local is not None:
        keeper = RankCheckpoint(s.saving, prepared, plan, ctx.rank, local.sync, local.shares, ctx.progress)
        keeper.begin(transport, ctx.store("asked"))
        local.sync.optimizer.ends = o.steps
    device.mark().wait()
    transport.barrier()
    results, told = [], []
    test = rank_tests(prepared, program, device) if local is not None else None
    for step in range(s.saving.first, o.steps):
        if keeper is not None:
            keeper.before(step)
        results.append(run.step(step, batches(step)))
        told.append(local.guide.take() if local is not None else ([], []))
        if local is not None and keeper is not None:
            _beside(s, prepared, run, local, test, step, results[-1])
            if keeper.after(step + 1, o.steps, transport):
                break
    rows = list(run.rows)
    if o.parts is not None and o.real and not device.ahead:
        (o.parts / f"parts-{ctx.rank}.json").write_text(json.dumps(run.parts))
    peak = None
    if local is not None:
        if o.dump is not None:
            _dump(o.dump / f"rank-{ctx.rank}.npz", local)
        peak = _peak(run, local, o.steps, batches(o.steps)) if o.memory else None
    if keeper is not None:
        keeper.close()
    ctx.progress.wait(text="end")
    run.close()
    transport.close()
    return {
        "losses": [_of_the_batch(prepared, program, r.losses) for r in results] if o.real else None,
        "grad_norms": [r.grad_norm for r in results] if o.real else None,
        "squares": [r.squares for r in results],
        "peak_bytes": peak,
        "state_bytes": None if local is None else local.sync.state_bytes(),
        "rows": rows,
        "first_step": s.saving.first,
        "saved": None if keeper is None else keeper.saved,
        "routing": [(layer, k - program.number_of(0), n) for layer, k, n in (told[0][0] if told else ())],
        "balance": [losses for _, losses in told],
        "races": [str(r) for r in device.races] if isinstance(device, RaceDevice) else None,
        "paused": _paused(s, results),
        "tests": [_of_the_batch(prepared, program, r.tests) for r in results],
    }


def _paused(s: PlanRun, results: list[StepResult]) -> list[int]:
    """Steps behind which this rank saved or evaluated."""
    first, steps = s.saving.first, s.options.steps
    return [k for k, r in enumerate(results, first) if r.tests or s.saving.due(k + 1, steps)]


def _peak(run: PlanInterpreter, local: RankModel, step: int, batches: Mapping[int, PendingMicrobatch]) -> int:
    """Bytes in one more step, not timed and not reported, as following every storage makes it slower."""
    with PeakMemory(local.tensors()) as memory:
        run.step(step, batches)
    return int(memory.peak)


def _beside(
    s: PlanRun,
    prepared: PreparedJob,
    run: PlanInterpreter,
    local: RankModel,
    test: Batches | None,
    step: int,
    result: StepResult,
) -> None:
    """What is done behind a step: evaluate, and note it, where it is time to."""
    job, program, done = prepared.job, run.program, step + 1
    if test is not None and done % (job.run.eval_every or 1) == 0:
        # One more step in which nothing is updated: the plan is what it is, so backward runs, too.
        local.sync.frozen, rows, parts = True, len(run.rows), len(run.parts)
        result.tests.update(run.step(0, test(0)).losses)
        local.guide.take()
        local.sync.frozen = False
        del run.rows[rows:], run.parts[parts:]
    if s.log is not None and (done % job.run.log_every == 0 or done == s.options.steps):
        found = [_of_the_batch(prepared, program, losses) for losses in (result.losses, result.tests)]
        _note_step(s.log / f"steps-{program.rank}", step, run, result, *found)
    if step == s.saving.first and s.options.dump is not None:
        _dump(s.options.dump / f"first-{program.rank}.npz", local)


def _note_step(file: Path, step: int, run: PlanInterpreter, result: StepResult, losses: Losses, test: Losses) -> None:
    """A rank's line, for `executor.launch.step_log`: what it has of a step. test: its losses of an evaluation."""
    spans = [(row[4], row[5]) for row in run.rows if row[0] == step]
    note = {
        "step": step,
        "losses": losses,
        "test": test,
        "norm": result.grad_norm,
        "squares": result.squares,
        "start": min(a for a, _ in spans),
        "end": max(b for _, b in spans),
    }
    with file.open("a", encoding="utf-8") as f:
        f.write(json.dumps(note) + "\n")


def _of_the_batch(prepared: PreparedJob, program: RankPlan, losses: Mapping[int, float]) -> Losses:
    """The losses here, with where their microbatches stand in the global batch; of tensor-parallel ranks one tells."""
    if program.places.mesh.coordinates(program.rank)["tp"]:
        return []
    first = program.places.replica(program.rank) * prepared.mbs
    return [(first + mb, loss) for mb, loss in sorted(losses.items())]


def device_of(options: JobRunOptions, ctx: RankContext) -> Device:
    """Where this rank computes. What computes nothing needs no GPU."""
    if options.racecheck:
        return ctx.hub.race_device()
    if options.backend == "nccl":
        return CudaDevice(ctx.local_rank)
    return CudaDevice(0) if options.backend == "local" and options.real and torch.cuda.is_available() else HostDevice()


def crossing(prepared: PreparedJob, device: Device, region: RankRegion | None = None) -> Callable[[], torch.Tensor]:
    """Makes an empty tensor of what crosses a stage boundary: of the rank's own tokens."""
    job, region = prepared.job, region or RankRegion.of(prepared.plan(), 0)
    shape = job.schedule.microbatch_size, job.model.seq_len // region.divides, prepared.config.hidden
    return boundary(*shape, TORCH[precision_of(job).compute], device.torch)


def blank(prepared: PreparedJob, plan: Plan, program: RankPlan, spec: PlanRun) -> TimedKernels:
    """All that a rank needs where ops take a given time: no model."""
    entries, graph, precision = prepared.base.entries, plan.graph, precision_of(prepared.job)
    mine = sorted({n.stage for n in graph.nodes if not n.once and program.number in n.groups})
    empty = crossing(prepared, HostDevice())
    places, rank = program.places, program.rank
    routes = planned_routes(prepared, graph, places, rank) if spread_over(graph) else None
    stages = {
        s: BlankStage([e.name for e in entries if e.stage == s], empty, last=s == graph.stages - 1, routes=routes)
        for s in mine
    }
    params = len({p.name for e in entries for p in e.part.params})
    reduce, gather = TORCH[precision.reduce], TORCH[precision.params]
    shared = [(b, sharers(b, places, rank).index(rank)) for b in several(buckets(graph), program.number)]
    return TimedKernels(stages, BlankBucketSync(shared, params, reduce, gather), spec.seconds(plan, places, rank))


def topology(plan: Plan) -> TransportTopology:
    """Channels and groups that the plan's programs need: the channels at every position."""
    places, send = RankPlacement.of(plan), np.flatnonzero(plan.kind == OpKind.SEND)
    pairs = {*zip(plan.program[send].tolist(), plan.program[plan.partner[send]].tolist(), strict=True)}
    channels = [c for a, b in pairs for c in zip(places.table[a], places.table[b], strict=True)]
    return TransportTopology.of(places.ranks, channels, groups(plan, places) | inline_groups(plan, places))


@dataclass(frozen=True)
class RankModel:
    """What lives on one rank: stages, every parameter once (two uses are one tensor, one gradient), optimizer."""

    stages: dict[int, Stage]
    extras: dict[str, tuple[str, ...]]
    params: dict[str, torch.Tensor]
    grads: ParamGradients
    sync: BucketSync
    shares: dict[str, ParamShard]
    guide: ExpertRouterGuide

    @classmethod
    def of(
        cls,
        prepared: PreparedJob,
        plan: Plan,
        rank: int,
        device: Device,
        region: RankRegion | None = None,
        *,
        note: bool = False,
        routes: Callable[[str, int], ExpertRoute] | None = None,
    ) -> RankModel:
        """Build this rank's part of the model, with the values every rank would give it.

        region: whom it meets inside compute ops; nobody without it. note: its routers' choices. routes: see `Stage`.
        """
        job, precision = prepared.job, precision_of(prepared.job)
        entries, places = prepared.base.entries, RankPlacement.of(plan)
        held, region = shares(plan.graph, places.mesh.coordinates(rank)), region or RankRegion.of(plan, rank)
        guide = guide_of(prepared, plan.graph, places, rank, device.torch, note=note)
        model = model_of(prepared, held, region, spread_over(plan.graph), guide)
        mine = sorted({n.stage for n in plan.graph.nodes if not n.once and places.program(rank) in n.groups})
        chunks = list(dict.fromkeys(e.chunk.name for e in entries if e.stage in mine))
        built = model.build(chunks)
        if isinstance(model, UserModel):
            model.keep(chunks)
        for unit in built.units.values():
            if any(t.device != device.torch for t in (*unit.parameters(), *unit.buffers())):
                unit.to(device.torch)  # moves the parameters themselves, so that ties stay ties
        for p in built.params.values():
            p.data = p.data.contiguous()  # as buckets have them
        device.bind()
        params: dict[str, torch.Tensor] = dict(built.params)
        grads = ParamGradients(params, TORCH[precision.grads])
        again = recomputed(prepared)
        stages = {}
        for s in mine:
            units = {e.name: built.units[e.name] for e in entries if e.stage == s}
            stages[s] = Stage(
                units,
                params,
                grads=grads,
                recompute=again,
                reads=built.reads,
                ports=built.ports,
                exchanges=built.exchanges,
                routes=routes,
            )
        config = BucketSyncConfig(
            job.optimizer,
            TORCH[precision.reduce],
            TORCH[precision.optimizer],
            elsewhere=repeated(plan.graph) if region.tp.index else frozenset(),
        )
        sync = BucketSync(rank, places, buckets(plan.graph), params, grads, list(model.shapes), config)
        return cls(stages, dict(built.extras), params, grads, sync, held, guide)

    def kernels(self) -> RealKernels:
        """As the interpreter takes it."""
        return RealKernels(self.stages, self.extras, self.sync)

    def tensors(self) -> list[torch.Tensor]:
        """All that persists from step to step."""
        return [*self.params.values(), *self.grads.sums.values(), *self.sync.tensors()]


def _dump(file: Path, local: RankModel) -> None:
    """This rank's share of the parameters and of the reduced gradients; NaN stands where another rank has the value."""
    arrays = {}
    for kind, pieces in (("param", local.sync.weights()), ("grad", local.sync.reduced())):
        for name, (first, piece) in pieces.items():
            part = torch.full((local.params[name].numel(),), torch.nan, dtype=torch.float64)
            part[first : first + len(piece)] = piece.double().cpu()
            whole = torch.full(local.shares[name].shape, torch.nan, dtype=torch.float64)
            local.shares[name].put(whole, part)
            arrays[f"{kind}/{name}"] = whole.numpy()
    np.savez(file, **arrays)  # type: ignore[arg-type]
