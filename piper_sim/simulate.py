"""Predict one job: plan, costs, engine, memory, metrics. The object of `piper-sim simulate`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from cost_models import Fabric, Hardware, load_hardware, message_seconds, work_seconds
from cost_models.memory import context_bytes, reserved_bytes
from ir.errors import ErrorKind, PiperError
from ir.graph import Entry
from ir.job import Job
from ir.job.build import Prepared, prepare, resolve
from ir.mesh import GroupShape, Mesh
from ir.model.part import Chunk, Layout
from ir.model.source import ModelSource
from ir.plan import OpKind, Plan
from ir.plan_text import plan_digest
from ir.rules import check_plan
from ir.schedules.registry import order_depends_on_times
from ir.schedules.schedule import OpTimes
from ir.trace import Trace
from ir.work import DType
from piper_sim.costs import CostModel, OpCosts, Share
from piper_sim.engine import Run, steady
from piper_sim.memory import Memory, memory, samples, state
from piper_sim.metrics import Breakdown, breakdown
from piper_sim.traces import trace_of

GIB = 2**30


@dataclass(frozen=True, eq=False)
class Prediction:
    """Everything known about one simulated job."""

    prepared: Prepared
    hardware: Hardware
    plan: Plan
    costs: OpCosts
    run: Run
    memory: Memory
    breakdown: Breakdown
    iteration_s: float
    steps: int

    def trace(self) -> Trace:
        """The last simulated step, with memory samples."""
        start, end = self.run.start[-1], self.run.end[-1]
        zero = float(start.min())
        found = samples(self.plan, self.memory, start - zero, end - zero)
        header = {"schedule": self.prepared.schedule, "iteration_s": self.iteration_s, "cost_source": "modelled"}
        return trace_of(self.plan, self.run, header, memory=found)


def predict(job: Job) -> Prediction:
    """Build, check, price and run the plan of a job. Raises PiperError for what cannot be built.

    `layers = "balanced"` evens out modelled seconds. Where that does not fit in memory, no stage may hold more layers
    than an even split would give it, and the second try counts if it fits.
    """
    hardware = hardware_of(job)
    first = _predict(prepare_priced(job, hardware), hardware)
    if job.parallel.layers != "balanced" or fits(first):
        return first
    even = -(-sum(first.prepared.layers) // first.prepared.stages)
    if max(first.prepared.layers) <= even:
        return first
    second = _predict(prepare_priced(job, hardware, even), hardware)
    return second if fits(second) else first


def _predict(prepared: Prepared, hardware: Hardware) -> Prediction:
    plan = prepared.plan()
    check_plan(plan)
    model = CostModel(prepared, hardware)
    costs = model.price(plan)
    ran, steps = steady(plan, costs.duration, clipped=prepared.policy.clip)
    found = memory(plan, state(plan, model.recipe))
    split = breakdown(plan, ran, costs)
    return Prediction(prepared, hardware, plan, costs, ran, found, split, split.iteration_s, steps)


def fits(p: Prediction) -> bool:
    """Whether every rank's device peak is within the device less the margin."""
    mem = memory_object(p)
    return max(int(v) for v in mem["device_peak_bytes"].values()) <= _limit(mem)


def hardware_of(job: Job) -> Hardware:
    """The hardware file of `[cluster]`, with its inline overrides."""
    gpu = job.cluster.gpu
    beside = Path(job.file).parent / gpu  # a file's name is relative to the job, as its config's is
    try:
        return load_hardware(beside if gpu.endswith(".json") and beside.exists() else gpu, job.cluster.overrides)
    except PiperError as e:
        raise e.at(file=job.file) from None


def prepare_priced(job: Job, hardware: Hardware, most_layers: int | None = None) -> Prepared:
    """Prepare a job; a searched schedule is given the mean op times of the model's stages."""
    name = job.schedule.name
    refuse_unbuilt(job)
    if name is None or not order_depends_on_times(name):
        return prepare(job, hardware.gpus_per_node, None, weigh(job, hardware), most_layers)
    probe = prepare(replace(job, schedule=replace(job.schedule, name=_probe(name))), hardware.gpus_per_node)
    return prepare(job, hardware.gpus_per_node, op_times(probe, hardware), weigh(job, hardware), most_layers)


def weigh(job: Job, hardware: Hardware) -> Callable[[ModelSource, Chunk], float]:
    """What `balanced` weighs a chunk by: the modelled seconds of its kernels and all-to-alls on one rank."""
    resolved = resolve(job, hardware.gpus_per_node)
    p = resolved.parallel
    layout = Layout(p.tp, p.cp, p.ep, p.etp, p.sequence_parallel)
    per_node = resolved.cluster.gpus_per_node or hardware.gpus_per_node
    fabric = Fabric.of(hardware, per_node)

    @cache  # only when a chunk is weighed: `prepare` has checked the sizes against the model by then
    def experts() -> GroupShape:
        mesh = Mesh.of(tp=p.tp, cp=p.cp, dp=p.dp or 1, pp=p.pp, ep=p.ep, etp=p.etp, order=p.order.split())
        return mesh.shape(("ep",), per_node)

    def seconds(source: ModelSource, chunk: Chunk) -> float:
        total = 0.0
        for part in chunk.parts:
            entry = Entry(0, chunk, part, layout)
            w = source.work(entry)
            total += sum(work_seconds(k, hardware) for k in (w.forward, w.input_grad, w.weight_grad))
            if part.name == "experts":
                dispatch, combine, _ = source.dispatch(entry)
                shape = experts()
                total += 2 * sum(message_seconds(m, shape.ranks, shape.per_node, fabric) for m in (dispatch, combine))
        return total

    return seconds


def _probe(name: str) -> str:
    """A fixed schedule with the same stages as a searched one."""
    from ir.schedules.registry import default_chunks

    return "zbv" if default_chunks(name) == 2 else "1f1b"


def op_times(probe: Prepared, hardware: Hardware) -> OpTimes:
    """Mean seconds of a stage's passes and of a transfer."""
    model = CostModel(probe, hardware)
    plan = probe.plan()
    costs = model.price(plan)
    totals = {"F": 0.0, "I": 0.0, "W": 0.0, "R": 0.0}
    graph = plan.graph
    for n in graph.nodes:
        if not n.once:
            seconds = model.message(n.message, (0,)) if n.message else sum(model.node_shares(n)[: Share.OPTIMIZER])
            totals[str(n.kind)] += seconds
    stages = graph.stages
    sends = costs.duration[plan.kind == OpKind.SEND]
    p2p = float(sends.mean()) if len(sends) else 0.0
    return OpTimes(totals["F"] / stages, (totals["I"] + totals["R"]) / stages, totals["W"] / stages, p2p)


def refuse_unbuilt(job: Job) -> None:
    """Refuse what this version does not simulate yet, rather than ignore it."""
    for key, value, neutral in (
        ("model.graph", job.model.graph, None),
        ("costs.profile", job.costs.profile, None),
        ("costs.software", job.costs.software, None),
        ("routing.kind", job.routing.kind, "balanced"),
    ):
        if value != neutral:
            message = f"{value!r} is not simulated yet"
            raise PiperError(ErrorKind.JOB, message, key=key, file=job.file, suggestion="leave it out")


def simulate_object(p: Prediction) -> dict[str, object]:
    """The JSON object of `piper-sim simulate`."""
    job, mesh = p.prepared.job, p.prepared.mesh
    tokens = (job.parallel.dp or 1) * p.prepared.mbs * job.schedule.microbatch_size * job.model.seq_len
    flops = _model_flops(p) / p.iteration_s / mesh.ranks
    peak = p.hardware.peak_flops(DType(job.precision.compute))
    mem = memory_object(p)
    fit = fits(p)
    rate = tokens / p.iteration_s
    out: dict[str, object] = {
        "schema_version": 1,
        "iteration_s": p.iteration_s,
        "tokens_per_s": rate,
        "tokens_per_s_per_gpu": rate / mesh.ranks,
        "model_tflops_per_gpu": flops / 1e12,
        "mfu": flops / peak,
        "time_breakdown": {str(r): row for r, row in enumerate(p.breakdown.seconds)},
        "bubble_fraction": p.breakdown.bubble_fraction,
        "exposed_comm_s": p.breakdown.exposed_comm_s,
        "fits": fit,
        "memory": mem,
        "ops": len(p.plan) * p.steps,
        "folded": {"replicas_simulated": 1, "replicas": mesh.ranks // mesh.sizes["pp"]},
        "host_model": None,
        "interference_level": "none",
        "cost_source": "modelled",
        "plan_digest": plan_digest(p.plan),
        "cost_digest": p.costs.digest,
        "job_digest": job_digest(job),
    }
    if not fit:
        out["reason"] = reason(p, mem)
    return out


def _limit(mem: Mapping[str, Any]) -> int:
    return int(mem["capacity_bytes"]) - int(mem["margin_bytes"])


def _model_flops(p: Prediction) -> float:
    """Forward and backward FLOPs of one step over all GPUs, as MFU counts them: backward is twice forward."""
    source = p.prepared.base.source
    assert source is not None
    forward = sum(source.work(e).model_flops for e in p.prepared.base.entries)
    return 3.0 * forward * p.prepared.mbs * (p.prepared.job.parallel.dp or 1)


def memory_object(p: Prediction) -> dict[str, Any]:
    """Peaks, capacity and breakdown by pipeline rank."""
    hw, m = p.hardware, p.memory
    context = context_bytes(hw, communicators(p))
    reserved = [reserved_bytes(int(b), hw).middle for b in m.peak]
    ranks = range(p.plan.programs)
    return {
        "peak_allocated_bytes": {str(r): int(m.peak[r]) for r in ranks},
        "peak_reserved_bytes": {str(r): reserved[r] for r in ranks},
        "device_peak_bytes": {str(r): reserved[r] + context for r in ranks},
        "capacity_bytes": int(hw.hbm_GiB * GIB),
        "margin_bytes": int(p.prepared.job.cluster.memory_margin_GiB * GIB),
        "breakdown_bytes": {str(r): {**m.breakdown(r), "context": context} for r in ranks},
        "peak_op": {str(r): p.plan.text(int(m.at[r])) for r in ranks},
    }


def communicators(p: Prediction) -> int:
    """Process groups of more than one rank that a rank is a member of."""
    sizes = p.prepared.mesh.sizes
    moe = p.prepared.config.moe is not None
    wanted = ["tp", "cp", "pp", *(("ep", "edp") if moe else ())]
    return sum(sizes[a] > 1 for a in wanted) + (sizes["cp"] * sizes["dp"] > 1)


def reason(p: Prediction, mem: Mapping[str, Any]) -> str:
    """Which rank does not fit, by how much, and what would help most."""
    device: dict[str, int] = mem["device_peak_bytes"]
    rank = max(device, key=lambda r: device[r])
    over = device[rank] - _limit(mem)
    parts = p.memory.breakdown(int(rank))
    worst = max(parts, key=lambda k: parts[k])
    cure = {
        "activations": "recompute more, or fewer microbatches in flight",
        "parameters": "a larger pp, tp or ep, or zero = 3",
        "gradients": "zero = 2 or 3, or a larger pp",
        "optimizer": "zero = 1 or more, or a larger dp",
    }.get(worst, "a smaller microbatch")
    return (
        f"rank {rank} needs {device[rank] / GIB:.1f} GiB, {over / GIB:.1f} GiB more than there is, "
        f"at {p.plan.text(int(p.memory.at[int(rank)]))}; most of it {worst} ({parts[worst] / GIB:.1f} GiB): {cure}"
    )


def job_digest(job: Job) -> str:
    """SHA-256 of the job's values; its file name is not among them."""
    table = asdict(replace(job, file=""))
    return hashlib.sha256(json.dumps(table, sort_keys=True, default=list).encode()).hexdigest()
