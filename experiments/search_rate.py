"""How many configurations a search simulates in a processor second: each with a plan of its own, or costs alone new.

    python -m experiments.search_rate [--draws 24] [--seed 0]

Configurations are drawn from the default space of two jobs, of those that a bound does not exclude for their memory.
All is counted that `search` asks of one: plan, memory, price, events, allocators. Costs alone: NVLink a little slower
each time, of configurations that fit. Medians, by how large the plans are.
"""

import argparse
import math
import random
import time
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice

from msgspec import structs
from numpy import nanmedian

from cost_models import DeviceHardware
from ir.core.errors import PiperError
from ir.job import Job
from ir.job.cache import PLANS
from piper_sim import load_job
from piper_sim.pricing.prepare import hardware_of
from piper_sim.study.predict import planned
from piper_sim.study.search.bound import JobBounds
from piper_sim.study.search.evaluate import evaluate
from piper_sim.study.search.space import JobSpace

JOBS = {
    "llama3-70b, 128 H100": {
        "model": {"config": "llama3-70b", "seq_len": 8192},
        "cluster": {"gpu": "h100-sxm", "nodes": 16},
        "parallel": {"tp": 8, "pp": 4},
        "schedule": {"global_batch": 256},
    },
    "deepseek-v3, 512 H800": {
        "model": {"config": "deepseek-v3", "seq_len": 4096},
        "precision": {"compute": "fp8"},
        "cluster": {"gpu": "h800-sxm", "nodes": 64},
        "parallel": {"pp": 16, "ep": 32},
        "schedule": {"global_batch": 3840},
    },
}
COSTS, SIZES = 10, (4_000, 20_000)


def drawn(job: Job, hardware: DeviceHardware, seed: int) -> Iterator[Job]:
    """Configurations that may fit, in a random order."""
    space, bounds = JobSpace.of(job, hardware), JobBounds(hardware)
    changes = list(space)
    random.Random(seed).shuffle(changes)
    for one in changes:
        try:
            made = space.job_of(one)
            if bounds.of(made).excess is None:
                yield made
        except PiperError:
            continue  # illegal


def seconds(job: Job, hardware: Sequence[DeviceHardware], keep: bool) -> float:
    """Processor seconds of one evaluation, in the mean of the second round."""
    for _ in range(2):
        begun = time.process_time()
        for one in hardware:
            if not keep:
                PLANS.clear()
            evaluate(job, one, None)
    return (time.process_time() - begun) / len(hardware)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name, table in JOBS.items():
        job = load_job(table)
        usual = hardware_of(job)
        slower = [structs.replace(usual, nvlink_GBps=usual.nvlink_GBps * (1 - k / 1000)) for k in range(1, 1 + COSTS)]
        found: dict[int, list[tuple[int, float, float]]] = defaultdict(list)
        for one in islice(drawn(job, usual, args.seed), args.draws):
            ops, fresh = len(planned(one, usual).plan), seconds(one, [usual], keep=False)
            timed = evaluate(one, usual, None).iteration_s is not None
            found[bisect(SIZES, ops)].append((ops, fresh, seconds(one, slower, keep=True) if timed else math.nan))
        for rows in (found[k] for k in sorted(found)):
            ops, fresh, again = (nanmedian(column) for column in zip(*rows, strict=True))
            rates = f"a plan of its own {1e3 * fresh:.0f} ms, {1 / fresh:.1f} a second"
            rates += f"; costs alone new {1e3 * again:.1f} ms, {1 / again:.0f} a second"
            print(f"{name}, {len(rows)} plans of {ops:,.0f} ops in the median: {rates}", flush=True)


if __name__ == "__main__":
    main()
