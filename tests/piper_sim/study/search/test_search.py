"""Search against enumeration: the same winner, the same front, bounds that hold, reasons that are true."""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib import import_module
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from ir.core.errors import PiperError
from ir.job import Job, load_job
from ir.job.load import KEYS
from piper_sim.pricing.prepare import hardware_of
from piper_sim.study.predict import predict
from piper_sim.study.search import JobSearchResult, search
from piper_sim.study.search.bound import JobBound, JobBounds
from piper_sim.study.search.evaluate import JobRefusal
from piper_sim.study.search.result import front
from piper_sim.study.search.space import JobSpace, replaced
from tests.refusals import refusal

Point = tuple[float, float, int]
walked = import_module("piper_sim.study.search.search")  # beside it stands a function of this name


def drawn(seed: int) -> Job:
    """A tiny job and lists of values, the model, cluster, memory and lists drawn."""
    r = random.Random(seed)
    moe = seed % 2
    names = ["1f1b", "interleaved-1f1b", "zb1p", "zbv", "dualpipe", "dualpipev", "v-half", "1f1b-overlap"]
    lists: dict[str, Any] = {
        "tp": [1, 2],
        "pp": r.sample([1, 2, 4], 2),
        "ep": [1, 2, 4] if moe else [1],
        "zero": r.sample([0, 1, 2, 3], 2),
        "name": r.sample(names, 3),
        "microbatch_size": r.choice([[1], [1, 2]]),
        "recompute": r.choice([["none"], ["none", "full"], ["none", ["norm", "activation"]]]),
    }
    model = {"config": "tiny-moe" if moe else "tiny-llama", "seq_len": r.choice([256, 1024])}
    cluster = {"gpu": "h100-sxm", "nodes": 1, "gpus_per_node": 4, "memory_margin_GiB": 0}
    cluster["hbm_GiB"] = r.choice([1.3, 2.1, 80.0])
    more = {"optimizer": {"clip_norm": r.choice([0.0, 1.0])}, "costs": {"interference": r.choice(["none", "pairwise"])}}
    more["precision"] = r.choice([{}, {"params": "fp32"}])
    return load_job({"model": model, "cluster": cluster, "schedule": {"global_batch": 16}, "search": lists, **more})


def enumerated(job: Job) -> Iterator[tuple[int, Job, JobBound, Any]]:
    """Every legal configuration with its bounds and its prediction."""
    hardware = hardware_of(job)
    space, bounds = JobSpace.of(job, hardware), JobBounds(hardware)
    for number, changes in enumerate(space):
        try:
            one = space.job_of(changes)
            yield number, one, bounds.of(one), predict(one)
        except PiperError:
            continue


def told(found: JobSearchResult) -> list[tuple[float, float]]:
    return [(p["iteration_s"], max(p["memory"]["device_peak_bytes"].values())) for p in found.pareto]


@pytest.mark.parametrize("seed", [*(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1)), 2, 3])
def test_what_is_found_is_what_enumeration_finds(seed: int) -> None:
    job = drawn(seed)
    hardware = hardware_of(job)
    points: list[Point] = []
    for number, one, bound, p in enumerated(job):
        for key, values in job.search.overrides.items():
            assert getattr(getattr(one, KEYS[key]), key) in values
        first, peak = JobBounds(hardware).first(one), max(p.to_dict()["memory"]["device_peak_bytes"].values())
        assert first.seconds <= bound.seconds <= p.iteration_s and first.device_bytes <= bound.device_bytes <= peak
        assert bound.excess is None or not p.fits
        if p.fits:
            points.append((p.iteration_s, peak, number))
    found = search(job, budget_s=600.0)
    assert 20 < found.space <= 400 and found.proven and found.pareto_proven
    assert told(found) == [(t, m) for t, m, _ in front(points)]
    assert found.evaluated + len(found.all_rejected) >= found.space


def small(hbm_GiB: float = 80.0, **search_keys: Any) -> Job:
    """A dozen configurations of a tiny model on four GPUs."""
    lists = {"tp": [1, 2], "pp": [1, 2, 4], "name": ["1f1b", "gpipe"], "zero": [1], "microbatch_size": [1]}
    pins = {"pin": ["recompute", "layers", "cp", "ep"]}
    cluster = {"gpu": "h100-sxm", "nodes": 1, "gpus_per_node": 4, "memory_margin_GiB": 0, "hbm_GiB": hbm_GiB}
    model = {"config": "tiny-llama", "seq_len": 1024}
    table = {"model": model, "cluster": cluster, "schedule": {"global_batch": 16}, "search": lists | pins | search_keys}
    return load_job(table)


@cache
def undisturbed() -> JobSearchResult:
    """Of these."""
    return search(small())


def test_a_bound_made_too_tight_loses_the_winner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what the test above would see if a bound were wrong."""
    base, honest = small(), JobBounds.of
    job = replace(base, parallel=replace(base.parallel, pp=4))
    best = search(job)
    assert best.best is not None and "parallel.pp" in best.best["changes"]
    wanted = best.best["iteration_s"]

    def tight(self: JobBounds, one: Job) -> JobBound:
        bound = honest(self, one)
        more = replace(bound, seconds=9 * bound.seconds, device_bytes=2 * bound.device_bytes)
        return more if one.parallel.pp < 4 else bound

    monkeypatch.setattr(JobBounds, "of", tight)
    lost = search(job)
    assert lost.best is not None and lost.proven and lost.best["iteration_s"] > wanted


@pytest.mark.parametrize(("share", "simulated"), [(0.5, 5), (0.0, 0)])
def test_bounds_leave_time_to_simulate(monkeypatch: pytest.MonkeyPatch, share: float, simulated: int) -> None:
    """A clock that is a second later whenever it is asked: the bounds of the whole space would take all the budget.

    Of nothing that was left, nothing but the job itself is simulated: the control.
    """
    job = small(zero=[0, 1, 2, 3], microbatch_size=[1, 2, 4])
    whole = len(list(JobSpace.of(job, hardware_of(job))))
    monkeypatch.setattr(walked, "time", SimpleNamespace(monotonic=count().__next__))
    monkeypatch.setattr(walked, "SIMULATED", share)
    found = search(job, budget_s=0.8 * whole)
    assert found.evaluated - 1 >= simulated and (simulated or found.evaluated == 1)
    assert found.space == whole and not found.proven and not found.pareto_proven


def test_the_order_in_which_a_large_space_is_bounded_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = search(drawn(3), budget_s=600.0)
    monkeypatch.setattr(walked, "MANY", 0)
    other = search(drawn(3), budget_s=600.0)
    assert usual.proven and other.proven and usual.space == other.space
    assert [(p["iteration_s"], p["memory"]) for p in usual.pareto] == [
        (p["iteration_s"], p["memory"]) for p in other.pareto
    ]


def test_a_budget_of_nothing_still_knows_the_space() -> None:
    found = search(small(), budget_s=0.0)
    assert not found.proven and found.evaluated == 0 and found.best is None and found.space > 8
    assert "budget" in found.to_dict()["reason"]


def test_where_none_can_be_built_the_reason_most_have_is_said() -> None:
    found = search(small(tp=[3]))
    reasons = [r.reason for r in found.all_rejected]
    said = str(found.to_dict()["reason"])
    most = max(set(reasons), key=reasons.count)
    assert found.proven and found.evaluated == 0 and reasons.count(said.partition("): ")[2]) == reasons.count(most)
    assert f"({reasons.count(most)} of {found.space})" in said


def test_every_reason_is_true() -> None:
    lists = {"tp": [1, 2, 8], "dp": [1, 2, 4], "name": ["1f1b", "dualpipe"], "layers": ["balanced", [4, 4]]}
    job = small(1.3, **lists, pin=["recompute", "cp", "ep"])
    found = search(job, budget_s=600.0)
    assert found.proven and found.pareto_proven and len(found.all_rejected) + len(found.pareto) == found.space
    assert any("simulated" in r.reason for r in found.all_rejected)
    for r in found.all_rejected:
        one = replaced(job, r.changes)
        if r.kind is JobRefusal.ILLEGAL:
            assert refusal(predict, one).kind.exit_code in (2, 3) and r.reason
        elif r.kind is JobRefusal.MEMORY:
            assert not predict(one).fits and ("rank" in r.reason) and "GiB" in r.reason
        else:
            p = predict(one).to_dict()
            peak = max(p["memory"]["device_peak_bytes"].values())
            after = "simulated" in r.reason  # of equal ones the first is kept
            assert any((t <= p["iteration_s"] if after else t < p["iteration_s"]) and m <= peak for t, m in told(found))
            assert after or "at least" in r.reason
    assert {r.kind for r in found.all_rejected} >= {JobRefusal.ILLEGAL, JobRefusal.MEMORY}


OPTIONS = """
costs.dispatcher=deepep | costs.software=megatron | routing.kind=zipf | routing.kind=hot | cluster.speed={3=0.5}
cluster.speed={3=1.7,1=1.2} | costs.host_model=inline | costs.interference=maxmin | parallel.order=ep tp cp dp pp
parallel.order=pp tp cp ep dp | precision.compute=fp8 | optimizer.clip_norm=0 | schedule.merge=template
schedule.merge=profile | schedule.delay_wgrad=true | cluster.gpus_per_node=3 | model.tie_word_embeddings=true
costs.free=['all_to_all'] | parallel.bucket_MiB=1 | model.attention=unfused | parallel.cp=2
schedule.microbatch_size=2 | costs.stage_times={F=0.01,B=0.02} | schedule.recompute=["norm","activation"]
schedule.recompute=full & schedule.recompute_layers=1::2 | schedule.recompute=mlp & schedule.recompute_layers=1
schedule.recompute=operators & schedule.recompute_layers=[0,5] | costs.grouped_gemm=false
optimizer.name=muon & parallel.zero=0 | optimizer.name=muon & parallel.zero=1 & optimizer.tp_mode=distributed
parallel.dp_replicate=2 & parallel.zero=2 | parallel.dp_replicate=2 & parallel.zero=3
costs.software=megatron-core & model.tie_word_embeddings=true & parallel.zero=1
"""


@pytest.mark.parametrize("option", [o.strip() for line in OPTIONS.split("\n") for o in line.split("|") if o.strip()])
def test_bounds_hold_whatever_a_job_asks_for(option: str) -> None:
    r = random.Random(option)
    model = {"config": "tiny-moe", "seq_len": 1024, "num_hidden_layers": 8}
    names = ["1f1b", "zb1p", "zbv", "dualpipe", "dualpipev", "1f1b-overlap", "interleaved-1f1b"]
    for _ in range(2):
        parallel = {"pp": r.choice([2, 4]), "tp": r.choice([1, 2]), "dp": r.choice([2, 4]), "ep": 2}
        parallel["zero"] = r.randrange(4)
        table = {"model": model, "parallel": parallel, "schedule": {"name": r.choice(names), "microbatches": 8}}
        job = load_job(table, option.split(" & "))
        bounds, p = JobBounds(hardware_of(job)), predict(job)
        first, bound, peak = bounds.first(job), bounds.of(job), p.to_dict()["memory"]["device_peak_bytes"]
        assert first.seconds <= bound.seconds <= p.iteration_s
        assert first.device_bytes <= bound.device_bytes <= max(peak.values())


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe", "interleaved-1f1b"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_bounds_hold_over_two_towers(name: str, recompute: str) -> None:
    model = {"model_type": "t5", "num_layers": 5, "num_decoder_layers": 3, "seq_len": 64, "encoder_seq_len": 1024}
    for pp, zero in ((2, 1), (4, 3)):
        schedule = {"name": name, "microbatches": 8, "recompute": recompute}
        job = load_job({"model": model, "parallel": {"pp": pp, "dp": 2, "zero": zero}, "schedule": schedule})
        bounds, p = JobBounds(hardware_of(job)), predict(job)
        bound, peak = bounds.of(job), p.to_dict()["memory"]["device_peak_bytes"]
        assert bounds.first(job).seconds <= bound.seconds <= p.iteration_s
        assert bound.device_bytes <= max(peak.values())


def test_a_job_that_fits_because_its_pipeline_runs_empty_between_is_found() -> None:
    """Its activations are those of one flush: more would be alive in one pass over all microbatches."""
    cluster = {"gpu": "h100-sxm", "nodes": 1, "gpus_per_node": 2, "memory_margin_GiB": 0}
    base = {"model": {"config": "tiny-llama", "seq_len": 4096}, "cluster": cluster, "parallel": {"pp": 2}}
    schedule = {"name": "gpipe", "microbatches": 16}
    runs = {n: predict(load_job({**base, "schedule": schedule | {"flushes": n}})).to_dict() for n in (1, 8)}
    once, often = (max(runs[n]["memory"]["device_peak_bytes"].values()) for n in (1, 8))
    free = ["tp", "cp", "pp", "zero", "layers", "microbatch_size", "recompute", "name", "stages_per_rank"]
    asked = {"flushes": [1, 8], "pin": free, "memory_limit_GiB": often / 2**30}
    found = search(load_job({**base, "schedule": schedule, "search": asked}))
    assert once > 1.2 * often and found.proven and found.best is not None
    assert found.best["changes"] == {"schedule.flushes": 8}
    assert found.best["iteration_s"] == runs[8]["iteration_s"]


AS_LARGE_AS_ALLOWED = {
    "balanced layers, of which an even split is larger": {
        "model": {"config": "piper-1b", "num_hidden_layers": 4, "seq_len": 256},
        "parallel": {"pp": 2, "zero": 0},
        "schedule": {"name": "gpipe", "microbatches": 8},
        "optimizer": {"offload": 0.5},
    },
    "dualpipe with a microbatch from one end alone": {
        "model": {"config": "llama3-8b", "num_hidden_layers": 8, "seq_len": 1024},
        "parallel": {"pp": 2},
        "schedule": {"name": "dualpipe", "microbatches": 1},
    },
}


@pytest.mark.parametrize("what", AS_LARGE_AS_ALLOWED)
def test_a_job_as_large_as_the_limit_allows_is_found(what: str) -> None:
    table = AS_LARGE_AS_ALLOWED[what]
    alone = predict(load_job(table)).to_dict()
    peak = max(alone["memory"]["device_peak_bytes"].values())
    free = ["tp", "cp", "pp", "zero", "layers", "microbatch_size", "recompute", "name", "stages_per_rank"]
    found = search(load_job({**table, "search": {"pin": free, "memory_limit_GiB": peak / 2**30}}))
    assert found.proven and found.best is not None and found.best["changes"] == {}
    assert found.best["iteration_s"] == alone["iteration_s"]
