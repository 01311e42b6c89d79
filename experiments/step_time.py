"""How long is a step of our executor, beside torch's own runtimes on the same model, plan and ranks?

    python -m experiments.step_time [--against pipelining | fsdp2] [--norm] [--pairs 20] [--save FILE]

Two gloo ranks of one thread each, fp32, SGD without clipping: 1f1b beside torch.distributed.pipelining, or ZeRO-3
beside FSDP2 with a unit for each layer, both gathered for each pass and reduced by every microbatch. Both run in the
same two processes, each on a model of its own, in turn (ours first in every other pair), with a barrier before each
step; a step lasts from the first rank's start to the last rank's end. Every pass of a stage takes 30 ms or more; the
bar is a median ratio of 1.00. Ours also takes the norm of its rank's gradients, torch's where it is asked to (--norm).
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor.device import clock
from executor.device.device import HostDevice
from executor.launch.launch import launch
from executor.modules.base import BuiltChunks, TokenLoss, evaluate
from executor.modules.choose import model_of
from executor.modules.functions import token_loss
from executor.runtime.batch import Microbatch, MicrobatchLoader, PendingMicrobatch
from executor.runtime.given import given_text
from executor.runtime.interpreter import PlanInterpreter
from executor.runtime.program import RankPlan
from executor.runtime.rank import crossing, topology
from executor.runtime.rank_model import RankModel
from executor.runtime.worker import RankContext
from ir.core.ops import Pass
from ir.job import load_job
from ir.job.build import PreparedJob, prepare
from ir.plan.plan import OpKind, Plan
from ir.verify import check_plan
from piper_sim.formats.torch_csv import order_csv


class StageModule(nn.Module):
    """One stage's units in a row; the last one gives logits, as torch's runtime calls the loss itself."""

    def __init__(self, built: BuiltChunks, names: Sequence[str]) -> None:
        super().__init__()
        units = {n: built.units[n] for n in names}
        units = {n: u.inner if isinstance(u, TokenLoss) else u for n, u in units.items()}
        self.units = nn.ModuleList(units.values())
        self._built = replace(built, units=units)

    def forward(self, x: Tensor) -> Tensor:
        return evaluate(self._built, x, {})


class TorchPipeline:
    """One rank of torch's runtime. csv: compute only; torch puts in the communication. group: None is the world.

    A model without ties: torch's runtime does not add up a parameter's gradients over ranks.
    """

    def __init__(self, prepared: PreparedJob, plan: Plan, rank: int, csv: Path, group: Any = None) -> None:
        # Not above: importing it takes a second.
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

        entries, self._scale = prepared.base.entries, 1.0
        mine = sorted({n.stage for n in plan.graph.nodes if not n.once and rank in n.groups})
        built = model_of(prepared).build(list(dict.fromkeys(e.chunk.name for e in entries if e.stage in mine)))
        self.params: dict[str, nn.Parameter] = dict(built.params)
        self.first, self.last = 0 in mine, prepared.stages - 1 in mine
        modules = {s: StageModule(built, [e.name for e in entries if e.stage == s]) for s in mine}
        cpu, count = torch.device("cpu"), prepared.stages
        stages = [PipelineStage(m, s, count, cpu, group=group) for s, m in modules.items()]
        runtime: Any = _PipelineScheduleRuntime
        self._runtime = runtime(stages, prepared.mbs, loss_fn=self._loss, scale_grads=False)
        self._runtime._load_csv(str(csv))

    def step(self, batches: Sequence[Microbatch]) -> list[float]:
        """Forward and backward of all microbatches; gradients add up in `.grad`. Losses where the last stage is."""
        self._scale = batches[0].scale
        losses: list[Tensor] = []
        ids = [torch.cat([b.ids for b in batches])] if self.first else []
        labels = torch.cat([b.labels for b in batches])
        self._runtime.step(*ids, target=labels, losses=losses, return_outputs=False)
        return [loss.item() for loss in losses]

    def grads(self) -> Mapping[str, Tensor]:
        return {n: p.grad for n, p in self.params.items() if p.grad is not None}

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return token_loss(logits.flatten(0, 1), labels.flatten(), self._scale, TokenLoss.IGNORE)


class TorchSharded:
    """One rank under FSDP2: layers sharded, gathered for forward and for backward, and sums of gradients, not means."""

    def __init__(self, prepared: PreparedJob, world: int) -> None:
        # Not above: importing it takes a second.
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        entries, model = prepared.base.entries, model_of(prepared)
        built, mesh = model.build(list(model.chunks)), DeviceMesh("cpu", list(range(world)))
        each = [[e.name for e in entries if e.chunk.name == chunk] for chunk in model.chunks]
        self._whole = nn.Sequential(*(StageModule(built, names) for names in each))
        for module in (*self._whole, self._whole):
            sharded = fully_shard(module, mesh=mesh)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)  # gloo knows no other
        self.params = dict(self._whole.named_parameters())

    def step(self, batches: Sequence[Microbatch]) -> list[float]:
        """As `TorchPipeline.step`, of this rank's share of the batch."""
        losses = []
        for b in batches:
            loss = token_loss(self._whole(b.ids).flatten(0, 1), b.labels.flatten(), b.scale, TokenLoss.IGNORE)
            loss.backward()
            losses.append(loss.item())
        return losses

    def grads(self) -> Mapping[str, Tensor]:
        shards: Mapping[str, Any] = self.params
        return {n: p.grad.to_local() for n, p in shards.items()}


PARALLEL = {"pipelining": "pp = 2", "fsdp2": "dp = 2\nzero = 3"}
JOB = (Path(__file__).parent / "jobs" / "step_time.toml").read_text(encoding="utf-8")
RANKS, WARM, BAR = 2, 2, 1.0
Span = tuple[float, float, float]  # start, end, processor seconds of the rank


@dataclass(frozen=True)
class Times:
    """Seconds of each pair's two steps and of the shortest pass of a stage (ours, a median); load before and after.

    used: our processor seconds over theirs, pair by pair, which say something on a loaded machine, too.
    """

    ours: list[float]
    theirs: list[float]
    used: list[float]
    least_pass_s: float
    losses: list[list[float]]
    load: tuple[float, float]

    @property
    def ratios(self) -> list[float]:
        return [a / b for a, b in zip(self.ours, self.theirs, strict=True)]


def rank(ctx: RankContext, steps: int, csv: str | None, norm: bool) -> dict[str, Any]:
    """The target of `launch`: two warm pairs, then the pairs that count."""
    prepared, plan = ctx.given()
    program, device = RankPlan.of(plan, ctx.rank), HostDevice()
    local = RankModel.of(prepared, plan, ctx.rank, device)
    transport = ctx.connect("gloo", topology(plan), device)
    ours = PlanInterpreter(program, local.kernels(), transport, ctx.progress, device, crossing(prepared, device))
    theirs: TorchPipeline | TorchSharded
    if csv is None:
        theirs = TorchSharded(prepared, ctx.world)
    else:
        theirs = TorchPipeline(prepared, plan, ctx.rank, Path(csv), dist.new_group(list(range(ctx.world))))
    sgd = torch.optim.SGD(theirs.params.values(), lr=prepared.job.optimizer.lr)
    batches = _batches(prepared, program)
    losses: dict[str, list[float]] = {"ours": [], "theirs": []}

    def we(step: int) -> None:
        result = ours.step(step, {mb: PendingMicrobatch(b, device.torch) for mb, b in enumerate(batches(step))})
        losses["ours"].append(sum(loss for _, loss in sorted(result.losses.items())))

    def they(step: int) -> None:
        sgd.zero_grad(set_to_none=True)
        losses["theirs"].append(sum(theirs.step(batches(step))))
        if norm:
            nn.utils.get_total_norm(theirs.grads().values()).item()
        sgd.step()

    def timed(work: Callable[[int], None], step: int) -> Span:
        transport.barrier()
        start, used = clock.now(), time.process_time()
        work(step)
        return start, clock.now(), time.process_time() - used

    spans: dict[str, list[Span]] = {"ours": [], "theirs": []}
    for step in range(steps):
        turns = [("ours", we), ("theirs", they)]
        for name, work in turns if step % 2 == 0 else turns[::-1]:
            spans[name].append(timed(work, step))
    ctx.progress.wait(text="end")
    ours.close()
    transport.close()
    return {**spans, "losses": losses, "passes": _passes(program, ours)}


def _passes(program: RankPlan, ran: PlanInterpreter) -> list[float]:
    """The median seconds of each pass of this rank's stage; the plan may do a backward as two ops around a send."""
    names: dict[str, str] = {}
    for i in range(program.first, program.last):
        if program.shape(i).kind != OpKind.COMPUTE:
            continue
        _, node, mb = program.covers(i)[0]
        if not node.once:
            names[program.plan.text(i)] = f"{node.stage}{'F' if node.kind is Pass.F else 'B'}{mb}"
    took: dict[tuple[int, str], float] = {}
    for step, _, op, _, start, end in ran.rows:
        if step >= WARM and op in names:
            took[step, names[op]] = took.get((step, names[op]), 0.0) + end - start
    return [median(s for (_, n), s in took.items() if n == name) for name in set(names.values())]


def _batches(prepared: PreparedJob, program: RankPlan) -> Callable[[int], list[Microbatch]]:
    """Step → the microbatches of this rank's replica; made once, as no runtime is asked how it reads data."""
    job, replicas = prepared.job, prepared.mesh.sizes["dp"]
    sizes = dict(replicas=replicas, microbatches=prepared.mbs, size=job.schedule.microbatch_size)
    data = MicrobatchLoader("synthetic", vocab=prepared.config.vocab, length=job.model.seq_len, **sizes)
    one = [data.batch(0, program.places.replica(program.rank), mb) for mb in range(prepared.mbs)]
    return lambda step: one


def measure(against: str, pairs: int, seq_len: int, *, norm: bool = False) -> Times:
    """Run all pairs in one launch."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.toml").write_text(JOB.format(parallel=PARALLEL[against], seq_len=seq_len))
        prepared = prepare(load_job(str(folder / "job.toml")))
        plan = prepared.plan()
        check_plan(plan)
        csv = folder / "order.csv" if against == "pipelining" else None
        if csv is not None:
            csv.write_text(order_csv(prepared))
        before = os.getloadavg()[0]
        args = {"steps": WARM + pairs, "csv": csv and str(csv), "norm": norm}
        found = launch(rank, RANKS, args, given=[given_text(prepared, plan)], watchdog_s=120.0)
    counted = range(WARM, WARM + pairs)
    ours, theirs = ([[r[name][k] for r in found] for k in counted] for name in ("ours", "theirs"))
    least, last = min(s for r in found for s in r["passes"]), found[-1]["losses"]
    return Times(
        [_step(x) for x in ours],
        [_step(x) for x in theirs],
        [_used(a) / _used(b) for a, b in zip(ours, theirs, strict=True)],
        least,
        [last["ours"], last["theirs"]],
        (before, os.getloadavg()[0]),
    )


def _step(spans: Sequence[Span]) -> float:
    return max(end for _, end, _ in spans) - min(start for start, _, _ in spans)


def _used(spans: Sequence[Span]) -> float:
    return sum(used for _, _, used in spans)


def report(times: Times) -> str:
    """The numbers in words."""
    low, _, high = quantiles(times.ratios, n=4)
    middle = median(times.ratios)
    ours, theirs = median(times.ours), median(times.theirs)
    return "\n".join(
        [
            f"load {times.load[0]:.1f} before, {times.load[1]:.1f} after, on {os.cpu_count()} cores",
            f"shortest pass of a stage {times.least_pass_s * 1e3:.0f} ms (median; asked for: 30 or more)",
            f"ours {ours * 1e3:.0f} ms, torch's {theirs * 1e3:.0f} ms (medians)",
            f"ratio of {len(times.ratios)} pairs: median {middle:.3f}, middle half {low:.3f} to {high:.3f}; bar {BAR}",
            f"ratio of processor seconds: median {median(times.used):.3f}",
            f"losses equal to the bit: {times.losses[0] == times.losses[1]}",
        ]
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", choices=PARALLEL, default="pipelining")
    parser.add_argument("--norm", action="store_true", help="torch's side takes the norm of its gradients, too")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--save", type=Path, help="a JSON file for all times")
    args = parser.parse_args()
    times = measure(args.against, args.pairs, args.seq_len, norm=args.norm)
    print(report(times))
    if args.save is not None:
        args.save.write_text(json.dumps(asdict(times)))


if __name__ == "__main__":
    main()
