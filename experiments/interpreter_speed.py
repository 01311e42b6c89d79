"""What the interpreter costs per op where kernels are empty: without peers, and between two ranks over gloo.

    python -m experiments.interpreter_speed [--gloo]

Processor time of rank 0: the least and the median step of 25. A compute op covers as many nodes as its stage has parts;
a communication op is queued, posted and waited for. Without peers every message is there at once. Over gloo, time is of
all threads of the rank and of its main one, beside what as many messages take alone: sent, received and waited for in
turn. Times are of this machine, and it must be quiet.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from executor.device.device import HostDevice
from executor.device.progress import RankProgress, create
from executor.launch.launch import launch
from executor.measure.peak_bytes import TransportWithoutPeers
from executor.runtime.batch import blank_batches
from executor.runtime.given import given_text
from executor.runtime.interpreter import PlanInterpreter
from executor.runtime.program import RankPlan
from executor.runtime.rank import blank, crossing, topology
from executor.runtime.spec import PlanRun
from executor.runtime.worker import RankContext
from executor.transport.base import Transport
from ir.job import load_job
from ir.job.build import PreparedJob, prepare
from ir.job.run_options import JobRunOptions
from ir.plan.plan import OpKind, Plan

Seconds = tuple[float, float]  # processor time of a process, and of its main thread
MODEL = {"config": "tiny-llama", "num_hidden_layers": 4, "seq_len": 16}
CASES: Mapping[str, dict[str, Any]] = {
    "one rank, 1f1b": {"parallel": {"pp": 1}, "schedule": {"name": "1f1b", "microbatches": 64}},
    "two ranks, 1f1b": {"parallel": {"pp": 2}, "schedule": {"name": "1f1b", "microbatches": 64}},
    "two ranks, dualpipe": {"parallel": {"pp": 2}, "schedule": {"name": "dualpipe", "microbatches": 64}},
}


def blank_run(prepared: PreparedJob, plan: Plan, transport: Transport, pen: RankProgress) -> PlanInterpreter:
    """A rank whose kernels are empty."""
    program, device = RankPlan.of(plan, transport.rank), HostDevice()
    kernels = blank(prepared, plan, program, PlanRun(JobRunOptions(1, emulate=0.0)))
    return PlanInterpreter(program, kernels, transport, pen, device, crossing(prepared, device))


@contextmanager
def alone(case: dict[str, Any]) -> Iterator[PlanInterpreter]:
    """Rank 0 of a job, by itself in this process."""
    prepared = prepare(load_job({"model": MODEL, **case}))
    with tempfile.TemporaryDirectory() as name:
        create(Path(name) / "progress", 1)
        pen = RankProgress(Path(name) / "progress", 0)
        run = blank_run(prepared, prepared.plan(), TransportWithoutPeers(0), pen)
        yield run
        run.close()
        pen.close()


def timed(work: Callable[[int], object], before: Callable[[], object], rounds: int = 25) -> list[Seconds]:
    """Of the process and of this thread, each round's; two more come first."""
    took = []
    for step in range(rounds + 2):
        before()
        process, thread = time.process_time(), time.thread_time()
        work(step)
        took.append((time.process_time() - process, time.thread_time() - thread))
    return took[2:]


def of_steps(run: PlanInterpreter, before: Callable[[], object]) -> list[Seconds]:
    """A rank's steps."""
    batches = blank_batches(run.program)(0)

    def step(number: int) -> None:
        run.step(number, batches)
        run.rows.clear()

    return timed(step, before)


def over_gloo(ctx: RankContext) -> dict[str, Any]:
    """The target of `launch`."""
    prepared, plan = ctx.given()
    transport = ctx.connect("gloo", topology(plan), HostDevice())
    run, peer = blank_run(prepared, plan, transport, ctx.progress), 1 - ctx.rank
    steps = of_steps(run, transport.barrier)
    messages = sum(op.kind in (OpKind.SEND, OpKind.RECV) for op in run.ops)

    def talk(_: int) -> None:
        for _ in range(messages // 2):
            for handle in [transport.recv(peer, run.boundary()), transport.send(peer, run.boundary())]:
                handle.wait()

    bare = timed(talk, transport.barrier)
    ctx.progress.wait(text="end")
    run.close()
    transport.close()
    return {"ops": len(run.ops), "steps": steps, "messages": messages, "bare": bare}


def said(took: Sequence[Seconds], count: int, what: str) -> str:
    """In words: a time per op or message."""
    process, thread = ([1e6 * x / count for x in times] for times in zip(*took, strict=True))
    main = f"; its main thread {min(thread):.1f}, {median(thread):.1f}"
    return f"{count} {what}, {min(process):.1f} us each at least, {median(process):.1f} median{main}"


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gloo", action="store_true")
    gloo = parser.parse_args().gloo
    torch.set_num_threads(1)
    for name, case in CASES.items():
        if not gloo:
            with alone(case) as run:
                print(f"{name}: {said(of_steps(run, lambda: None), len(run.ops), 'ops')}")
        elif case["parallel"]["pp"] == 2:
            prepared = prepare(load_job({"model": MODEL, **case}))
            found = launch(over_gloo, 2, given=[given_text(prepared, prepared.plan())], watchdog_s=120.0)[0]
            print(f"{name}: {said(found['steps'], found['ops'], 'ops')}")
            print(f"  alone: {said(found['bare'], found['messages'], 'messages')}")


if __name__ == "__main__":
    main()
