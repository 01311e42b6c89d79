"""One pipeline schedule by itself, on given op times: order, makespan, bubble, activations in flight."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import lcm

import numpy as np

from ir.core.errors import PiperError, nearest, usage_error
from ir.core.ops import OpToken
from ir.core.order import FloatArray, Order
from ir.directives import apply
from ir.graph.build import stage_graph
from ir.lower import MessageQueue, PassMerge, PlanPolicy, lower
from ir.plan.plan import OpKind, Plan
from ir.schedules.registry import build
from ir.schedules.schedule import OpTimes, Schedule, ordering, placing
from ir.trace.trace import Trace
from ir.verify import check_plan
from piper_sim.engine import EngineRun, MessageMode, run
from piper_sim.engine.traces import trace_of

KEYS = ("F", "B", "I", "W", "FB", "p2p")
LEAST = Fraction(1, 10**300)


@dataclass(frozen=True)
class PassTimes:
    """Op times of one chunk, exactly as written. Fractions, so that sums have no rounding."""

    F: Fraction = Fraction(1)
    I: Fraction = Fraction(1)
    W: Fraction = Fraction(1)
    FB: Fraction = Fraction(3)
    p2p: Fraction = Fraction(0)

    @classmethod
    def parse(cls, text: str | None) -> PassTimes:
        """Read `F=1,B=2,p2p=0.5`. Raises PiperError (usage) naming the key.

        >>> t = PassTimes.parse("F=1,B=3")
        >>> t.I, t.W, t.FB
        (Fraction(3, 2), Fraction(3, 2), Fraction(4, 1))
        """
        given: dict[str, Fraction] = {}
        for item in (text or "").split(",") if text else ():
            key, _, value = (x.strip() for x in item.partition("="))
            if key not in KEYS:
                raise _usage(f"unknown key {key!r}", nearest(key, KEYS), ", ".join(KEYS))
            if key in given:
                raise _usage(f"{key} is given twice", f"one {key}=…")
            given[key] = _number(key, value)
        return cls._complete(given)

    @classmethod
    def _complete(cls, given: dict[str, Fraction]) -> PassTimes:
        f, b = given.get("F", Fraction(1)), given.get("B")
        i, w = given.get("I"), given.get("W")
        if b is not None:
            if i is None and w is None:
                i = w = b / 2
            i = b - w if i is None and w is not None else i
            w = b - i if w is None and i is not None else w
            if i is None or w is None or i + w != b or min(i, w) < 0:
                raise _usage(f"B = {float(b):g} is not I + W", "drop B, or let I + W = B")
        i, w = Fraction(1) if i is None else i, Fraction(1) if w is None else w
        fb = given.get("FB", f + i + w)
        if fb < max(f, i + w):
            raise _usage(f"FB = {float(fb):g} is shorter than its longer half", f"FB >= {float(max(f, i + w)):g}")
        return cls(f, i, w, fb, given.get("p2p", Fraction(0)))


def _number(key: str, value: str) -> Fraction:
    try:
        number = Fraction(value)
    except (ValueError, ZeroDivisionError):
        raise _usage(f"{key} = {value!r} is no finite number", f"{key}=1") from None
    if number < 0 or len(value) > 40 or (number and not LEAST <= number <= 1 / LEAST):
        raise _usage(f"{key} = {value} is negative or out of range", f"{key}=1")
    return number


def _usage(message: str, fix: str | None, allowed: str = "numbers from 0 up, as in F=1,B=2,p2p=0.5") -> PiperError:
    return usage_error("--times", message, fix, allowed)


@dataclass(frozen=True)
class ScheduleOutcome:
    """A schedule that ran. `scale` turns the run's ticks into the times' unit."""

    schedule: Schedule
    plan: Plan
    run: EngineRun
    scale: float
    duration: FloatArray

    def trace(self) -> Trace:
        """Rows in the times' unit."""
        scaled = EngineRun(self.run.start * self.scale, self.run.end * self.scale)
        return trace_of(self.plan, scaled, {"unit": ""})


def run_schedule(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    times: PassTimes = PassTimes(),
    wire: MessageMode = MessageMode.BUFFERED,
    w_memory: float = 1.0,
) -> ScheduleOutcome:
    """Build, check and simulate one schedule on bare stages. B stays whole; a fused pair is one op of duration FB.

    Raises PiperError (usage): shapes, times or shares out of range.

    >>> out = run_schedule("1f1b", 4, 8)
    >>> report(out)["makespan"]
    33.0
    """
    if not 0 <= w_memory <= 1:
        raise usage_error("--w-memory", f"{w_memory} is no share", allowed="0 to 1")
    ticks, scale = _ticks(times, ranks * microbatches * (chunks or 2))
    op_times = OpTimes(ticks["F"], ticks["I"], ticks["W"], ticks["p2p"], w_memory)
    schedule = build(name, ranks, microbatches, chunks, op_times)
    graph = apply(stage_graph(schedule.stages), [*placing(schedule), ordering(schedule)])
    p2p = MessageQueue.CHANNELS if wire is MessageMode.BUFFERED else MessageQueue.USE
    plan = lower(
        graph, PlanPolicy(PassMerge.FUSED, whole_backward=True, p2p=p2p, clip=False), {"schedule": schedule.name}
    )
    check_plan(plan)
    duration = _durations(plan, ticks)
    return ScheduleOutcome(schedule, plan, run(plan, duration, wire), scale, duration)


def _ticks(times: PassTimes, ops: int) -> tuple[dict[str, float], float]:
    """Times as integers of one tick, so that float sums are exact; as plain floats where no such tick exists."""
    values = {k: getattr(times, k) for k in ("F", "I", "W", "FB", "p2p")}
    tick = lcm(*(v.denominator for v in values.values()))
    if max(values.values()) * tick * (ops + 1) * 4 < 2**53:
        return {k: float(v * tick) for k, v in values.items()}, 1.0 / tick
    return {k: float(v) for k, v in values.items()}, 1.0


def _durations(plan: Plan, ticks: dict[str, float]) -> FloatArray:
    per_shape = []
    for s in plan.shapes:
        if s.kind is not OpKind.COMPUTE:
            per_shape.append(ticks["p2p"])
        elif s.text.startswith("("):
            per_shape.append(ticks["FB"])
        else:
            per_shape.append(sum(ticks[str(plan.graph.nodes[n].kind)] for n, _ in s.covers))
    return np.array(per_shape, dtype=np.float64)[plan.shape]


def report(out: ScheduleOutcome, w_memory: float = 1.0) -> dict[str, object]:
    """The JSON object of `piper-sim schedule`."""
    s, plan = out.schedule, out.plan
    start, end = out.run.start[0], out.run.end[0]
    compute = plan.kind == OpKind.COMPUTE
    makespan = float(end[compute].max())
    busy = np.bincount(plan.program[compute], weights=out.duration[compute], minlength=s.ranks)
    first = np.full(s.ranks, np.inf)
    last = np.zeros(s.ranks)
    np.minimum.at(first, plan.program[compute], start[compute])
    np.maximum.at(last, plan.program[compute], end[compute])
    span = last - first
    idle = np.divide(span - busy, span, out=np.zeros(s.ranks), where=span > 0)
    return {
        "schema_version": 1,
        "schedule": s.name,
        "ranks": s.ranks,
        "microbatches": s.microbatches,
        "chunks": s.chunks,
        "order_depends_on_times": s.order_depends_on_times,
        "order": {str(r): o.cells() for r, o in enumerate(s.orders)},
        "makespan": _exact(makespan, out.scale),
        "busy": {str(r): _exact(float(b), out.scale) for r, b in enumerate(busy)},
        "bubble_fraction": max(0.0, 1 - float(busy.sum()) / (s.ranks * makespan)) if makespan else 0.0,
        "span_bubble_fraction": max(0.0, float(idle.max())),
        "peak_inflight": {str(r): peak_inflight(o, w_memory) for r, o in enumerate(s.orders)},
        "param_copies": max(_stages_held(s)) / s.chunks,
    }


def _exact(ticks: float, scale: float) -> float:
    """Ticks in the user's unit: divided, not multiplied, so that 5255099080 ticks of 1e-9 print as 5.25509908."""
    return ticks / round(1 / scale)


def _stages_held(s: Schedule) -> list[int]:
    """How many different stages each rank holds: those of a direction without a microbatch are not there."""
    held: list[set[int]] = [set() for _ in range(s.ranks)]
    for p in (p for p in s.placements if p.mbs):
        for stage, rank in enumerate(p.rank_of_stage):
            held[rank].add(stage)
    return [len(stages) for stages in held]


def peak_inflight(order: Order, w_memory: float = 1.0) -> int | float:
    """Most chunk-microbatches alive on one rank: from F until B or W; I releases 1 - w_memory of one.

    A fused pair allocates before it frees.

    >>> peak_inflight(Order.of(["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]))
    2
    """
    gain = np.array([1.0, w_memory - 1.0, -w_memory, -1.0])[order.token]
    grows = order.token == OpToken.F
    by = np.lexsort((~grows, order.unit))
    peak = float(np.cumsum(gain[by]).max(initial=0.0))
    return round(peak) if abs(peak - round(peak)) < 1e-9 else peak
