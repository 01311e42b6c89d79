"""Overlap schedules with expert parallelism run on processes with ops of given times, against what the simulator says.

    python -m experiments.joint executed [--pp 4] [--layer 0.02] [--exchange 0.01] [--backend gloo|local]

pp x 2 ranks, experts over each pair of replicas, two layers a stage. --layer: seconds of a layer's F, I and W
each; --exchange: by which every all-to-all and transfer ends later. The exchange of counts is delayed, too, and a host
that computes itself waits for it. Measured: the quickest step but the first; predicted: the same plan and seconds.
"""

from collections.abc import Iterator

import numpy as np

from executor.launch.run import run
from ir.job.build import prepare
from ir.job.load import job_from
from ir.job.run_options import JobRunOptions
from ir.trace.durations import emulated_seconds
from ir.verify import check_plan
from piper_sim.engine import EngineScenario, play
from piper_sim.pricing.hosts import inline

ARMS = (
    ("1f1b", "alternate"),
    ("1f1b-overlap", "alternate"),
    ("1f1b-overlap", "template"),
    ("dualpipe", "template"),
    ("interleaved-1f1b", "alternate"),
    ("interleaved-1f1b-overlap", "template"),
)


def arm(name: str, merge: str, pp: int, layer_s: float, exchange_s: float, backend: str) -> tuple[float, float]:
    """(measured, predicted) seconds of a step."""
    layers = 2 * pp * (2 if name.startswith("interleaved") else 1)
    table = {
        "model": {"config": "tiny-moe", "num_hidden_layers": layers, "seq_len": 8},
        "cluster": {"gpu": "cpu", "gpus_per_node": 2 * pp},
        "parallel": {"pp": pp, "dp": 2, "ep": 2, "layers": "even"},
        "schedule": {"name": name, "merge": merge, "microbatches": 4 * pp},
        "precision": {"compute": "fp32"},
    }
    prepared = prepare(job_from(table))
    plan = prepared.plan()
    check_plan(plan, inline=True)
    seconds = emulated_seconds(plan, layer_s, exchange_s)
    ends = play(EngineScenario.of(plan, host=inline(plan)), seconds, 3).end.max(axis=1)
    options = JobRunOptions(2 * pp, 4, backend, 60.0, emulate=layer_s, emulate_comm=exchange_s)
    trace = run(prepared, plan, options)[1]
    found = [float(trace.end_s[trace.step == s].max()) for s in sorted(set(trace.step.tolist()))]
    return float(np.diff(found).min()), float(ends[-1] - ends[-2])


def rows(pp: int, layer_s: float, exchange_s: float, backend: str) -> Iterator[tuple[str, float, float]]:
    """(arm, measured, predicted): seconds of a step; then ratios to plain schedules of as many layers."""
    base: dict[bool, tuple[float, float]] = {}
    for name, merge in ARMS:
        found = arm(name, merge, pp, layer_s, exchange_s, backend)
        yield f"{name} {merge}, s", *found
        plain = base.setdefault(name.startswith("interleaved"), found)
        if plain is not found:
            over = "interleaved-1f1b" if name.startswith("interleaved") else "1f1b"
            yield f"{name} {merge} / {over}", found[0] / plain[0], found[1] / plain[1]
