"""Where each rank's time went: a breakdown that sums exactly to its step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ir.order import FloatArray, IntArray
from ir.plan import OpKind, Plan
from piper_sim.costs import OpCosts, Share
from piper_sim.engine import Run

KEYS = (
    "compute",
    "recompute",
    "slowdown",
    "exposed_tp",
    "exposed_cp",
    "exposed_ep",
    "exposed_dp",
    "exposed_pp",
    "dependency",
    "host",
    "optimizer",
)
_EXPOSED = ("exposed_ep", "exposed_dp", "exposed_pp")


@dataclass(frozen=True)
class Breakdown:
    """Seconds of one step by rank and by key of `KEYS`; each row sums to that rank's step."""

    iteration_s: float
    seconds: tuple[dict[str, float], ...]

    @property
    def bubble_fraction(self) -> float:
        """Sum of dependency over sum of iteration."""
        total = sum(sum(row.values()) for row in self.seconds)
        return sum(row["dependency"] for row in self.seconds) / total if total else 0.0

    @property
    def exposed_comm_s(self) -> float:
        """Mean over ranks of all exposed communication."""
        exposed = (sum(v for k, v in row.items() if k.startswith("exposed_")) for row in self.seconds)
        return sum(exposed) / len(self.seconds)


def breakdown(plan: Plan, run: Run, costs: OpCosts) -> Breakdown:
    """Split the last step of a run. A rank's step lasts from its own end of the step before to its own end.

    A gap on the compute stream is *exposed* while a message of the stream it waits on is on the wire, and
    *dependency* otherwise: some other rank had not got there yet.
    """
    start, end = run.start[-1], run.end[-1]
    programs = plan.programs
    finish = _finish(plan, end)
    begin = _finish(plan, run.end[-2]) if len(run.end) > 1 else np.zeros(programs)
    axis = _axes(plan)
    gaps = _gaps(plan, start, end, begin, finish, axis)
    seconds = []
    for p in range(programs):
        mine = (plan.program == p) & (plan.kind == OpKind.COMPUTE)
        spent = costs.shares[mine].sum(axis=0)
        window = float(finish[p] - begin[p])
        row = dict.fromkeys(KEYS, 0.0)
        row["compute"] = float(spent[Share.COMPUTE])
        row["recompute"] = float(spent[Share.RECOMPUTE])
        row["exposed_tp"] = float(spent[Share.TP])
        row["exposed_cp"] = float(spent[Share.CP])
        row["optimizer"] = float(spent[Share.OPTIMIZER])
        for k, name in enumerate(_EXPOSED):
            row[name] = float(gaps[p, k])
        row["dependency"] = window - sum(row.values())
        seconds.append(row)
    return Breakdown(float((finish - begin).max()), tuple(seconds))


def _finish(plan: Plan, end: FloatArray) -> FloatArray:
    out = np.zeros(plan.programs)
    np.maximum.at(out, plan.program, end)
    return out


def _axes(plan: Plan) -> IntArray:
    """Index into _EXPOSED of each stream's messages."""
    out = np.full(len(plan.streams), 1, dtype=np.int64)
    for i, queue in enumerate(plan.queues):
        s = plan.shapes[int(plan.shape[queue[0]])]
        if s.kind in (OpKind.SEND, OpKind.RECV):
            out[i] = 2
        elif s.message is not None and "ep" in s.message.axes:
            out[i] = 0
    return out


def _gaps(
    plan: Plan, start: FloatArray, end: FloatArray, begin: FloatArray, finish: FloatArray, axis: IntArray
) -> FloatArray:
    """[program, axis] seconds of compute-stream gaps during which the awaited stream's wire was busy."""
    out = np.zeros((plan.programs, len(_EXPOSED)))
    compute = np.flatnonzero(plan.kind == OpKind.COMPUTE)
    program = plan.program[compute]
    before = np.where(np.diff(program, prepend=-1) != 0, begin[program], np.roll(end[compute], 1))
    opened = np.flatnonzero(start[compute] > before)
    binding = _binding(plan, compute[opened], end)
    lo, hi = before[opened], start[compute[opened]]
    stream = np.where(binding >= 0, plan.stream[np.maximum(binding, 0)], -1)
    last_compute = np.zeros(plan.programs)
    np.maximum.at(last_compute, program, end[compute])
    tail = [(p, float(last_compute[p]), float(finish[p])) for p in range(plan.programs) if finish[p] > last_compute[p]]
    wire = _Wires(plan, start, end)
    for s in np.unique(stream[stream >= 0]).tolist():
        rows = np.flatnonzero(stream == s)
        out[plan.streams[s][0], axis[s]] += float(wire.busy(s, lo[rows], hi[rows]).sum())
    for p, a, b in tail:
        at = max((s for s, (q, _) in enumerate(plan.streams) if q == p), key=lambda s: end[plan.queues[s][-1]])
        out[p, axis[at]] += float(wire.busy(at, np.array([a]), np.array([b])).sum())
    return out


def _binding(plan: Plan, rows: IntArray, end: FloatArray) -> IntArray:
    """Of each op, the awaited op that ended last (-1: it waits for nothing)."""
    at, items = plan.waits.at, plan.waits.items
    out = np.full(len(rows), -1, dtype=np.int64)
    count = at[rows + 1] - at[rows]
    for k in range(int(count.max(initial=0))):
        has = np.flatnonzero(count > k)
        w = items[at[rows[has]] + k]
        better = (out[has] < 0) | (end[w] > end[np.maximum(out[has], 0)])
        out[has[better]] = w[better]
    return out


class _Wires:
    """When each communication stream has bytes on the wire: from the meeting of all members to the end."""

    def __init__(self, plan: Plan, start: FloatArray, end: FloatArray) -> None:
        self.plan, self.end = plan, end
        self.on = start.copy()
        peer = plan.partner >= 0
        self.on[peer] = np.maximum(start[peer], start[plan.partner[peer]])
        members = np.flatnonzero(plan.collective >= 0)
        if len(members):
            latest = np.full(int(plan.collective.max()) + 1, -np.inf)
            np.maximum.at(latest, plan.collective[members], start[members])
            self.on[members] = latest[plan.collective[members]]

    def busy(self, stream: int, lo: FloatArray, hi: FloatArray) -> FloatArray:
        """Seconds of wire time of a stream inside each [lo, hi]."""
        rows = np.array(self.plan.queues[stream])
        on, off = self.on[rows], self.end[rows]
        total = np.cumsum(off - on)
        times = np.stack([on, off], axis=1).ravel()
        value = np.stack([total - (off - on), total], axis=1).ravel()
        return np.asarray(np.interp(hi, times, value) - np.interp(lo, times, value))
