"""What each part of a prediction costs per op, beside a bare heapq loop over the same ops: `make bench`.

The heapq loop is the least that a discrete-event engine can do: FIFO streams, waits, messages that cost nothing to
receive; no memory, no trace, no checks, and its input is not timed. All take turns on the same machine; CPU seconds,
the least of some rounds. Two plans: 1F1B on bare stages, 64 x 1,024, and the demo's DeepSeek-V3 layer by layer under
DualPipe, 16 x 256. Durations are the plan's own; tables, links and host are invented, with everything slowed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np

from cost_models import OptimizerPrecision
from ir.core.order import FloatArray
from ir.directives import apply
from ir.graph.build import stage_graph
from ir.job.load import job_from
from ir.lower import PassMerge, PlanPolicy, lower
from ir.plan.plan import OpKind, OpLists, Plan
from ir.schedules.registry import build
from ir.schedules.schedule import ordering, placing
from ir.verify import check_plan
from piper_sim import compiled, engine
from piper_sim.app.commands.demo import JOB
from piper_sim.engine import EngineRun, EngineScenario, HostModel, KernelInterference, Links, MessageMode
from piper_sim.engine.traces import trace_of
from piper_sim.memory.timeline import memory, samples, state
from piper_sim.pricing.costs import CostModel, OpCosts
from piper_sim.pricing.prepare import hardware_of, prepare_priced
from piper_sim.pricing.structure import CostShare
from piper_sim.study.breakdown import breakdown

CLASSES = 6
WINDOW = 1024
LAUNCH_S = round(5e-6 * 2**40) / 2**40
COMPILE = """
import time
from experiments.engine_speed import shared, stage_case
from piper_sim import compiled
case = stage_case(2, 2)
for name, scenario in shared(case.plan).items():
    before = time.process_time()
    compiled.play(scenario, case.costs.duration)
    print(f"{name} {time.process_time() - before:.1f} s", end="; ")
"""


def loop_of(plan: Plan, duration: FloatArray) -> tuple[list[float], list[int], list[list[int]]]:
    """The yardstick's input: seconds, stream and waiters of every op. A receive waits for its send."""
    waiters: list[list[int]] = [[] for _ in range(len(plan))]
    for i, w in zip(plan.waits.rows().tolist(), plan.waits.items.tolist(), strict=True):
        waiters[w].append(i)
    recv = plan.kind == OpKind.RECV
    for i in np.flatnonzero(recv).tolist():
        waiters[int(plan.partner[i])].append(i)
    return np.where(recv, 0.0, duration).tolist(), plan.stream.tolist(), waiters


def heapq_loop(seconds: list[float], stream: list[int], waiters: list[list[int]]) -> float:
    """The makespan, by events: an op starts when it heads its stream and nothing is left to wait for."""
    count = len(seconds)
    left, behind, last = [0] * count, [-1] * count, [-1] * (max(stream) + 1)
    for targets in waiters:
        for i in targets:
            left[i] += 1
    for i, s in enumerate(stream):
        if last[s] >= 0:
            behind[last[s]] = i
            left[i] += 1
        last[s] = i
    heap = [(seconds[i], i) for i in range(count) if not left[i]]
    heap.sort()
    done, now = 0, 0.0
    while heap:
        now, i = heappop(heap)
        done += 1
        if (j := behind[i]) >= 0:
            left[j] -= 1
            if not left[j]:
                heappush(heap, (now + seconds[j], j))
        for j in waiters[i]:
            left[j] -= 1
            if not left[j]:
                heappush(heap, (now + seconds[j], j))
    assert done == count
    return now


@dataclass(frozen=True, eq=False)
class Case:
    """A plan, how it is made, and what its ops cost."""

    title: str
    make: Callable[[], Plan]
    plan: Plan
    costs: OpCosts
    recipe: OptimizerPrecision


def stages(ranks: int, mbs: int) -> Plan:
    """The plan of `piper-sim schedule 1f1b`."""
    schedule = build("1f1b", ranks, mbs)
    graph = apply(stage_graph(schedule.stages), [*placing(schedule), ordering(schedule)])
    return lower(graph, PlanPolicy(PassMerge.FUSED, whole_backward=True, clip=False))


def stage_case(ranks: int, mbs: int) -> Case:
    """1F1B on bare stages: F takes 1, B 2, a transfer 0.25 s."""
    plan = stages(ranks, mbs)
    backward = np.array([s.text.endswith("B*") for s in plan.shapes])[plan.shape]
    seconds = np.where(plan.kind == OpKind.COMPUTE, np.where(backward, 2.0, 1.0), 0.25)
    shares = np.zeros((len(plan), len(CostShare)))
    shares[:, CostShare.COMPUTE] = seconds
    costs = OpCosts(seconds, shares)
    return Case(f"1F1B on bare stages, {ranks} x {mbs}", lambda: stages(ranks, mbs), plan, costs, OptimizerPrecision())


def layer_case(mbs: int) -> Case:
    """DeepSeek-V3 under DualPipe, all-to-alls and layers as ops."""
    job = job_from(tomllib.loads(JOB), file="demo")
    job = replace(job, schedule=replace(job.schedule, microbatches=mbs))
    hardware = hardware_of(job)
    made = prepare_priced(job, hardware)
    model, plan = CostModel(made, hardware), made.lowered()
    title = f"DeepSeek-V3's layers under DualPipe, {job.parallel.pp} x {mbs}"
    return Case(title, made.lowered, plan, model.price(plan), model.recipe)


def table(plan: Plan) -> KernelInterference:
    """Six classes of each kind, all of which slow each other."""
    rng = np.random.default_rng(1)
    kind = rng.integers(0, CLASSES, len(plan))
    kind = np.where(plan.kind == OpKind.RECV, kind[plan.partner], kind)
    kind = np.where(plan.collective >= 0, plan.collective % CLASSES, kind)
    return KernelInterference(kind, *rng.random((3, CLASSES, CLASSES)) * 0.2)


def nics(plan: Plan) -> Links:
    """All that a program communicates takes 0.8 of its own link and 0.6 of one that it shares with a neighbour."""
    own = np.arange(plan.programs)
    both = np.stack([own, plan.programs + own // 2], axis=1).reshape(-1)
    row = np.where(plan.kind == OpKind.COMPUTE, -1, plan.program)
    return Links(row, np.arange(plan.programs + 1) * 2, both, np.tile([0.8, 0.6], plan.programs), 2 * plan.programs)


def ahead(plan: Plan) -> HostModel:
    """5 us a launch, no further ahead than a window of ops."""
    n, row, on = len(plan), [], []
    for a, b in pairwise(plan.bounds.tolist()):
        window = min(WINDOW, b - a)
        j = np.arange(a, b) - window
        row.append(np.arange(a, b))
        on.append(np.where(j >= a, j, j + b - a + n))
    return HostModel(np.full(n, LAUNCH_S), OpLists.of(n, np.concatenate(row), np.concatenate(on)))


def shared(plan: Plan) -> dict[str, EngineScenario]:
    """What the twin is timed with."""
    bare, slow, links, host = EngineScenario.of(plan), table(plan), nics(plan), ahead(plan)
    return {
        "longest path": bare,
        "longest path, host": replace(bare, host=host),
        "interference": replace(bare, slow=slow),
        "interference, host": replace(bare, slow=slow, host=host),
        "interference, links": replace(bare, slow=slow, links=links),
        "interference, links, host": replace(bare, slow=slow, links=links, host=host),
    }


def least(parts: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Least CPU seconds of each; parts take turns."""
    best = dict.fromkeys(parts, float("inf"))
    for _ in range(rounds):
        for name, part in parts.items():
            begin = time.process_time()
            part()
            best[name] = min(best[name], time.process_time() - begin)
    return best


def parts_of(case: Case) -> dict[str, Callable[[], object]]:
    """What is timed, in the order of the table."""
    duration, loop, cases = case.costs.duration, loop_of(case.plan, case.costs.duration), shared(case.plan)
    bare = cases["longest path"]
    two: EngineRun = compiled.play(bare, duration, 2)
    fresh: list[Plan] = []  # the plan made in this round: what is computed on first use is paid for there
    persistent = state(case.plan, case.recipe)

    def simulate() -> object:
        plan = replace(case.plan)  # it knows no texts yet
        ran, found = engine.play(EngineScenario.of(plan), duration), memory(plan, persistent)
        return trace_of(plan, ran, {}, memory=samples(plan, found, ran.start[-1], ran.end[-1]))

    timed: dict[str, Callable[[], object]] = {
        "heapq loop": lambda: heapq_loop(*loop),
        "order and lower": lambda: fresh.insert(0, case.make()),
        "check_plan": lambda: check_plan(fresh[0]),
        "SimPy, buffered": lambda: engine.run(fresh[0], duration, MessageMode.BUFFERED),
        "SimPy": lambda: engine.play(bare, duration),
        "SimPy, memory, trace": simulate,
        "SimPy, interference": lambda: engine.play(cases["interference"], duration),
        "twin: structure, once": lambda: compiled.CompiledEngine(bare),
    }
    for name, scenario in cases.items():
        compiled.play(scenario, duration)  # compile
        timed[f"twin: {name}"] = partial(compiled.play, scenario, duration)
    timed["memory"] = lambda: memory(case.plan, persistent)
    timed["breakdown"] = lambda: breakdown(bare, two, case.costs)
    return timed


def measure(case: Case, rounds: int) -> dict[str, float]:
    """Print a table; returns ratios to the heapq loop."""
    best = least(parts_of(case), rounds)
    best["build, check, simulate"] = sum(best[n] for n in ("order and lower", "check_plan", "SimPy, buffered"))
    print(f"\n{case.title}: {len(case.plan):,} ops")
    for name, seconds in best.items():
        ratio = seconds / best["heapq loop"]
        faster = f"{1 / ratio:9.1f} x as fast" if ratio < 1 else ""
        print(f"  {name:32}{seconds:9.3f} s{1e6 * seconds / len(case.plan):9.3f} us/op{ratio:9.3f} x {faster}")
    return {name: seconds / best["heapq loop"] for name, seconds in best.items()}


def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--mbs", type=int, default=1024)
    parser.add_argument("--layer-mbs", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as empty:
        print("compiling the twin, nothing kept: ", end="", flush=True)
        subprocess.run([sys.executable, "-c", COMPILE], check=True, env={**os.environ, "NUMBA_CACHE_DIR": empty})
    measure(stage_case(args.ranks, args.mbs), args.rounds)
    measure(layer_case(args.layer_mbs), args.rounds)


if __name__ == "__main__":
    main()
