"""What-ifs: other jobs that differ in a few keys, simulated; never estimated."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cost_models.profile.profile import CostSource
from ir.core.errors import PiperError
from ir.core.ops import Pass
from ir.job import Job
from ir.job.load import job_from
from ir.job.schema import BUCKET_MIB
from ir.job.table import table_of, toml_value
from ir.verify.deadlock import takes_turns
from piper_sim.pricing.prepare import hardware_of
from piper_sim.pricing.stage_times import given_times
from piper_sim.study.explain.excess import usual_links
from piper_sim.study.predict import planned, timed
from piper_sim.study.prediction import Prediction
from piper_sim.study.simulate import LESS_MEASURED

Changes = dict[str, Any]  # section.key -> value as TOML has it; None: the key is left out
Progress = Callable[[str], AbstractContextManager[object]]


@dataclass(frozen=True)
class JobChange:
    """A job with `changes`, simulated: seconds of its step, what that is less than the job's own, whether it fits."""

    name: str
    changes: Changes
    iteration_s: float
    gain_s: float
    fits: bool

    def slower(self, factor: float) -> "JobChange":
        """With seconds times a factor, as past runs correct the job's own."""
        return replace(self, iteration_s=self.iteration_s * factor, gain_s=self.gain_s * factor)


def changed(job: Job, changes: Mapping[str, Any]) -> Job:
    """A job with some keys set anew.

    >>> from piper_sim import load_job
    >>> job = load_job({"model": {"config": "tiny-llama"}, "cluster": {"speed": {"1": 0.5}}})
    >>> changed(job, {"parallel.pp": 2, "cluster.speed": {}}).cluster.speed
    {}
    """
    table = table_of(job)
    for path, value in changes.items():
        section, key = path.split(".", 1)
        if value is None:
            table[section].pop(key, None)
        else:
            table[section][key] = value
    return job_from(table, file=job.file)


def settings(changes: Mapping[str, Any]) -> list[str]:
    """Changes as `--set` takes them.

    >>> settings({"parallel.pp": 2, "costs.stage_times": {"F": 0.5}, "costs.free": ["p2p"]})
    ['parallel.pp=2', 'costs.stage_times={ F = 0.5 }', 'costs.free=["p2p"]']
    """
    return [f"{key}={toml_value(value)}" for key, value in changes.items() if value is not None]


def what_ifs(job: Job, p: Prediction, progress: Progress = nullcontext) -> tuple[JobChange, ...]:
    """Each change that applies to a job, simulated; the largest gain first. What cannot be built is left out, and
    so is what a profile has measured much less of than of the job: it would gain by the model's error.

    p: the job as it is, simulated. Its own job is resolved: other keys than the user's would be fixed.
    """
    out = []
    for name, changes in asked(job, p):
        with progress(f"simulating: {name}"), suppress(PiperError):
            other = changed(job, changes)
            found = timed(planned(other, hardware_of(other)))  # not checked: nobody will run it
            if _less_measured(found, p):
                continue
            out.append(JobChange(name, changes, found.iteration_s, p.iteration_s - found.iteration_s, found.fits))
    return tuple(sorted(out, key=lambda w: -w.gain_s))


def _less_measured(other: Prediction, p: Prediction) -> bool:
    """Whether more of its seconds are modelled, by much of what the job takes. Fewer in all, as where messages are
    free, are no reason not to believe it.
    """
    rows = p.planned.sources.rows
    return _modelled(other) > _modelled(p) + LESS_MEASURED * sum(r.seconds * r.times for r in rows)


def _modelled(p: Prediction) -> float:
    rows = p.planned.sources.rows
    return sum(r.seconds * r.times for r in rows if r.source is CostSource.MODELLED)


def asked(job: Job, p: Prediction) -> Iterator[tuple[str, Changes]]:
    """(name, changes) of what applies to a job."""
    ranks = p.prepared.ranks
    quick = {rank: s for rank, s in job.cluster.speed.items() if s >= 1}
    if quick != job.cluster.speed:
        yield "no straggler", {"cluster.speed": quick}
    if job.cluster.slow_nodes is not None:
        yield "no slow nodes", {"cluster.slow_nodes": None}
    if job.routing.kind != "balanced":
        file = {"routing.file": None} if job.routing.file is not None else {}
        yield "balanced experts", {"routing.kind": "balanced", **file}
    profile = p.planned.model.measured.profile
    timed_links = profile is not None and bool(profile.links)  # which stay as they are, and would gain nothing
    if ranks > 1 and not timed_links:
        yield "links x 2", _links(p)
    if (usual := usual_links(job)) != job and not timed_links:
        hw, own = hardware_of(usual), usual.cluster.overrides
        changes = {k: getattr(hw, k) for k in job.cluster.overrides if k not in own}
        yield "links as usual", {f"cluster.{k}": v for k, v in changes.items()}
    for name, what in _free(p):
        yield name, {"costs.free": [*job.costs.free, what]}
    if p.prepared.stages > 1 and job.schedule.directives is None:
        if job.parallel.layers != "balanced":
            yield "balanced layers", {"parallel.layers": "balanced"}
        yield "perfect split", {"costs.stage_times": _even(job, p)}
    if _reduces_whole(p):
        yield "reductions beside backward", {"parallel.bucket_MiB": BUCKET_MIB}
    if (copies := _copies(p)) > 1:
        yield "shards inside a node", {"parallel.dp_replicate": copies}
    o = job.optimizer
    if not p.fits and o.offload < 1 and o.name != "muon" and p.planned.hardware.host_GBps is not None:
        yield "optimizer on the host", {"optimizer.offload": 1.0}
    if job.schedule.p2p == "overlapped" and not takes_turns(p.plan):
        yield "ordered transfers", {"schedule.p2p": "ordered"}
    batch = job.schedule.global_batch
    more = p.prepared.mbs + 1 if batch is None else batch + batch // p.prepared.mbs
    yield "one more microbatch", {f"schedule.{'microbatches' if batch is None else 'global_batch'}": more}
    some = job.schedule.recompute_layers is not None
    for recompute in ("none", "selective", "full"):
        if some:
            every = {"schedule.recompute": recompute, "schedule.recompute_layers": ":"}
            yield f"recompute {recompute}", {"schedule.recompute_layers": 0} if recompute == "none" else every
        elif recompute != job.schedule.recompute:
            yield f"recompute {recompute}", {"schedule.recompute": recompute}


def _reduces_whole(p: Prediction) -> bool:
    """Whether a stage's gradients are reduced together, behind its last backward, though they need not be."""
    asked, sizes = p.prepared.job.parallel, p.prepared.mesh.sizes
    whole = asked.bucket_MiB is None and asked.zero < 2 and p.prepared.job.schedule.directives is None
    return whole and asked.overlap_grad_reduce and sizes["dp"] * sizes["cp"] > 1


def _copies(p: Prediction) -> int:
    """How many nodes each hold all shards of ZeRO-2 and 3, were none to lie across nodes; 1: none does."""
    asked, mesh = p.prepared.job.parallel, p.prepared.mesh
    dp = mesh.shape(("dp",), p.planned.model.per_node)
    return dp.ranks // dp.per_node if asked.zero >= 2 and asked.dp_replicate == 1 and dp.per_node > 1 else 1


def _free(p: Prediction) -> Iterator[tuple[str, str]]:
    sizes = p.prepared.mesh.sizes
    # Seconds given for whole stages have in them what ranks exchange there: freed, the rest would only take them over.
    given = bool((p.prepared.job.costs.stage_times or {}).keys() - {"p2p"})
    if p.prepared.config.moe is not None and sizes.get("ep", 1) > 1 and not given:
        yield "all-to-all free", "all_to_all"
    if sizes["pp"] > 1:
        yield "transfers free", "p2p"
    if p.prepared.ranks > sizes["pp"] and not given:
        yield "other collectives free", "collective"
    yield "host free", "host"


def _links(p: Prediction) -> Changes:
    hw = p.planned.hardware
    found = {"nvlink_GBps": hw.nvlink_GBps, "nvlink_pair_GBps": hw.nvlink_pair_GBps, "nic_Gbps": hw.nic_Gbps}
    return {f"cluster.{k}": 2 * v for k, v in found.items() if v is not None}


def _even(job: Job, p: Prediction) -> Changes:
    """`costs.stage_times` that give every stage the mean of what stages take."""
    graph, model = p.plan.graph, p.planned.model
    given = dict(job.costs.stage_times or {})
    means = {k: float(np.mean(v)) for k, v in given_times(given, graph.stages).items()}
    kept = {"p2p": given["p2p"]} if "p2p" in given else {}
    for key, passes in (("F", (Pass.F,)), ("I", (Pass.I, Pass.R)), ("W", (Pass.W,))):
        nodes = [n for n in graph.nodes if n.kind in passes]
        total = sum(sum(model.node_shares(n)) + model.node_message(n) for n in nodes)
        means.setdefault(key, total / graph.stages)
    return {**kept, **means}
