"""The object of `piper-sim simulate`: a prediction in the contract's keys."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from cost_models.hardware import presets
from cost_models.software import GENERIC
from ir.core.work import DType, KernelKind
from ir.graph.sync import buckets
from ir.job import Job
from ir.job.build import DEFAULT_SCHEDULE, PreparedJob
from ir.job.model import read_model
from ir.job.schema import JobParallel, JobSlowNodes
from ir.plan.text import plan_digest
from ir.schedules.registry import canonical, default_chunks
from ir.verify.deadlock import takes_turns
from ir.workload.part import before_training
from piper_sim.memory.reserved import bands
from piper_sim.pricing.costs import OpCosts
from piper_sim.report.units import GIB
from piper_sim.study.breakdown import StepBreakdown
from piper_sim.study.planned import PlannedJob, fits
from piper_sim.study.sure import WAITS, PredictionTraits, fits_probability, interval

MESSAGES = ("side by side", "any order")  # of a rank's communicators: what a plan counts on in order to finish
Object = dict[str, Any]  # as JSON has it


def simulate_object(p: PlannedJob, costs: OpCosts, times: StepBreakdown, steps: int) -> Object:
    """The JSON object of `piper-sim simulate`. costs, times, steps: of the simulated plan, see `Prediction`."""
    job, mesh = p.prepared.job, p.prepared.mesh
    tokens = (job.parallel.dp or 1) * p.prepared.mbs * job.schedule.microbatch_size * job.model.seq_len
    flops = _model_flops(p.prepared) / times.iteration_s / mesh.ranks
    like = traits(p, times)
    mem = memory_object(p, like)
    fit = fits(p)
    rate = tokens / times.iteration_s
    out: Object = {
        "schema_version": 1,
        "iteration_s": times.iteration_s,
        "iteration_s_interval": interval(times.iteration_s, like, p.slow),
        "tokens_per_s": rate,
        "tokens_per_s_per_gpu": rate / mesh.ranks,
        "model_tflops_per_gpu": flops / 1e12,
        "mfu": flops / p.hardware.peak_flops(DType(job.precision.compute)),
        "time_breakdown": {str(r): row for r, row in enumerate(times.seconds)},
        "bubble_fraction": times.bubble_fraction,
        "exposed_comm_s": times.exposed_comm_s,
        "fits": fit,
        "memory": mem,
        "parameters": parameters(p.prepared),
        "ops": len(p.plan) * p.classes.count * steps,
        "folded": {"replicas_simulated": p.classes.count, "replicas": len(p.classes.of)},
        "host_model": job.costs.host_model,
        "interference_level": job.costs.interference,
        "messages": MESSAGES[takes_turns(p.plan)],
        "software": job.costs.software or GENERIC,
        "cost_source": p.sources.word,
        "cost_shares": p.sources.shares,
        "warnings": [*warnings(p.prepared), *elsewhere(p), *as_measured(p), *unfilled(p)],
        "plan_digest": plan_digest(p.plan),
        "cost_digest": costs.digest,
        "job_digest": job_digest(job, None if p.slow is None else p.slow.asked),
    }
    if p.slow is not None:
        out["slow_nodes"] = p.slow.to_dict()
    if not fit:
        out["reason"] = reason(p)
    return out


LOOPED = ("interleaved-1f1b", "interleaved-1f1b-overlap", "looped-bfs", "zb1p")  # rounds as long as there are ranks


def parameters(p: PreparedJob) -> dict[str, int]:
    """Parameters of the model, MTP modules too; those that one token meets; and where some are frozen, the others."""
    trained = {q.name: q for e in p.base.entries for q in e.part.params}
    frozen = {q.name: q for e in p.base.entries for q in e.part.frozen}
    found = [*trained.values(), *frozen.values()]
    dense, experts = (sum(q.numel for q in found if q.expert is kind) for kind in (False, True))
    moe = p.config.moe
    met = experts if moe is None else experts * moe.top_k // moe.experts
    sizes = {"total": dense + experts, "active": dense + met}
    return sizes | ({"trained": sum(q.numel for q in trained.values())} if frozen else {})


PADDED = 1.5  # times their bytes, from which shares of whole matrices are worth a word


def warnings(p: PreparedJob) -> list[str]:
    """What is legal and rarely meant."""
    enough, out = p.mesh.sizes["pp"] if p.schedule in LOOPED else p.stages, list[str]()
    if p.mbs < enough:
        few = f"{p.mbs} microbatch{'es' if p.mbs > 1 else ''} on {enough} {'stages' if enough == p.stages else 'ranks'}"
        out.append(f"{few}: the pipeline never fills; set schedule.microbatches = {enough} or more")
    if p.job.routing.kind == "hot" and p.job.routing.strength == 1:
        out.append("routing.strength = 1: no expert is hotter than the others; set how many times as popular one is")
    captured = read_model(p.job).captured if p.job.model.graph else None
    if captured is not None and any(part.written_out for part in captured.found.parts.values()):
        fused = "attention that the module writes out is priced as a kernel that stores no scores, as no run has it"
        out.append(f"{fused}; capture with --eager to have each call priced (docs/YOUR_MODEL.md)")
    shared = [b for b in buckets(p.plan().graph) if b.matrices and b.replica.zero]
    padded = sum(b.shard * b.ranks for b in shared) / (sum(b.numel for b in shared) or 1)
    if padded > PADDED:
        few = f"few matrices for so many replicas: with their shares padded they take {padded:.1f} times their bytes"
        out.append(f"{few}; set parallel.zero = 0, or a smaller dp")
    return out


LINK_KEYS = ("nvlink_", "nic_", "dispatch_", "oversubscription", "collective_launch_us")
_OF_OPS = ("peak_TFLOPs", "hbm_GBps", "sms", "power_W", "gemm", "attention", "memory_", "kernel_launch_us", "host_GBps")


def as_measured(p: PlannedJob) -> list[str]:
    """Keys of `[cluster]` and `[costs]` that are to change seconds, and do not change those that a profile has."""
    profile, costs = p.model.measured.profile, p.prepared.job.costs
    if profile is None:
        return []
    of = (LINK_KEYS if profile.links else ()) + (_OF_OPS if profile.ops else ())
    keys = [f"cluster.{k}" for k in p.prepared.job.cluster.overrides if k.startswith(of)]
    chosen = {"deterministic": costs.deterministic, "portable_attention": costs.portable_attention is not None}
    keys += [f"costs.{k}" for k, said in chosen.items() if said and profile.ops]  # which kernels run is no op's class
    out = [f"{', '.join(keys)}: what costs.profile has measured stays as it was measured"] if keys else []
    if p.model.measured.every_copy and p.model.fabric.deduplicate and p.prepared.mesh.sizes["ep"] > 1:
        whose = "costs.profile's all-to-alls send every copy of a token, the job's dispatcher one per node"
        out.append(f'{whose}: scaled as the model has the two; set costs.dispatcher = "nccl" if yours sends all')
    return out


def unfilled(p: PlannedJob) -> list[str]:
    """That uplinks with less than their leaves' NICs could send are never full: who has leaves, and shares links?"""
    hw, shared = p.hardware, p.prepared.job.costs.interference == "maxmin"
    if hw.oversubscription == 1 or (p.prepared.job.cluster.nodes or 1) == 1:
        return []
    lacking = {"cluster.leaf_nodes": hw.leaf_nodes is None, "costs.interference": not shared}
    what = " and ".join(key for key, lacks in lacking.items() if lacks)
    fix = 'nodes under one leaf; interference = "maxmin"'
    return [f"cluster.oversubscription changes nothing without {what} ({fix})"] if what else []


LESS_MEASURED = 0.1  # of the seconds of all ops and messages: what two steps may differ in by the profile alone


def less_measured(shares: Mapping[str, Any], than: Mapping[str, Any]) -> bool:
    """Whether of one step's seconds (its `cost_shares`) so many more are modelled than of another's that the two cannot
    be held against each other: what a profile lacks looks quicker, or slower, by as much as the model is off.
    """
    return float(shares["modelled"]) > float(than["modelled"]) + LESS_MEASURED


def elsewhere(p: PlannedJob) -> list[str]:
    """That a profile is of other devices than the job's; what a hardware file of one's own stands for, is not known."""
    profile, gpu = p.model.measured.profile, p.prepared.job.cluster.gpu
    if profile is None or gpu not in presets() or not (name := profile.machine.device):
        return []
    words = re.split(r"[^a-z0-9]+", profile.machine.gpu.lower()) if profile.machine.gpu else ["cpu"]
    card = "sxm" in gpu and not {"pcie", "nvl"}.isdisjoint(words)  # of the same name, with less power and slower memory
    if gpu.partition("-")[0] in words and not card:
        return []
    return [f"costs.profile is of {name}, cluster.gpu = {gpu!r}: what it holds are that machine's seconds"]


PRODUCTS = (KernelKind.GEMM, KernelKind.GROUPED_GEMM)


def _model_flops(p: PreparedJob) -> float:
    """Forward and backward FLOPs of one step over all GPUs, as MFU counts them: backward is twice forward, without the
    products of gradients that no frozen parameter has; of layers without a backward, forward alone."""
    source = p.base.source
    assert source is not None
    each, still = 0.0, before_training({e.chunk.name: e.chunk for e in p.base.entries}.values())
    for e in p.base.entries:
        work, spared = source.work(e), 2.0 if e.chunk.name in still else 0.0
        if e.part.frozen and not spared:
            made, graded = (
                sum(k.flops * k.count for k in w if k.kind in PRODUCTS) for w in (work.forward, work.weight_grad)
            )
            spared = (made - graded) / (sum(k.flops * k.count for k in work.forward) or 1)
        each += (3.0 - spared) * work.model_flops
    return each * p.mbs * (p.job.parallel.dp or 1)


def traits(p: PlannedJob, times: StepBreakdown) -> PredictionTraits:
    """What the run is like."""
    job = p.prepared.job
    host = sum(row["host"] for row in times.seconds) / len(times.seconds) / times.iteration_s
    given = job.costs.stage_times is not None
    moe = p.prepared.config.moe is not None
    software = "" if job.costs.software in (None, GENERIC) else str(job.costs.software)
    return PredictionTraits(p.hardware.name, software, moe, given, host > WAITS)


def memory_object(p: PlannedJob, like: PredictionTraits) -> Object:
    """Peaks, capacity and breakdown by pipeline rank. like: what the run is like, for the chance of room."""
    hw, m = p.hardware, p.memory
    context, found = p.context_bytes, bands(p.reserved)
    ranks = range(p.plan.programs)
    parts = {str(r): _parts(p, r) for r in ranks}
    device = {str(r): found[r].middle + context for r in ranks}
    room = hw.hbm_bytes
    chances = [fits_probability(int(m.peak[r]), device[str(r)], room, like) for r in ranks]
    return {
        "peak_allocated_bytes": {str(r): int(m.peak[r]) for r in ranks},
        "peak_reserved_bytes": {str(r): found[r].middle for r in ranks},
        "reserved_band_bytes": {str(r): [found[r].low, found[r].high] for r in ranks},
        "device_peak_bytes": device,
        "capacity_bytes": room,
        "margin_bytes": int(p.prepared.job.cluster.memory_margin_GiB * GIB),
        "breakdown_bytes": parts,
        "cache_bytes": {r: device[r] - sum(parts[r].values()) for r in parts},
        "fits_probability": min(chances),
        "peak_op": {str(r): p.plan.text(int(m.at[r])) for r in ranks},
    }


def _parts(p: PlannedJob, rank: int) -> dict[str, int]:
    """What a rank's peak consists of."""
    return {**p.memory.breakdown(rank), "context": p.context_bytes}


def reason(p: PlannedJob) -> str:
    """Which rank does not fit, by how much, and what would help most. Asks no allocator twice, as bands would."""
    device = [r.reserved + p.context_bytes for r in p.reserved]
    rank = device.index(max(device))
    have, margin = p.hardware.hbm_bytes, int(p.prepared.job.cluster.memory_margin_GiB * GIB)
    room = have - margin
    there = f"the {_gib(have)} there are{f', less a margin of {_gib(margin)}' if margin else ''}"
    needs = f"rank {rank} needs {_gib(device[rank])}, {_gib(device[rank] - room)} more than {there}"
    at, parts = p.plan.text(int(p.memory.at[rank])), _parts(p, rank)
    asked = sum(parts.values())
    if asked <= room:  # what is asked for would fit: what does not is cached and cut into pieces too small
        held = f"{needs}, at {at}; {_gib(device[rank] - asked)} of it lie idle in the allocator's cache"
        if all(r.expandable_fits for r in p.reserved):
            return f"{held}: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True makes it fit"
        return f"{held}: a smaller microbatch, or recompute more"
    worst = max(parts, key=lambda k: parts[k])
    return f"{needs}, at {at}; most of it {worst} ({_gib(parts[worst])}): {cure(worst, p.prepared.job.parallel)}"


def cure(part: str, p: JobParallel) -> str:
    """What makes a part of memory smaller, less what the job has already.

    Without replicas ZeRO shards nothing; a sharded optimizer has as many bytes in all however it is divided.

    >>> cure("optimizer", JobParallel(dp=8, zero=0)), cure("optimizer", JobParallel(tp=8, dp=1))
    ('zero = 1 or more, a larger tp or pp, or optimizer.offload', 'more GPUs, or optimizer.offload')
    """
    shards = (p.dp or 1) * p.cp > 1
    if part == "optimizer" and (p.zero or not shards):
        return "more GPUs, or optimizer.offload"
    fits, level = _CURES.get(part, ("a smaller microbatch", None))
    return f"zero = {_LEVELS[level]}, {fits}" if level is not None and shards and p.zero < level else fits


_LEVELS = {1: "1 or more", 2: "2 or 3", 3: "3"}
_CURES = {  # and the least level of ZeRO that shards it
    "activations": ("recompute more, or fewer microbatches in flight", None),
    "parameters": ("a larger tp, pp or ep", 3),
    "gradients": ("a larger tp, pp or ep", 2),
    "optimizer": ("a larger tp or pp, or optimizer.offload", 1),
    "context": ("a larger device, or a smaller cluster.memory_margin_GiB", None),
}


def _gib(nbytes: int) -> str:
    """Two digits where one would say 0.

    >>> _gib(3 * GIB // 2), _gib(GIB // 50)
    ('1.5 GiB', '0.02 GiB')
    """
    return f"{nbytes / GIB:.{1 if nbytes >= GIB else 2}f} GiB"


def job_digest(job: Job, slow: JobSlowNodes | None = None) -> str:
    """SHA-256 of the job's values, one for one job however it is written: a schedule's alias, its usual number of
    stages per rank and what a job without schedule or microbatches has say nothing new, and neither does the file's
    name. slow: what its slow ranks were found for.

    >>> from ir.job.load import job_from
    >>> short = job_from({"model": {"config": "x"}, "schedule": {"name": "vpp"}})
    >>> long = job_from({"model": {"config": "x"}, "schedule": {"name": "interleaved-1f1b", "stages_per_rank": 2}})
    >>> job_digest(short) == job_digest(long)
    True
    """
    s = job.schedule
    if not (s.directives or s.builder or s.csv):
        name = canonical(s.name or DEFAULT_SCHEDULE)
        usual = s.stages_per_rank == default_chunks(name)
        mbs = s.microbatches or (2 * job.parallel.pp if s.global_batch is None else None)
        s = replace(s, name=name, stages_per_rank=None if usual else s.stages_per_rank, microbatches=mbs)
    cluster = replace(job.cluster, slow_nodes=slow or job.cluster.slow_nodes)
    table = asdict(replace(job, schedule=s, cluster=cluster, file=""))
    if s.global_batch is None:  # a resolved job has microbatches
        table["schedule"].pop("global_batch")
    table["cluster"].pop("price")
    if table["cluster"]["slow_nodes"] is None:
        table["cluster"].pop("slow_nodes")
    if table["parallel"]["dp_replicate"] == 1:
        table["parallel"].pop("dp_replicate")
    table["model"].pop("weights")  # values, of which no prediction depends
    table.pop("search")
    return hashlib.sha256(json.dumps(table, sort_keys=True, default=list).encode()).hexdigest()
