"""Does the simulator predict emulated runs? Schedules on real gloo, ops of a given time: predicted against measured.

python -m experiments.emulated --ranks 2,4 --seconds 0.01,0.02 [--schedules 1f1b,zbv] [--steps 6]

Transfers and collectives are measured once per number of ranks, in a run of another schedule (looped-bfs) and another
number of microbatches; no judged plan is run to predict it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from executor import cli
from ir.durations import emulated_seconds
from ir.job import load_job
from ir.job.build import prepare
from ir.order import FloatArray
from ir.plan import OpKind, Plan
from ir.rules import check_plan
from ir.trace import Trace
from piper_sim.engine import Scenario, play
from piper_sim.hosts import inline

SCHEDULES = ("1f1b", "gpipe", "zb1p", "interleaved-1f1b", "zbv", "dualpipe")
STAGES_PER_RANK = {"interleaved-1f1b": 2, "looped-bfs": 2, "zbv": 2}
JOB = """
[model]
config = "tiny-llama"
num_hidden_layers = {layers}
seq_len = 8
[cluster]
gpu = "h100-sxm"
[parallel]
pp = {ranks}
layers = "even"
[schedule]
name = "{schedule}"
microbatches = {mbs}
"""


@dataclass(frozen=True)
class Links:
    """Seconds of a transfer and of each kind of collective once all ends are there; of the host, to dispatch an op.

    Trimmed means: what is summed on a critical path is the mean, and a loaded machine's outliers are not of this run.
    """

    transfer: float = 0.0
    collective: tuple[tuple[str, float], ...] = ()
    host: tuple[tuple[int, float], ...] = ()  # op kind → seconds


def measured(schedule: str, ranks: int, mbs: int, seconds: float, steps: int) -> tuple[Plan, Trace, float]:
    """Run a job with two layers per rank; returns its plan, its trace, and the median step after the first."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.toml"
        file.write_text(JOB.format(layers=2 * ranks, ranks=ranks, schedule=schedule, mbs=mbs))
        prepared = prepare(load_job(str(file)))
        plan = prepared.plan()
        check_plan(plan)
        _, trace = cli.run(prepared, plan, (), ranks=ranks, steps=steps, emulate=seconds)
    ends = [float(trace.end_s[trace.step == s].max()) for s in range(steps)]
    return plan, trace, median(np.diff(ends).tolist())


def links(plan: Plan, trace: Trace) -> Links:
    """What communication took in a run."""
    last = int(trace.step.max())
    at = {}
    rows = zip(trace.step.tolist(), trace.rank.tolist(), trace.op, trace.start_s, trace.end_s, strict=True)
    for step, rank, op, start, end in rows:
        if step == last or step == last - 1:
            at[step, rank, op] = float(start), float(end)
    texts, rank_of = plan.texts, plan.program.tolist()
    took: list[float] = []
    joint: dict[tuple[int, int], list[int]] = defaultdict(list)
    for step in {last, last - 1}:
        for i in np.flatnonzero(plan.kind == OpKind.RECV).tolist():
            j = int(plan.partner[i])
            (a, end), (b, _) = at[step, rank_of[i], texts[i]], at[step, rank_of[j], texts[j]]
            took.append(end - max(a, b))
        for i in np.flatnonzero(plan.collective >= 0).tolist():
            joint[step, int(plan.collective[i])].append(i)
    kinds: dict[str, list[float]] = defaultdict(list)
    for (step, _), members in joint.items():
        spans = [at[step, rank_of[i], texts[i]] for i in members]
        kinds[_kind(plan, members[0])].append(max(e for _, e in spans) - max(s for s, _ in spans))
    return Links(_mean(took), tuple((k, _mean(v)) for k, v in kinds.items()), _hosts(plan, trace, last))


def _hosts(plan: Plan, trace: Trace, step: int) -> tuple[tuple[int, float], ...]:
    """From an op's dispatch (of compute: from its end) to the next op's dispatch."""
    rows = zip(trace.step.tolist(), trace.rank.tolist(), trace.op, trace.post_s, trace.end_s, strict=True)
    at = {(rank, op): (float(post), float(end)) for s, rank, op, post, end in rows if s == step}
    took: dict[int, list[float]] = defaultdict(list)
    for a, b in zip(plan.bounds.tolist(), plan.bounds.tolist()[1:], strict=False):
        for i in range(a, b - 1):
            key, kind = (int(plan.program[i]), plan.texts[i]), int(plan.kind[i])
            after = at[key[0], plan.texts[i + 1]][0]
            took[kind].append(after - at[key][1 if kind == OpKind.COMPUTE else 0])
    return tuple((kind, _mean(v)) for kind, v in took.items())


def _mean(values: list[float]) -> float:
    cut = len(values) // 10
    return float(np.mean(sorted(values)[cut : len(values) - cut]))


def _kind(plan: Plan, i: int) -> str:
    return str(plan.graph.nodes[plan.shapes[int(plan.shape[i])].covers[0][0]].kind)


def predicted(plan: Plan, seconds: float, found: Links, steps: int = 4) -> float:
    """The simulator's step, host inline."""
    duration: FloatArray = emulated_seconds(plan, seconds, found.transfer)
    price = dict(found.collective)
    for i in np.flatnonzero(plan.collective >= 0).tolist():
        duration[i] = price.get(_kind(plan, i), found.transfer if found.collective else 0.0)
    launch = np.zeros(len(plan))
    for kind, took_s in found.host:
        launch[plan.kind == kind] = took_s
    host = replace(inline(plan), launch=np.round(launch * 2.0**40) / 2.0**40)
    ran = play(Scenario.of(plan, host=host), np.round(duration * 2.0**40) / 2.0**40, steps)
    ends = ran.end.max(axis=1)
    return float(ends[-1] - ends[-2])


def main() -> None:
    """Print a table as it comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--seconds", default="0.01,0.02")
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    print("ranks F_ms schedule           measured_ms  bare_ms   error    with_links_ms error", flush=True)
    for ranks in map(int, args.ranks.split(",")):
        for seconds in map(float, args.seconds.split(",")):
            plan, trace, _ = measured("looped-bfs", ranks, 2 * ranks + 1, seconds, 3)
            found = links(plan, trace)
            print(f"  transfer {found.transfer * 1e3:.2f} ms, {[(k, round(v * 1e3, 1)) for k, v in found.collective]}")
            for schedule in args.schedules.split(","):
                plan, _, real = measured(schedule, ranks, 2 * ranks, seconds, args.steps)
                bare, full = predicted(plan, seconds, Links()), predicted(plan, seconds, found)
                print(
                    f"{ranks:5} {seconds * 1e3:4.0f} {schedule:18} {real * 1e3:11.1f} {bare * 1e3:8.1f} "
                    f"{bare / real - 1:+7.2%} {full * 1e3:13.1f} {full / real - 1:+7.2%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
