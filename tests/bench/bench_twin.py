"""How fast the twin is beside a bare heapq loop over the same ops: `python -m tests.bench.bench_twin`.

Runs alternate; CPU time, the least of three. The heapq loop knows FIFO streams, waits and messages that cost nothing
to receive; like every engine here it is not charged for building the plan, but the twin's structure is shown.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from heapq import heappop, heappush

import numpy as np

from ir.order import FloatArray
from ir.plan import OpKind, Plan
from piper_sim.engine.contention import Interference
from piper_sim.twin import Compiled, event_loop, longest_path, step_ends
from tests.ir.plans import moe_plan, stage_plan

CLASSES = 6
COMPILE = """
import time
import numpy as np
from tests.bench.bench_twin import table
from tests.ir.plans import stage_plan
from piper_sim.twin import event_loop, longest_path
plan = stage_plan("1f1b", 2, 2)
for run in (lambda d: longest_path(plan, d), lambda d: event_loop(plan, d, table(plan, 0))):
    before = time.process_time()
    run(np.ones(len(plan)))
    print(f"{time.process_time() - before:.2f} s", end=" ")
"""


def yardstick(plan: Plan, duration: FloatArray) -> tuple[list[float], list[int], list[list[int]]]:
    """Seconds, stream and waiters of every op: a receive takes no time and waits for its send."""
    waiters: list[list[int]] = [[] for _ in range(len(plan))]
    for i, w in zip(plan.waits.rows().tolist(), plan.waits.items.tolist(), strict=True):
        waiters[w].append(i)
    recv = plan.kind == OpKind.RECV
    for i in np.flatnonzero(recv).tolist():
        waiters[int(plan.partner[i])].append(i)
    return np.where(recv, 0.0, duration).tolist(), plan.stream.tolist(), waiters


def heapq_loop(seconds: list[float], stream: list[int], waiters: list[list[int]]) -> float:
    """The least that an event loop does: an op starts when it heads its stream and nothing it waits for is left."""
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


def table(plan: Plan, seed: int) -> Interference:
    """Six classes of each kind, all of which slow each other."""
    rng = np.random.default_rng(seed)
    kind = rng.integers(0, CLASSES, len(plan))
    kind = np.where(plan.kind == OpKind.RECV, kind[plan.partner], kind)
    kind = np.where(plan.collective >= 0, plan.collective % CLASSES, kind)
    return Interference(kind, *rng.random((3, CLASSES, CLASSES)) * 0.2)


def alternate(runs: dict[str, Callable[[], object]], times: int = 3) -> dict[str, float]:
    """Least CPU seconds of each."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(times):
        for name, run in runs.items():
            before = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - before)
    return best


def measure(name: str, plan: Plan) -> None:
    """Print a plan's rows."""
    n, rng = len(plan), np.random.default_rng(1)
    duration = np.rint(rng.random(n) * 2.0**30) / 2.0**40
    many, ones = np.tile(duration, (16, 1)), np.ones(n)
    rates, bare, compiled = table(plan, 1), yardstick(plan, duration), Compiled.of(plan)
    event_loop(plan, ones, rates)
    best = alternate(
        {
            "heapq loop": lambda: heapq_loop(*bare),
            "structure, once": lambda: Compiled(plan),
            "longest path": lambda: longest_path(compiled, duration),
            "longest path, 16 vectors": lambda: step_ends(compiled, many),
            "event loop, interference": lambda: event_loop(plan, duration, rates),
        }
    )
    best["longest path, 16 vectors"] /= 16
    print(f"{name}: {n:,} ops")
    for what, seconds in best.items():
        print(f"  {what:26}{1e9 * seconds / n:8.1f} ns/op {best['heapq loop'] / seconds:8.1f} x as fast as heapq")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as fresh:
        print("compiling with an empty cache, longest path and event loop: ", end="", flush=True)
        subprocess.run([sys.executable, "-c", COMPILE], check=True, env={**os.environ, "NUMBA_CACHE_DIR": fresh})
    print()
    measure("1f1b 64 x 1024", stage_plan("1f1b", 64, 1024))
    measure("dualpipe 16 x 256, mixture-of-experts layers", moe_plan("dualpipe", 16, 256, layers=62))
