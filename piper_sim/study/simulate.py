"""The object of `piper-sim simulate`: a prediction in the contract's keys."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from ir.core.work import DType
from ir.job import Job
from ir.plan.text import plan_digest
from piper_sim.study.predict import GIB, Planned, Prediction, fits


def simulate_object(p: Prediction) -> dict[str, object]:
    """The JSON object of `piper-sim simulate`."""
    job, mesh = p.prepared.job, p.prepared.mesh
    tokens = (job.parallel.dp or 1) * p.prepared.mbs * job.schedule.microbatch_size * job.model.seq_len
    flops = _model_flops(p) / p.iteration_s / mesh.ranks
    peak = p.planned.hardware.peak_flops(DType(job.precision.compute))
    mem = memory_object(p.planned)
    fit = fits(p.planned)
    classes = p.planned.classes
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
        "ops": len(p.plan) * classes.count * p.steps,
        "folded": {"replicas_simulated": classes.count, "replicas": len(classes.of)},
        "host_model": job.costs.host_model,
        "interference_level": job.costs.interference,
        "cost_source": p.planned.sources.word,
        "cost_shares": p.planned.sources.shares,
        "plan_digest": plan_digest(p.plan),
        "cost_digest": p.costs.digest,
        "job_digest": job_digest(job),
    }
    if not fit:
        out["reason"] = reason(p.planned, mem)
    return out


def _limit(mem: Mapping[str, Any]) -> int:
    return int(mem["capacity_bytes"]) - int(mem["margin_bytes"])


def _model_flops(p: Prediction) -> float:
    """Forward and backward FLOPs of one step over all GPUs, as MFU counts them: backward is twice forward."""
    source = p.prepared.base.source
    assert source is not None
    forward = sum(source.work(e).model_flops for e in p.prepared.base.entries)
    return 3.0 * forward * p.prepared.mbs * (p.prepared.job.parallel.dp or 1)


def memory_object(p: Planned) -> dict[str, Any]:
    """Peaks, capacity and breakdown by pipeline rank."""
    hw, m = p.hardware, p.memory
    context, bands = p.context_bytes, [r.band for r in p.reserved]
    ranks = range(p.plan.programs)
    return {
        "peak_allocated_bytes": {str(r): int(m.peak[r]) for r in ranks},
        "peak_reserved_bytes": {str(r): bands[r].middle for r in ranks},
        "reserved_band_bytes": {str(r): [bands[r].low, bands[r].high] for r in ranks},
        "device_peak_bytes": {str(r): bands[r].middle + context for r in ranks},
        "capacity_bytes": int(hw.hbm_GiB * GIB),
        "margin_bytes": int(p.prepared.job.cluster.memory_margin_GiB * GIB),
        "breakdown_bytes": {str(r): {**m.breakdown(r), "context": context} for r in ranks},
        "peak_op": {str(r): p.plan.text(int(m.at[r])) for r in ranks},
    }


def reason(p: Planned, mem: Mapping[str, Any]) -> str:
    """Which rank does not fit, by how much, and what would help most."""
    device: dict[str, int] = mem["device_peak_bytes"]
    rank = max(device, key=lambda r: device[r])
    room = _limit(mem)
    needs = f"rank {rank} needs {_gib(device[rank])}, {_gib(device[rank] - room)} more than {_room(mem)}"
    at, parts = mem["peak_op"][rank], mem["breakdown_bytes"][rank]
    asked = sum(parts.values())
    if asked <= room:  # what is asked for would fit: what does not is cached and cut into pieces too small
        held = f"{needs}, at {at}; {_gib(device[rank] - asked)} of it lie idle in the allocator's cache"
        if all(r.expandable_fits for r in p.reserved):
            return f"{held}: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True makes it fit"
        return f"{held}: a smaller microbatch, or recompute more"
    worst = max(parts, key=lambda k: parts[k])
    return f"{needs}, at {at}; most of it {worst} ({_gib(parts[worst])}): {_CURES.get(worst, 'a smaller microbatch')}"


_CURES = {
    "activations": "recompute more, or fewer microbatches in flight",
    "parameters": "a larger pp, tp or ep, or zero = 3",
    "gradients": "zero = 2 or 3, or a larger pp",
    "optimizer": "zero = 1 or more, or a larger dp",
    "context": "a larger device, or a smaller cluster.memory_margin_GiB",
}


def _gib(nbytes: int) -> str:
    """Two digits where one would say 0.

    >>> _gib(3 * GIB // 2), _gib(GIB // 50)
    ('1.5 GiB', '0.02 GiB')
    """
    return f"{nbytes / GIB:.{1 if nbytes >= GIB else 2}f} GiB"


def _room(mem: Mapping[str, Any]) -> str:
    """What there is, where the margin explains it."""
    have, margin = (_gib(mem[k]) for k in ("capacity_bytes", "margin_bytes"))
    return f"the {have} there are, less a margin of {margin}" if mem["margin_bytes"] else f"the {have} there are"


def job_digest(job: Job) -> str:
    """SHA-256 of the job's values; its file name is not among them."""
    table = asdict(replace(job, file=""))
    return hashlib.sha256(json.dumps(table, sort_keys=True, default=list).encode()).hexdigest()
