"""Compile every kernel once, so that nobody waits for it later: `python -m piper_sim.app.warm`, after an
installation."""

import sys
import time
from dataclasses import replace

import numpy as np

from ir.plan.plan import OpKind
from piper_sim import compiled
from piper_sim.engine import EngineScenario, KernelInterference, Links
from piper_sim.pricing.hosts import inline
from piper_sim.study.pipeline import run_schedule


def main() -> None:
    """Run the twin's kernels, the allocator's and the search's on a small plan."""
    from cost_models.allocator import MemoryRequests, replay
    from piper_sim.study.search.walk import least_makespan, schedule_cells

    before = time.perf_counter()
    plan = run_schedule("1f1b", 2, 2).plan
    bare = EngineScenario.of(plan)
    ones, row = np.ones(len(plan)), np.where(plan.kind == OpKind.COMPUTE, -1, 0)
    slow = KernelInterference(np.zeros(len(plan), dtype=np.int64), *(0.5 * np.ones((3, 1, 1))))
    links = Links(row, np.array([0, 1]), np.array([0]), np.ones(1), 1)
    for scenario in (bare, replace(bare, host=inline(plan), slow=slow, links=links)):
        compiled.play(scenario, ones)
    for expandable in (False, True):
        replay(MemoryRequests((512,), np.array([0, ~0]), np.array([512])), expandable=expandable)
    least_makespan(schedule_cells("1f1b", 2, 2, 1), np.zeros((2, 4, 2, 2)), np.zeros((2, 4)), np.zeros(2), 0.0)
    print(f"compiled in {time.perf_counter() - before:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
