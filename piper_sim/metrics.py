"""Where each rank's time went: a breakdown that sums exactly to its step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ir.order import FloatArray, IntArray
from ir.plan import OpKind, Plan
from piper_sim.costs import OpCosts, Share
from piper_sim.engine import Run
from piper_sim.engine.steps import carried

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
_SPENT = {
    Share.COMPUTE: "compute",
    Share.RECOMPUTE: "recompute",
    Share.TP: "exposed_tp",
    Share.CP: "exposed_cp",
    Share.OPTIMIZER: "optimizer",
}


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
    """Split the last step of a run: what each compute stream did between its last ends in two steps.

    A gap before an op is *exposed* while a message is on the wire of the stream it waits for, *dependency* before:
    some other rank had not got there yet. Rows sum to the step by construction, not by taking a rest.
    """
    gaps = _Gaps(plan, run)
    spent = np.zeros((plan.programs, len(Share)))
    np.add.at(spent, plan.program[gaps.compute], costs.shares[gaps.compute])
    iteration = float(gaps.window.max())
    seconds = []
    for p in range(plan.programs):
        row = dict.fromkeys(KEYS, 0.0)
        row |= {name: float(spent[p, share]) for share, name in _SPENT.items()}
        row |= {name: float(gaps.exposed[p, k]) for k, name in enumerate(_EXPOSED)}
        # Ranks whose steps differ have not settled: the quicker will have to wait.
        row["dependency"] = float(gaps.dependency[p] + (iteration - gaps.window[p]))
        seconds.append(row)
    return Breakdown(iteration, tuple(seconds))


class _Gaps:
    """The gaps of every compute stream in the last step of a run, and what was on the wire meanwhile.

    window: [program] seconds between the last ends of two steps. exposed: [program, axis]. dependency: [program].
    """

    def __init__(self, plan: Plan, run: Run) -> None:
        n, start, end = len(plan), run.start[-1], run.end[-1]
        two = len(run.end) > 1
        self.plan, self.both = plan, Run(run.start[-2:].ravel(), run.end[-2:].ravel())
        self.now = n if two else 0  # where the last step begins in `both`
        self.compute = np.flatnonzero(plan.kind == OpKind.COMPUTE)
        program = plan.program[self.compute]
        closing = self.compute[np.searchsorted(program, np.arange(plan.programs), side="right") - 1]
        begin = run.end[-2][closing] if two else np.zeros(plan.programs)
        self.window = end[closing] - begin
        first = np.diff(program, prepend=-1) != 0
        before = np.where(first, begin[program], np.roll(end[self.compute], 1))
        opened = np.flatnonzero(start[self.compute] > before)
        lo, hi = before[opened], start[self.compute[opened]]
        on = self._awaited(self.compute[opened])
        stream = np.where(on >= 0, plan.stream[on % n], -1)
        self.exposed = np.zeros((plan.programs, len(_EXPOSED)))
        self.dependency = np.zeros(plan.programs)
        np.add.at(self.dependency, program[opened], hi - lo)
        axis, wire = _axes(plan), self._on_the_wire()
        for s in np.unique(stream[stream >= 0]).tolist():
            rows, p = np.flatnonzero(stream == s), plan.streams[s][0]
            busy = float(self._busy(s, wire, lo[rows], hi[rows]).sum())
            self.exposed[p, axis[s]] += busy
            self.dependency[p] -= busy

    def _awaited(self, ops: IntArray) -> IntArray:
        """Of each op, the awaited op (in `both`) that ended last, the first of equals; -1: it waits for nothing."""
        waits = self.plan.waits
        count = waits.at[ops + 1] - waits.at[ops]
        asker = np.repeat(np.arange(len(ops)), count)
        ahead = np.repeat(waits.at[ops] - np.cumsum(count) + count, count)
        on = waits.items[np.arange(int(count.sum())) + ahead] + self.now
        if self.now:
            late, before = carried(self.plan)
            mine = np.isin(late, ops)
            asker = np.concatenate([asker, np.searchsorted(ops, late[mine])])
            on = np.concatenate([on, before[mine]])
        order = np.lexsort((-np.arange(len(on)), self.both.end[on], asker))
        last = np.flatnonzero(np.diff(asker[order], append=-1))
        out = np.full(len(ops), -1, dtype=np.int64)
        out[asker[order[last]]] = on[order[last]]
        return out

    def _on_the_wire(self) -> FloatArray:
        """When each op of `both` has bytes on the wire: from the meeting of all members."""
        plan, start = self.plan, self.both.start.reshape(-1, len(self.plan))
        on = start.copy()
        peer = plan.partner >= 0
        on[:, peer] = np.maximum(start[:, peer], start[:, plan.partner[peer]])
        members = np.flatnonzero(plan.collective >= 0)
        for step in range(len(on)) if len(members) else ():
            latest = np.full(int(plan.collective.max()) + 1, -np.inf)
            np.maximum.at(latest, plan.collective[members], start[step, members])
            on[step, members] = latest[plan.collective[members]]
        return on.ravel()

    def _busy(self, stream: int, wire: FloatArray, lo: FloatArray, hi: FloatArray) -> FloatArray:
        """Seconds of wire time of a stream inside each [lo, hi]."""
        queue = np.array(self.plan.queues[stream])
        rows = np.concatenate([queue, queue + self.now]) if self.now else queue
        on, off = wire[rows], self.both.end[rows]
        total = np.cumsum(off - on)
        times = np.stack([on, off], axis=1).ravel()
        value = np.stack([total - (off - on), total], axis=1).ravel()
        return np.asarray(np.interp(hi, times, value) - np.interp(lo, times, value))


def _axes(plan: Plan) -> IntArray:
    """Index into _EXPOSED of each stream's messages."""
    out = np.full(len(plan.streams), _EXPOSED.index("exposed_dp"), dtype=np.int64)
    for i, queue in enumerate(plan.queues):
        s = plan.shapes[int(plan.shape[queue[0]])]
        if s.kind in (OpKind.SEND, OpKind.RECV):
            out[i] = _EXPOSED.index("exposed_pp")
        elif s.message is not None and "ep" in s.message.axes:
            out[i] = _EXPOSED.index("exposed_ep")
    return out
