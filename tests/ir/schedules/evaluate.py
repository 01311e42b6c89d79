"""A plain evaluator of orders, independent of plan and simulator: longest path over program order and data.

A finished op's result is there p2p later on another rank, at once on its own; no send holds up its sender. A fused
pair starts when both inputs are there and hands over both results at its end.

>>> from ir.schedules.fixed import one_f_one_b
>>> found = evaluate(one_f_one_b(ranks=2, mbs=3), [StagePlacement(range(3), (0, 1))])
>>> found.makespan, found.peak_inflight
(12.0, (2, 1))
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ir.core.errors import ErrorKind, PiperError
from ir.core.order import IntArray, Order
from ir.schedules.schedule import OpTimes, StagePlacement, check_complete, homes

_F, _I, _W = range(3)


@dataclass(frozen=True)
class ScheduleEvaluation:
    """What orders cost.

    busy: per rank, time spent in ops.
    span_bubble_fraction: worst rank's idle share between its own first start and last end.
    peak_inflight: per rank, most chunk-microbatches alive, from F until B or W.
    peak_held: the same, where I already releases the share 1 - w_memory.
    """

    makespan: float
    busy: tuple[float, ...]
    span_bubble_fraction: float
    peak_inflight: tuple[int, ...]
    peak_held: tuple[float, ...]

    @property
    def bubble_fraction(self) -> float:
        """Idle share of all ranks over the makespan."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan) if self.makespan else 0.0


def evaluate(
    orders: Sequence[Order], placements: Sequence[StagePlacement], times: OpTimes = OpTimes(), fb: float | None = None
) -> ScheduleEvaluation:
    """Time and memory of complete orders; refuses incomplete ones and deadlocks.

    fb: duration of a fused pair, by default F + B.
    """
    check_complete(orders, placements)
    home = homes(placements)
    programs = _compile(orders, home, times, times.F + times.I + times.W if fb is None else fb)
    starts, ends = _run(programs, 3 * home.size)
    if any(len(e) < len(p.units) for e, p in zip(ends, programs, strict=True)):
        raise _deadlock(orders, programs, [len(e) for e in ends])
    busy = tuple(sum(p.seconds) for p in programs)
    spans = [(e[-1] - s[0] if e else 0.0) for s, e in zip(starts, ends, strict=True)]
    idle = [1 - b / span if span else 0.0 for b, span in zip(busy, spans, strict=True)]
    return ScheduleEvaluation(
        makespan=max((e[-1] for e in ends if e), default=0.0),
        busy=busy,
        span_bubble_fraction=max(0.0, *idle),  # rounding must not make idle time negative
        peak_inflight=tuple(int(_peak(o, 1.0)) for o in orders),
        peak_held=tuple(_peak(o, times.w_memory) for o in orders),
    )


@dataclass(frozen=True)
class _Program:
    """One rank's units; each op of a unit is (own input, neighbour's input, its latency, result)."""

    units: list[list[tuple[int, int, float, int]]]
    seconds: list[float]


def _run(programs: Sequence[_Program], results: int) -> tuple[list[list[float]], list[list[float]]]:
    """Start and end of every unit: a rank runs until it lacks an input, and is woken when that input comes.

    Results are numbered; the last one is there from the start and stands for "no input".
    """
    done = [-1.0] * results + [0.0]
    asleep: dict[int, int] = {}
    starts: list[list[float]] = [[] for _ in programs]
    ends: list[list[float]] = [[] for _ in programs]
    awake = list(reversed(range(len(programs))))
    while awake:
        rank = awake.pop()
        program, start_of, end_of = programs[rank], starts[rank], ends[rank]
        now = end_of[-1] if end_of else 0.0
        for at in range(len(end_of), len(program.units)):
            unit = program.units[at]
            for own, other, latency, _ in unit:
                if done[own] < 0 or done[other] < 0:
                    asleep[own if done[own] < 0 else other] = rank
                    break
                now = max(now, done[own], done[other] + latency)
            else:
                start_of.append(now)
                now += program.seconds[at]
                end_of.append(now)
                for _, _, _, result in unit:
                    done[result] = now
                    if result in asleep:
                        awake.append(asleep.pop(result))
                continue
            break
    return starts, ends


def _compile(orders: Sequence[Order], home: IntArray, times: OpTimes, fb: float) -> list[_Program]:
    """Name every result by a number: pass (F, I, W), stage, microbatch."""
    stages, mbs = home.shape
    none = 3 * stages * mbs
    lasts = np.array([times.F, times.I, times.W, times.I + times.W])
    programs = []
    for rank, o in enumerate(orders):
        does = np.array([_F, _I, _W, _I])[o.token]
        step = np.array([-1, 1, 0, 1])[o.token]
        peer = o.stage + step
        cell = o.stage * mbs + o.mb
        alone = (step == 0) | (peer < 0) | (peer >= stages)
        own = np.where(does == _F, none, (does - 1) * stages * mbs + cell)
        other = np.where(alone, none, does * stages * mbs + cell + step * mbs)
        wire = np.where(alone | (home[np.where(alone, o.stage, peer), o.mb] == rank), 0.0, times.p2p)
        ops = list(zip(own.tolist(), other.tolist(), wire.tolist(), (does * stages * mbs + cell).tolist(), strict=True))
        first = np.flatnonzero(np.diff(o.unit, prepend=-1))
        sizes = np.diff(first, append=len(o))
        units = [ops[a : a + n] for a, n in zip(first.tolist(), sizes.tolist(), strict=True)]
        programs.append(_Program(units, np.where(sizes > 1, fb, lasts[o.token[first]]).tolist()))
    return programs


def _deadlock(orders: Sequence[Order], programs: Sequence[_Program], at: Sequence[int]) -> PiperError:
    """The story: where every rank stands, and for what."""
    cells = [o.cells() for o in orders]
    text = {
        op[-1]: cell
        for rank, program in zip(cells, programs, strict=True)
        for cell, unit in zip(rank, program.units, strict=True)
        for op in unit
    }
    done = {op[-1] for program, n in zip(programs, at, strict=True) for unit in program.units[:n] for op in unit}
    lines = ["no rank can move:"]
    for rank, (program, n) in enumerate(zip(programs, at, strict=True)):
        if n < len(program.units):
            lacks = next(k for op in program.units[n] for k in op[:2] if k in text and k not in done)
            lines.append(f"  rank {rank} stands at {cells[rank][n]} (op {n} of its order), waiting for {text[lacks]}")
    return PiperError(ErrorKind.DEADLOCK, "\n".join(lines))


def _peak(order: Order, w_memory: float) -> float:
    """Most chunk-microbatches alive. A fused pair allocates before it frees, so its F counts first."""
    token = order.token[np.lexsort((order.token, order.unit))]
    change = np.array([1.0, w_memory - 1.0, -w_memory, -1.0])[token]
    return float(np.cumsum(change).max(initial=0.0))
