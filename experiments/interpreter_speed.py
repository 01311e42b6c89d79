"""What the interpreter costs per op where kernels are empty and every peer is there.

    python -m experiments.interpreter_speed

Processor time of rank 0 in this process: the least and the median step of 25. A compute op covers as many nodes as its
stage has parts; a communication op is queued, posted and waited for. Times are of this machine, and it must be quiet.
"""

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from executor.device.device import HostDevice
from executor.device.progress import RankProgress, create
from executor.measure.peak_bytes import TransportWithoutPeers
from executor.runtime.batch import blank_batches
from executor.runtime.interpreter import PlanInterpreter
from executor.runtime.program import RankPlan
from executor.runtime.rank import blank, crossing
from executor.runtime.spec import PlanRun
from ir.job import load_job
from ir.job.build import prepare
from ir.job.run_options import JobRunOptions

MODEL = {"config": "tiny-llama", "num_hidden_layers": 4, "seq_len": 16}
CASES: Mapping[str, dict[str, Any]] = {
    "one rank, 1f1b": {"parallel": {"pp": 1}, "schedule": {"name": "1f1b", "microbatches": 64}},
    "two ranks, 1f1b": {"parallel": {"pp": 2}, "schedule": {"name": "1f1b", "microbatches": 64}},
    "two ranks, dualpipe": {"parallel": {"pp": 2}, "schedule": {"name": "dualpipe", "microbatches": 64}},
}


@contextmanager
def alone(case: dict[str, Any]) -> Iterator[PlanInterpreter]:
    """Rank 0 of a job, by itself in this process."""
    prepared = prepare(load_job({"model": MODEL, **case}))
    plan, device = prepared.plan(), HostDevice()
    program = RankPlan.of(plan, 0)
    spec = PlanRun(JobRunOptions(1, emulate=0.0))
    with tempfile.TemporaryDirectory() as name:
        create(Path(name) / "progress", 1)
        pen = RankProgress(Path(name) / "progress", 0)
        kernels, empty = blank(prepared, plan, program, spec), crossing(prepared, device)
        run = PlanInterpreter(program, kernels, TransportWithoutPeers(0), pen, device, empty)
        yield run
        run.close()
        pen.close()


def steps_of(case: dict[str, Any], rounds: int = 25) -> tuple[int, list[float]]:
    """Ops of rank 0, and processor seconds of each step."""
    with alone(case) as run:
        batches, took = blank_batches(run.program)(0), []
        for step in range(rounds + 2):
            begin = time.process_time()
            run.step(step, batches)
            took.append(time.process_time() - begin)
            run.rows.clear()
        return len(run.ops), took[2:]


def main() -> None:
    """Print a line for each case."""
    torch.set_num_threads(1)
    for name, case in CASES.items():
        ops, took = steps_of(case)
        print(
            f"{name}: {ops} ops, {min(took) / ops * 1e6:.1f} us per op at least, {median(took) / ops * 1e6:.1f} median"
        )


if __name__ == "__main__":
    main()
