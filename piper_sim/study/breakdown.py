"""Where each rank's time went: a breakdown that sums exactly to its step."""

from dataclasses import dataclass

import numpy as np

from ir.core.order import FloatArray, IntArray
from ir.graph.per_step import FURTHER
from ir.plan.kept import once_per_plan
from ir.plan.plan import OpKind, Plan
from piper_sim.engine import EngineRun, EngineScenario
from piper_sim.folding import RankClasses
from piper_sim.folding.uses import shape_axes
from piper_sim.pricing.costs import OpCosts
from piper_sim.pricing.structure import CostShare

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
    CostShare.COMPUTE: "compute",
    CostShare.RECOMPUTE: "recompute",
    CostShare.TP: "exposed_tp",
    CostShare.CP: "exposed_cp",
    CostShare.OPTIMIZER: "optimizer",
}


@dataclass(frozen=True)
class StepBreakdown:
    """Seconds of one step by rank and by key of `KEYS`; each row sums to the step."""

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


def breakdown(
    scenario: EngineScenario, run: EngineRun, costs: OpCosts, classes: RankClasses | None = None
) -> StepBreakdown:
    """Split the last step of a run: what each compute stream did between its last ends in two steps.

    A gap before an op is *host* from when its stream is free and all it waits for has ended, and while the host was
    launching what it waits for; before that *exposed* while a message is on the wire of the stream it waits for, or of
    that on which the same sums go further, and *dependency* till then: some other rank had not got there yet. What an
    op takes longer than alone is *slowdown*; what it waits for others that exchange messages inside it is exposed. Rows
    sum to the step by construction, not by taking a rest.

    classes: of an unfolded plan; rows are then pipeline ranks', the mean of their replicas. Else a row is a program's.
    """
    gaps = _Gaps(scenario, run, costs)
    plan = scenario.plan
    spent = np.zeros((plan.programs, len(KEYS)))
    program = plan.program[gaps.compute]
    for share, name in _SPENT.items():
        np.add.at(spent[:, KEYS.index(name)], program, costs.shares[gaps.compute, share])
    for name, seconds in gaps.found.items():
        spent[:, KEYS.index(name)] += seconds
    paced = _host_periods(plan, run)
    iteration = _iteration(gaps.window, paced)
    # Ranks whose steps differ have not settled: a device still uses up its lead over its host, the quicker of two
    # devices will have to wait.
    late = np.clip(paced - gaps.window, 0.0, None)
    spent[:, KEYS.index("host")] += late
    spent[:, KEYS.index("dependency")] += iteration - gaps.window - late
    if classes is not None:
        weight = classes.size / classes.size.sum()
        spent = (weight[:, None, None] * spent.reshape(classes.count, -1, len(KEYS))).sum(axis=0)
    return StepBreakdown(iteration, tuple(dict(zip(KEYS, row, strict=True)) for row in spent.tolist()))


def step_seconds(plan: Plan, run: EngineRun) -> float:
    """`breakdown(...).iteration_s` alone."""
    return _iteration(_windows(plan, run), _host_periods(plan, run))


def _iteration(window: FloatArray, paced: FloatArray) -> float:
    return float(max(window.max(), paced.max()))


def _windows(plan: Plan, run: EngineRun) -> FloatArray:
    """[program] seconds between the last ends of two steps of its compute stream; of one step, from the start."""
    _, closing = _computing(plan)
    return np.asarray(run.end[-1][closing] - (run.end[-2][closing] if len(run.end) > 1 else 0.0))


def _host_periods(plan: Plan, run: EngineRun) -> FloatArray:
    """[program] seconds between its host's last dispatches of two steps; 0 without a host or a step before."""
    if run.post is None or len(run.post) < 2:
        return np.zeros(plan.programs)
    return np.asarray((run.post[-1] - run.post[-2])[plan.bounds[1:] - 1])


class _Gaps:
    """The gaps of every compute stream in the last step of a run, and what was on the wire meanwhile.

    window: as `_windows`. found: key -> [program] seconds.
    """

    def __init__(self, scenario: EngineScenario, run: EngineRun, costs: OpCosts) -> None:
        plan = scenario.plan
        n, start, end = len(plan), run.start[-1], run.end[-1]
        two = len(run.end) > 1
        self.scenario, self.plan, self.both = scenario, plan, EngineRun(run.start[-2:].ravel(), run.end[-2:].ravel())
        self.now = n if two else 0  # where the last step begins in `both`
        self.compute, closing = _computing(plan)
        self.found = {name: np.zeros(plan.programs) for name in KEYS}
        program = plan.program[self.compute]
        begin = run.end[-2][closing] if two else np.zeros(plan.programs)
        self.window = _windows(plan, run)
        first = np.diff(program, prepend=-1) != 0
        before = np.where(first, begin[program], np.roll(end[self.compute], 1))
        opened = np.flatnonzero(start[self.compute] > before)
        lo, hi = before[opened], start[self.compute[opened]]
        on = self._awaited(self.compute[opened])
        if run.post is not None:
            ready = np.maximum(lo, np.where(on >= 0, self.both.end[on], lo))
            np.add.at(self.found["host"], program[opened], hi - ready)
            hi = ready
        launching, launched = self._launching(run.post, on, lo, hi)
        np.add.at(self.found["host"], program[opened], launched - launching)
        stream = np.where(on >= 0, plan.stream[on % n], -1)
        np.add.at(self.found["dependency"], program[opened], (launching - lo) + (hi - launched))
        axis, wire, at = _axes(plan), self._on_the_wire(), {s: i for i, s in enumerate(plan.streams)}
        for s in np.unique(stream[stream >= 0]).tolist():
            rows, (p, name) = np.flatnonzero(stream == s), plan.streams[s]
            both = {s, at.get((p, name + FURTHER), s), at.get((p, name.removesuffix(FURTHER)), s)}
            busy = float(self._busy(sorted(both), wire, lo[rows], launching[rows]).sum())
            busy += float(self._busy(sorted(both), wire, launched[rows], hi[rows]).sum())
            self.found[_EXPOSED[axis[s]]][p] += busy
            self.found["dependency"][p] -= busy
        self._inside(wire[self.now :], costs)

    def _launching(
        self, post: FloatArray | None, on: IntArray, lo: FloatArray, hi: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """From when to when, inside [lo, hi], the host was busy with launching what is awaited."""
        host = self.scenario.host
        if post is None or host is None:
            return lo, lo
        done = np.where(on >= 0, post[-2:].ravel()[on], lo)
        begun = np.where(on >= 0, done - host.launch[on % len(self.plan)], lo)
        return np.clip(begun, lo, hi), np.clip(done, lo, hi)

    def _inside(self, wire: FloatArray, costs: OpCosts) -> None:
        """What compute ops took beside their own seconds: others slowed them, or were waited for inside them."""
        plan, ops = self.plan, self.compute
        start, end = self.both.start[self.now + ops], self.both.end[self.now + ops]
        longest = greatest(plan, costs.duration)[ops]
        slowed = end - wire[ops] - longest
        waited = wire[ops] - start + longest - costs.duration[ops]
        np.add.at(self.found["slowdown"], plan.program[ops], slowed)
        met = np.flatnonzero(plan.collective[ops] >= 0)
        if len(met):
            tensor = np.array(["tp" in (a or ()) for a in shape_axes(plan)])[plan.shape[ops[met]]]
            for name, mine in (("exposed_tp", met[tensor]), ("exposed_cp", met[~tensor])):
                np.add.at(self.found[name], plan.program[ops[mine]], waited[mine])

    def _awaited(self, ops: IntArray) -> IntArray:
        """Of each op, the awaited op (in `both`) that ended last, the first of equals; -1: it waits for nothing."""
        waits = self.plan.waits
        count = waits.at[ops + 1] - waits.at[ops]
        asker = np.repeat(np.arange(len(ops)), count)
        ahead = np.repeat(waits.at[ops] - np.cumsum(count) + count, count)
        on = waits.items[np.arange(int(count.sum())) + ahead] + self.now
        if self.now:
            late, before = self.scenario.late, self.scenario.before
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
        return greatest(plan, on).ravel()

    def _busy(self, streams: list[int], wire: FloatArray, lo: FloatArray, hi: FloatArray) -> FloatArray:
        """Seconds inside each [lo, hi] in which something is on the wire of one of these streams."""
        queue = np.array([i for s in streams for i in self.plan.queues[s]])
        rows = np.concatenate([queue, queue + self.now]) if self.now else queue
        rows = rows[np.argsort(wire[rows], kind="stable")]
        off = np.maximum.accumulate(self.both.end[rows])
        on = np.minimum(off, np.maximum(wire[rows], np.append(-np.inf, off[:-1])))
        total = np.cumsum(off - on)
        times = np.stack([on, off], axis=1).ravel()
        value = np.stack([total - (off - on), total], axis=1).ravel()
        return np.asarray(np.interp(hi, times, value) - np.interp(lo, times, value))


def greatest(plan: Plan, value: FloatArray) -> FloatArray:
    """[…, op] of a member of a collective the greatest value among all of its members, of others their own."""
    out, members = value.copy(), np.flatnonzero(plan.collective >= 0)
    group = plan.collective[members]
    most = np.full((int(group.max(initial=-1)) + 1, *value.shape[:-1]), -np.inf)
    np.maximum.at(most, group, value.T[members])
    out.T[members] = most[group]
    return out


@once_per_plan
def _computing(plan: Plan) -> tuple[IntArray, IntArray]:
    """(compute ops, [program] the last of them)."""
    compute = np.flatnonzero(plan.kind == OpKind.COMPUTE)
    return compute, compute[np.searchsorted(plan.program[compute], np.arange(plan.programs), side="right") - 1]


@once_per_plan
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
