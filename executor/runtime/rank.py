"""What one rank of a run does: take its program, build its part of the model, train, hand back what happened."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from executor.checkpoint.keeper import RankCheckpoint
from executor.device import clock
from executor.device.device import CudaDevice, Device, HostDevice, gpu_of
from executor.device.memory import PeakMemory, allocator_peaks, forget_peaks
from executor.device.progress import RankProgress
from executor.device.race import RaceDevice
from executor.modules.base import TORCH
from executor.modules.choose import gathered_format
from executor.modules.user.exports.shared_exports import RankExports, exports_shared
from executor.modules.user.reference import refuse_other_values
from executor.parallel.collective import groups
from executor.parallel.inline import Meeting, RankRegion, inline_groups
from executor.parallel.router_guide import planned_routes
from executor.runtime.batch import Batches, PendingMicrobatch, blank_batches, rank_batches, rank_tests
from executor.runtime.interpreter import PlanInterpreter, StepResult
from executor.runtime.kernels import BlankBucketSync, BlankStage, TimedKernels
from executor.runtime.program import RankPlan
from executor.runtime.rank_model import RankModel
from executor.runtime.spec import PlanRun
from executor.runtime.target import temporary
from executor.runtime.worker import RankContext
from executor.transport.base import Transport, TransportTopology
from ir.core.work import MessageKind
from ir.graph.expert_rows import spread_chunks
from ir.graph.sync import buckets
from ir.job.build import PreparedJob, precision_of
from ir.job.run_options import JobRunOptions
from ir.plan.places import RankPlacement, several, sharers
from ir.plan.plan import OpKind, Plan

Losses = list[tuple[int, float]]  # (microbatch of the global batch, its share of the loss)
TRACED = 4_000_000  # rows of all ranks that a run keeps: 176 bytes each where they are gathered


@dataclass
class RankRun:
    """One rank's plan, model and connections, behind the last that is done before the first step.

    local, keeper: None where ops take a given time. connect_s: seconds until every connection stood, and had been used
    where that makes it.
    """

    spec: PlanRun
    prepared: PreparedJob
    program: RankPlan
    device: Device
    transport: Transport
    local: RankModel | None
    run: PlanInterpreter
    keeper: RankCheckpoint | None
    progress: RankProgress
    connect_s: float

    @classmethod
    def of(cls, ctx: RankContext, s: PlanRun, more: Iterable[Meeting] = ()) -> RankRun:
        """Connect, build, take up a checkpoint. more: groups of ranks that meet beside what the plan asks for."""
        o = s.options
        prepared, plan = ctx.given()
        program = RankPlan.of(plan, ctx.rank)
        device = device_of(o, ctx)
        streams, began_s = topology(plan, more), clock.now()
        transport = ctx.connect(o.backend, streams, device)
        connect_s = clock.now() - began_s
        region = RankRegion.of(plan, ctx.rank, transport, ctx.progress)
        build = partial(RankModel.of, note=s.note, compiling=ctx.progress.begin)
        with exports_shared(ctx.hub.exports if o.backend == "local" else None):
            local = build(prepared, plan, ctx.rank, device, region) if o.real else None
        kernels = local.kernels() if local is not None else blank(prepared, plan, program, s)
        empty, by_node = crossing(prepared, device, region), o.parts is not None and o.real and not device.ahead
        run = PlanInterpreter(program, kernels, transport, ctx.progress, device, empty, o.emulate_comm, by_node=by_node)
        keeper = None
        if local is not None:
            if local.drawn and ctx.world > 1:
                refuse_other_values(ctx.drawn(), local.drawn)
            keeper = RankCheckpoint(s.saving, prepared, plan, ctx.rank, local.sync, local.shares, ctx.progress)
            keeper.begin(transport, ctx.store("asked"))
            local.sync.optimizer.ends(o.steps)
        device.mark().wait()
        ctx.progress.wait(text="begin")  # the others may still be compiling
        transport.barrier()
        ctx.hub.exports = RankExports()  # all have built: what they took from each other is let go
        return cls(s, prepared, program, device, transport, local, run, keeper, ctx.progress, connect_s)

    def evaluate(self, batches: Mapping[int, PendingMicrobatch]) -> dict[int, float]:
        """One more step in which nothing is updated: the plan is what it is, so backward runs, too."""
        assert self.local is not None
        run, sync, rows, parts = self.run, self.local.sync, len(self.run.rows), len(self.run.parts)
        sync.frozen = True
        losses = run.step(0, batches).losses
        self.local.guide.take()
        sync.frozen = False
        del run.rows[rows:], run.parts[parts:]
        return losses

    def close(self) -> None:
        """Let go of folder, streams and connections, together with the others."""
        if self.keeper is not None:
            self.keeper.close(self.transport)
        self.progress.wait(text="end")
        self.run.close()
        self.transport.close()


def train_rank(ctx: RankContext, **spec: Any) -> dict[str, Any]:
    """The target of `launch`: run `steps` steps as this rank's program says."""
    s = PlanRun.of(spec)
    o, r = s.options, RankRun.of(ctx, s)
    prepared, program, run, local = r.prepared, r.program, r.run, r.local
    batches = rank_batches(prepared, program, r.device) if o.real else blank_batches(program)
    results, told = [], []
    newest = traced_steps(program.plan, prepared.ranks)
    test = rank_tests(prepared, program, r.device) if local is not None else None
    forget_peaks(r.device.torch)
    before = None
    for step in range(s.saving.first, o.steps):
        if r.keeper is not None:
            r.keeper.before(step)
        results.append(run.step(step, batches(step)))
        if len(results) > newest:
            del run.rows[: program.last - program.first]
        told.append(local.guide.take() if local is not None else ([], []))
        if local is not None and r.keeper is not None:
            _beside(r, local, test, step, results[-1], before)
            before = None if _pauses(s, step, results[-1]) else _span(run)[1]
            if r.keeper.after(step + 1, o.steps, r.transport):
                break
    rows, counted = list(run.rows), allocator_peaks(r.device.torch) if o.backend != "local" else None
    if run.by_node:
        assert o.parts is not None
        (o.parts / f"parts-{ctx.rank}.json").write_text(json.dumps(run.parts))
    peak = None
    if local is not None:
        if o.dump is not None:
            _dump(o.dump / f"rank-{ctx.rank}.safetensors", local)
        peak = _peak(run, local, o.steps, batches(o.steps)) if o.memory and not prepared.job.run.compile else None
    r.close()
    return {
        "losses": [of_the_batch(prepared, program, r.losses) for r in results] if o.real else None,
        "grad_norms": [r.grad_norm for r in results] if o.real else None,
        "squares": [r.squares for r in results],
        "connect_s": r.connect_s,
        "peak_bytes": peak,
        "allocator": counted,
        "state_bytes": None if local is None else local.state_bytes(),
        "rows": rows,
        "first_step": s.saving.first,
        "saved": None if r.keeper is None else r.keeper.saved,
        "routing": [(layer, k - program.number_of(0), n) for layer, k, n in (told[0][0] if told else ())],
        "balance": [losses for _, losses in told],
        "races": [str(x) for x in r.device.races] if isinstance(r.device, RaceDevice) else None,
        "host_syncs": r.device.syncs.by_op() if isinstance(r.device, RaceDevice) else None,
        "paused": _paused(s, results),
        "compiled": local.compiled.told() if local is not None else None,
        "tests": [of_the_batch(prepared, program, r.tests) for r in results],
    }


def traced_steps(plan: Plan, ranks: int) -> int:
    """How many steps a trace has at most, the newest ones: the same on every rank."""
    programs = len(plan.bounds) - 1
    return max(1, TRACED * programs // (len(plan) * ranks))


def _paused(s: PlanRun, results: list[StepResult]) -> list[int]:
    """Steps behind which this rank saved or evaluated."""
    return [k for k, r in enumerate(results, s.saving.first) if _pauses(s, k, r)]


def _pauses(s: PlanRun, step: int, result: StepResult) -> bool:
    return bool(result.tests) or s.saving.due(step + 1, s.options.steps)


def _span(run: PlanInterpreter) -> tuple[float, float]:
    """Of the newest step: when its first op here began, and when its last one ended."""
    rows = run.rows[run.program.first - run.program.last :]
    return min(row[4] for row in rows), max(row[5] for row in rows)


def _peak(run: PlanInterpreter, local: RankModel, step: int, batches: Mapping[int, PendingMicrobatch]) -> int:
    """Bytes in one more step, not timed and not reported, as following every storage makes it slower."""
    with PeakMemory(local.tensors()) as memory:
        run.step(step, batches)
    return int(memory.peak)


def _beside(
    r: RankRun, local: RankModel, test: Batches | None, step: int, result: StepResult, before: float | None
) -> None:
    """What is done behind a step: evaluate, and note it, where it is time to. before: as `_note_step` has it."""
    s, job, done = r.spec, r.prepared.job, step + 1
    noted = done % job.run.log_every == 0 or done == s.options.steps
    if test is not None and done % (job.run.eval_every or 1) == 0:
        result.tests.update(r.evaluate(test(0)))
        noted = True
    if s.log is not None and noted:
        found = [of_the_batch(r.prepared, r.program, losses) for losses in (result.losses, result.tests)]
        _note_step(s.log / f"steps-{r.program.rank}", step, (before, *_span(r.run)), result, *found)
    if step == s.saving.first and s.options.dump is not None:
        _dump(s.options.dump / f"first-{r.program.rank}.safetensors", local)


def _note_step(
    file: Path, step: int, times: tuple[float | None, float, float], result: StepResult, losses: Losses, test: Losses
) -> None:
    """A rank's line, for `executor.launch.step_log`: what it has of a step. test: its losses of an evaluation.

    times: when the step before ended here, None if that was not right before it; when this one began and ended.
    """
    note = {
        "step": step,
        "losses": losses,
        "test": test,
        "norm": result.grad_norm,
        "squares": result.squares,
        **dict(zip(("before", "start", "end"), times, strict=True)),
    }
    with temporary(), file.open("a", encoding="utf-8") as f:
        f.write(json.dumps(note) + "\n")


def of_the_batch(prepared: PreparedJob, program: RankPlan, losses: Mapping[int, float]) -> Losses:
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
        return CudaDevice(gpu_of(ctx.local_rank))
    return CudaDevice(0) if options.backend == "local" and options.real and torch.cuda.is_available() else HostDevice()


def crossing(prepared: PreparedJob, device: Device, region: RankRegion | None = None) -> Callable[[], torch.Tensor]:
    """Makes an empty tensor of what crosses a stage boundary: of the rank's own tokens."""
    job, region = prepared.job, region or RankRegion.of(prepared.plan(), 0)
    shape = job.schedule.microbatch_size, job.model.seq_len // region.divides, prepared.config.hidden
    dtype = TORCH[precision_of(job).stream]
    return lambda: torch.empty(shape, dtype=dtype, device=device.torch)


def blank(prepared: PreparedJob, plan: Plan, program: RankPlan, spec: PlanRun) -> TimedKernels:
    """All that a rank needs where ops take a given time: no model."""
    entries, graph, precision = prepared.base.entries, plan.graph, precision_of(prepared.job)
    mine = sorted({n.stage for n in graph.nodes if not n.once and program.number in n.groups})
    empty = crossing(prepared, HostDevice())
    places, rank = program.places, program.rank
    routes = planned_routes(prepared, graph, places, rank) if spread_chunks(graph) else None
    stages = {
        s: BlankStage([e.name for e in entries if e.stage == s], empty, last=s == graph.stages - 1, routes=routes)
        for s in mine
    }
    params = len({p.name for e in entries for p in e.part.params})
    formats = TORCH[precision.reduce], TORCH[precision.params], TORCH[gathered_format(prepared)]
    shared = [(b, sharers(b, places, rank).index(rank)) for b in several(buckets(graph), program.number)]
    return TimedKernels(stages, BlankBucketSync(shared, params, *formats), spec.seconds(plan, places, rank))


def topology(plan: Plan, more: Iterable[Meeting] = ()) -> TransportTopology:
    """Channels and groups that the plan's programs need: the channels at every position. more: groups beside these."""
    places, send = RankPlacement.of(plan), np.flatnonzero(plan.kind == OpKind.SEND)
    pairs = {*zip(plan.program[send].tolist(), plan.program[plan.partner[send]].tolist(), strict=True)}
    channels = [c for a, b in pairs for c in zip(places.table[a], places.table[b], strict=True)]
    members: dict[str, tuple[int, ...]] = {}
    kinds: dict[str, frozenset[MessageKind]] = {}
    for name, ranks, used in [*groups(plan, places), *inline_groups(plan, places), *more]:
        members[name], kinds[name] = ranks, kinds.get(name, frozenset()) | used
    return TransportTopology.of(places.ranks, channels, members, kinds)


def _dump(file: Path, local: RankModel) -> None:
    """This rank's share of the parameters and of the reduced gradients; NaN stands where another rank has the value."""
    arrays = {}
    for kind, pieces in (("param", local.sync.weights()), ("grad", local.sync.reduced())):
        for name, (first, piece) in pieces.items():
            part = torch.full((local.params[name].numel(),), torch.nan, dtype=torch.float64, device="cpu")
            part[first : first + len(piece)] = piece.double().cpu()
            whole = torch.full(local.shares[name].shape, torch.nan, dtype=torch.float64, device="cpu")
            local.shares[name].put(whole, part)
            arrays[f"{kind}/{name}"] = whole
    save_file(arrays, file)
