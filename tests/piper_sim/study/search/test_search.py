"""Search against enumeration: the same winner, the same front, bounds that hold, reasons that are true."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from ir.core.errors import PiperError
from ir.job import Job, load_job
from piper_sim.pricing.prepare import hardware_of
from piper_sim.study.predict import predict
from piper_sim.study.search import JobSearchResult, search
from piper_sim.study.search.bound import JobBound, JobBounds
from piper_sim.study.search.search import front
from piper_sim.study.search.space import JobSpace

Point = tuple[float, float, int]


def drawn(seed: int) -> Job:
    """A tiny job and lists of values, the model, cluster, memory and lists drawn."""
    r = random.Random(seed)
    moe = seed % 2
    lists: dict[str, Any] = {
        "tp": [1, 2],
        "pp": r.sample([1, 2, 4], 2),
        "ep": [1, 2, 4] if moe else [1],
        "zero": r.sample([0, 1, 2, 3], 2),
        "name": r.sample(["1f1b", "interleaved-1f1b", "zb1p", "zbv", "dualpipe", "dualpipev", "v-half"], 3),
        "microbatch_size": r.choice([[1], [1, 2]]),
        "recompute": r.choice([["none"], ["none", "full"], ["none", ["norm", "activation"]]]),
    }
    model = {"config": "tiny-moe" if moe else "tiny-llama", "seq_len": r.choice([256, 1024])}
    cluster = {"gpu": "h100-sxm", "nodes": 1, "gpus_per_node": 4, "memory_margin_GiB": 0}
    cluster["hbm_GiB"] = r.choice([1.3, 2.1, 80.0])
    more = {"optimizer": {"clip_norm": r.choice([0.0, 1.0])}, "costs": {"interference": r.choice(["none", "pairwise"])}}
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


@pytest.mark.parametrize("seed", range(4))
def test_what_is_found_is_what_enumeration_finds(seed: int) -> None:
    job = drawn(seed)
    points: list[Point] = []
    for number, _, bound, p in enumerated(job):
        peak = max(p.to_dict()["memory"]["device_peak_bytes"].values())
        assert bound.seconds <= p.iteration_s and bound.device_bytes <= peak
        assert bound.excess is None or not p.fits
        if p.fits:
            points.append((p.iteration_s, peak, number))
    found = search(job, budget_s=600.0)
    assert 20 < found.space <= 300 and found.proven and found.pareto_proven
    assert told(found) == [(t, m) for t, m, _ in front(points)]
    assert found.evaluated + len(found.all_rejected) >= found.space


def told(found: JobSearchResult) -> list[tuple[float, float]]:
    return [(p["iteration_s"], max(p["memory"]["device_peak_bytes"].values())) for p in found.pareto]
