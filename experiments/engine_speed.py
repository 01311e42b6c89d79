"""How many times slower than a bare heapq loop are building, checking and simulating a plan?

    python -m experiments.engine_speed [--ranks 64] [--mbs 1024] [--rounds 3] [--layers]

The yardstick does the least a discrete-event engine can do with the same ops: FIFO streams, waits, a heap; no memory,
no trace, no checks, and its input is not timed. Parts take turns with it on the same machine; CPU seconds, the least
of some rounds. --layers: DeepSeek-V3's demo job under DualPipe, layer by layer, against the yardstick's time per op.
"""

from __future__ import annotations

import argparse
import time
import tomllib
from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush

import numpy as np

from cost_models import Recipe
from ir.build import stage_graph
from ir.directives import apply
from ir.job.load import job_from
from ir.lower import Merge, Policy, lower
from ir.order import FloatArray
from ir.plan import OpKind, Plan
from ir.rules import check_plan
from ir.schedules.registry import build
from ir.schedules.strategy import ordering, placing
from piper_sim.commands.demo import JOB
from piper_sim.costs import CostModel
from piper_sim.engine import Wire, run, steady
from piper_sim.memory import memory, state
from piper_sim.metrics import breakdown
from piper_sim.simulate import hardware_of, prepare_priced
from piper_sim.twin import choose

Loop = tuple[list[float], list[int], list[list[int]]]


def one_f_one_b(ranks: int, mbs: int) -> Loop:
    """The yardstick's input: seconds and stream of each op, and who waits for it. Sends and receives are ops."""
    seconds: list[float] = []
    stream: list[int] = []
    at: dict[tuple[str, int, int], int] = {}
    for rank in range(ranks):
        warm = min(ranks - rank, mbs)
        turns = [("F", m) for m in range(warm)]
        for m in range(mbs):
            turns.append(("B", m))
            turns += [("F", m + warm)] if m + warm < mbs else []
        for way, m in turns:
            ahead = 1 if way == "F" else -1
            for what, lane, lasts, there in (
                ("recv", 1, 0.0, 0 <= rank - ahead < ranks),
                ("", 0, 1.0 if way == "F" else 2.0, True),
                ("send", 2, 0.25, 0 <= rank + ahead < ranks),
            ):
                if there:
                    at[what + way, rank, m] = len(seconds)
                    seconds.append(lasts)
                    stream.append(3 * rank + lane)
    waiters: list[list[int]] = [[] for _ in seconds]
    for (what, rank, m), i in at.items():
        before = {
            "F": ("recvF", rank),
            "B": ("recvB", rank) if rank < ranks - 1 else ("F", rank),
            "sendF": ("F", rank),
            "sendB": ("B", rank),
            "recvF": ("sendF", rank - 1),
            "recvB": ("sendB", rank + 1),
        }[what]
        if (*before, m) in at:
            waiters[at[*before, m]].append(i)
    return seconds, stream, waiters


def yardstick(seconds: list[float], stream: list[int], waiters: list[list[int]]) -> float:
    """The makespan, by events: an op starts when it heads its stream and nothing is left to wait for."""
    left = [0] * len(seconds)
    following = [-1] * len(seconds)
    tail: dict[int, int] = {}
    for i, s in enumerate(stream):
        if s in tail:
            following[tail[s]] = i
            left[i] += 1
        tail[s] = i
        for j in waiters[i]:
            left[j] += 1
    heap = [(seconds[i], i) for i, n in enumerate(left) if not n]
    heap.sort()
    now, done = 0.0, 0
    while heap:
        now, i = heappop(heap)
        done += 1
        j = following[i]
        if j >= 0:
            left[j] -= 1
            if not left[j]:
                heappush(heap, (now + seconds[j], j))
        for j in waiters[i]:
            left[j] -= 1
            if not left[j]:
                heappush(heap, (now + seconds[j], j))
    assert done == len(seconds)
    return now


class Bench:
    """Parts of a pipeline, timed in turn with the yardstick. Each part is given what the parts before it returned."""

    def __init__(self, loop: Loop, rounds: int) -> None:
        self.loop, self.rounds = loop, rounds

    def table(self, title: str, ops: int, parts: dict[str, Callable[[dict[str, object]], object]]) -> dict[str, float]:
        """Run and print; returns ratios to the yardstick's time for as many ops."""
        best = dict.fromkeys(["heapq loop", *parts], float("inf"))
        for _ in range(self.rounds):
            made: dict[str, object] = {}
            for name, part in {"heapq loop": lambda _: yardstick(*self.loop), **parts}.items():
                begin = time.process_time()
                made[name] = part(made)
                best[name] = min(best[name], time.process_time() - begin)
        unit = best["heapq loop"] / len(self.loop[0])
        print(f"\n{title}: {ops:,} ops; the heapq loop takes {1e6 * unit:.2f} us per op")
        best["build + check + simulate"] = sum(best[n] for n in ("order and lower", "check_plan", "SimPy"))
        ratios = {}
        for name, seconds in best.items():
            each = seconds / (len(self.loop[0]) if name == "heapq loop" else ops)
            ratios[name] = each / unit
            print(f"  {name:28} {seconds:8.3f} s {1e6 * each:8.2f} us/op {ratios[name]:7.2f} x")
        return ratios


def stages(ranks: int, mbs: int) -> Plan:
    """The plan of `piper-sim schedule 1f1b`."""
    schedule = build("1f1b", ranks, mbs)
    graph = apply(stage_graph(schedule.stages), [*placing(schedule), ordering(schedule)])
    return lower(graph, Policy(Merge.FUSED, whole_backward=True, clip=False))


def by_stage(ranks: int, mbs: int, rounds: int) -> dict[str, float]:
    """1F1B on bare stages, the same ops as the yardstick's."""
    loop, plan = one_f_one_b(ranks, mbs), stages(ranks, mbs)
    backward = np.array([s.text.endswith("B*") for s in plan.shapes])[plan.shape]
    seconds: FloatArray = np.where(plan.kind == OpKind.COMPUTE, np.where(backward, 2.0, 1.0), 0.25)
    assert len(plan) == len(loop[0])
    assert run(plan, seconds, Wire.BUFFERED).end.max() == yardstick(*loop), "the same plan, hence the same makespan"
    choose(plan, seconds, wire=Wire.BUFFERED)  # compile
    empty = state(plan, Recipe())
    return Bench(loop, rounds).table(
        f"1F1B, {ranks} x {mbs}",
        len(plan),
        {
            "order and lower": lambda made: stages(ranks, mbs),
            "check_plan": lambda made: check_plan(_plan(made)),
            "SimPy": lambda made: run(_plan(made), seconds, Wire.BUFFERED),
            "SimPy, rendezvous": lambda made: run(_plan(made), seconds, Wire.RENDEZVOUS),
            "compiled twin": lambda made: choose(_plan(made), seconds, wire=Wire.BUFFERED),
            "memory": lambda made: memory(_plan(made), empty),
        },
    )


def by_layer(mbs: int, rounds: int) -> dict[str, float]:
    """DeepSeek-V3 under DualPipe, all-to-alls and layers as ops: one step."""
    job = job_from(tomllib.loads(JOB), file="demo")
    job = replace(job, schedule=replace(job.schedule, microbatches=mbs))
    hardware = hardware_of(job)
    made = prepare_priced(job, hardware)
    plan = made.plan()
    model = CostModel(made, hardware)
    costs = model.price(plan)
    ran, steps = steady(plan, costs.duration, clipped=True)
    choose(plan, costs.duration, steps=steps)
    return Bench(one_f_one_b(job.parallel.pp, mbs), rounds).table(
        f"DeepSeek-V3, DualPipe, {job.parallel.pp} x {mbs}, layer by layer",
        len(plan),
        {
            "order and lower": lambda done: made.plan(),
            "check_plan": lambda done: check_plan(_plan(done)),
            "costs": lambda done: model.price(_plan(done)),
            "SimPy": lambda done: run(_plan(done), costs.duration),
            f"SimPy, steady ({steps} steps)": lambda done: steady(_plan(done), costs.duration, clipped=True),
            "compiled twin": lambda done: choose(_plan(done), costs.duration),
            "memory": lambda done: memory(_plan(done), state(_plan(done), model.recipe)),
            "breakdown": lambda done: breakdown(_plan(done), ran, costs),
        },
    )


def _plan(made: dict[str, object]) -> Plan:
    plan = made["order and lower"]
    assert isinstance(plan, Plan)
    return plan


def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--mbs", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", action="store_true", help="also the layer-level table")
    args = parser.parse_args()
    by_stage(args.ranks, args.mbs, args.rounds)
    if args.layers:
        by_layer(256, args.rounds)


if __name__ == "__main__":
    main()
