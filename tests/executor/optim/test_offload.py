"""An update of which the host makes a share: the same numbers, and the device keeps what is predicted."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from executor.checkpoint.manifest import read_manifest
from executor.device.device import HostDevice
from executor.measure.peak_bytes import peak_bytes
from executor.optim.offload import OffloadedOptimizer
from ir.job.run_options import CheckpointOptions
from ir.job.schema import JobOptimizer
from ir.plan.places import RankPlacement
from piper_sim import load_job
from piper_sim.study.predict import predict
from tests.executor.runs import Ran, distance, job_file, judged, merged, run

PLANS = {
    "alone": (),
    "copies": ("parallel.pp=1", "parallel.dp=2", "parallel.zero=0", "schedule.microbatches=2"),
    "zero1 pp2": ("parallel.dp=2", "parallel.zero=1", "schedule.microbatches=2"),
    "zero2": ("parallel.pp=1", "parallel.dp=4", "parallel.zero=2", "schedule.microbatches=1"),
    "zero3 dualpipe": ("parallel.dp=2", "parallel.zero=3", "schedule.name=dualpipe", "schedule.microbatches=2"),
    "tp2 zbv": ("parallel.tp=2", "schedule.name=zbv"),
    "ep2": ("model.config=tiny-moe", "parallel.dp=2", "parallel.ep=2", "parallel.zero=1", "schedule.microbatches=2"),
}
NARROW = (
    ("precision.compute=bf16",),
    ("precision.compute=fp32", "precision.optimizer=fp64"),
    ("precision.compute=bf16", "precision.grads=bf16", "precision.reduce=bf16"),
    ("precision.compute=fp32", "optimizer.name=sgd", "optimizer.lr=0.1"),
)
RULES = (
    ("optimizer.clip_norm=0.1",),
    ('optimizer.no_decay=["*norm*"]', "optimizer.weight_decay=0.1", "optimizer.clip_norm=0.5"),
    ("optimizer.warmup_steps=2", "optimizer.schedule=linear", "optimizer.decay_steps=4"),
    ("optimizer.name=sgd", "optimizer.lr=0.1", "optimizer.weight_decay=0.1"),
)
SHARES = (0.9, 0.5, 0.37, 1e-4)
ROUNDING = 1e-13


def off(a: Ran, b: Ran) -> float:
    """How far two runs are apart: losses, norms, gradients and parameters; NaN where something is missing."""
    told = [np.array([*r.object["losses"], *r.object["grad_norms"]]) for r in (a, b)]
    pairs = (merged(a.grads), merged(b.grads)), (merged(a.params), merged(b.params))
    return float(np.max([np.abs(told[0] / told[1] - 1).max(), *(distance(x, y) for x, y in pairs)]))


@pytest.mark.parametrize("plan", PLANS)
def test_whoever_updates_the_numbers_are_the_same(plan: str) -> None:
    """To the bit, wherever a share ends."""
    draw = random.Random(plan)
    for sets in (draw.choice(NARROW), draw.choice(RULES)):
        usual = run(*PLANS[plan], *sets, steps=3, backend="local")
        for share in (1.0, draw.choice(SHARES)):
            assert off(usual, run(*PLANS[plan], *sets, f"optimizer.offload={share}", steps=3, backend="local")) == 0


def test_another_update_of_the_host_s_is_seen() -> None:
    usual, other = (run(*PLANS["zero1 pp2"], *x, backend="local") for x in ((), ("optimizer.offload=1", RULES[1][1])))
    assert off(usual, other) > 1e-6


@pytest.mark.parametrize("forgotten", [False, True])
def test_the_numbers_are_those_of_torch(forgotten: bool) -> None:
    """Of torch's own AdamW, with weights wider on the host; the control is a host whose weights do not come back."""
    draw = torch.Generator().manual_seed(0)
    sizes = {"a": (3, 7), "b": (40,), "c": (5,)}
    start = {n: torch.randn(s, generator=draw, dtype=torch.float64) for n, s in sizes.items()}
    want = {n: torch.nn.Parameter(p.clone()) for n, p in start.items()}
    theirs = torch.optim.AdamW(want.values(), lr=0.01, weight_decay=0.1)
    config = JobOptimizer(lr=0.01, weight_decay=0.1)
    ours = OffloadedOptimizer(config, start, torch.float64, host={"a": 10, "b": 40, "c": 0}, device=HostDevice())
    if forgotten:
        ours.shares = {n: t.clone() for n, t in ours.shares.items()}
    for _ in range(4):
        grads = {n: torch.randn(s, generator=draw, dtype=torch.float64) for n, s in sizes.items()}
        for n, p in want.items():
            p.grad = grads[n].clone()
        theirs.step()
        ours.step(grads)
    far = {n: float((start[n] - p.detach()).abs().max()) for n, p in want.items()}
    assert far["c"] == 0 and (max(far.values()) <= 1e-15) is not forgotten
    assert [t.numel() for t in ours.tensors()] == [11, 11, 5, 5]


@pytest.mark.parametrize("plan", ["alone", "copies", "zero1 pp2", "zero2"])
def test_the_device_keeps_what_is_predicted(plan: str, tmp_path: Path) -> None:
    found = []
    for share in (0, 0.37, 1):
        sets = *PLANS[plan], "precision.compute=bf16", "cluster.host_GBps=40", f"optimizer.offload={share}"
        memory = run(*sets, steps=1, memory=True).object["memory"]
        held, peaks = memory["persistent_bytes"], memory["peak_allocated_bytes"]
        assert tuple(peaks.values()) == peak_bytes(*judged(tmp_path, *sets))
        p = predict(load_job(str(job_file(tmp_path)), sets))
        places, said = RankPlacement.of(p.plan), p.to_dict()["memory"]["breakdown_bytes"]
        told = [said[str(places.program(r))]["optimizer"] for r in range(places.ranks)]
        assert [x["optimizer"] for x in held.values()] == told, share
        found.append(told[0])
    assert found[1] == pytest.approx(0.63 * found[0], abs=12 * 64) and found[2] == 0


def test_checkpoints_do_not_tell_who_updates(tmp_path: Path) -> None:
    def saved(name: str, share: float, steps: int, resume: Path | None = None) -> Path:
        saving = CheckpointOptions(save=str(tmp_path / name), every=1, keep=9, resume=resume and str(resume))
        sets = *PLANS["zero2"], "precision.compute=bf16", f"optimizer.offload={share}"
        return Path(run(*sets, steps=steps, saving=saving, backend="local").object["saved"])

    whole, begun = saved("whole", 0, 3), saved("begun", 0.37, 2)
    assert read_manifest(begun).files == read_manifest(whole.parent / begun.name).files
    for share in (0.0, 0.37, 1.0):
        assert read_manifest(saved(f"under {share}", share, 3, resume=begun)).files == read_manifest(whole).files


def test_host_and_device_do_not_race() -> None:
    sets = (*PLANS["zero1 pp2"], "optimizer.clip_norm=0.1")
    usual, watched = (run(*sets, f"optimizer.offload={x}", steps=2, racecheck=True, backend="local") for x in (0, 0.5))
    assert watched.object["races"] == []
    assert watched.object["host_syncs"] == usual.object["host_syncs"] | {"0UPDATE/p0": 4, "1UPDATE/p1": 4}  # gradients
    assert off(usual, watched) <= ROUNDING
