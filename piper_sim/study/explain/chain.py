"""Why every op of a run started when it did: the one event behind each start, step after step."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ir.core.errors import job_error
from ir.core.grid import GRID
from ir.core.order import FloatArray, IntArray
from ir.plan.plan import OpKind, Plan
from piper_sim.engine import EngineRun, EngineScenario

STEPS = 3  # kept: a wait is traced back across two ends of a step


@dataclass(frozen=True, eq=False)
class OpChain:
    """Events in ticks of 2**-40 s. Node s * ops + i is op i in the s-th step kept; then come dispatches, likewise.

    start: [node] when an op's stream reached it. lo, hi: [node] from when the op's meeting is complete to its end; of
    a dispatch, while the host is busy with it. lead: [node] the member of its meeting that came last. main: [op] the
    member that the meeting's duration is: a transfer's send, a collective's longest. bind: [node] what ended when the
    op could start, or the host could turn to it, -1: nothing that is kept. period: ticks of the step that repeats.
    program, kind: [op]. queue: [program] its compute ops in order. opened: [program] when its step began.
    """

    ops: int
    start: IntArray
    lo: IntArray
    hi: IntArray
    lead: IntArray
    main: IntArray
    bind: IntArray
    program: IntArray
    kind: IntArray
    queue: tuple[IntArray, ...]
    opened: IntArray
    period: int

    @property
    def now(self) -> int:
        """The first node of the last step."""
        return len(self.start) - self.ops

    @cached_property
    def before(self) -> IntArray:
        """[node] what must end before it begins: what its last member waited for; -1 where nothing is kept."""
        out = self.bind.copy()
        out[: len(self.lead)] = self.bind[self.lead]
        return out


def ticks(seconds: FloatArray) -> IntArray:
    """Seconds as whole ticks. Raises PiperError (job): more than 64 bits of them.

    >>> ticks(np.array([2.0**-40, 1.0])).tolist()
    [1, 1099511627776]
    """
    found = np.rint(np.asarray(seconds) * GRID)
    if not (np.abs(found) < 2.0**63).all():
        allowed = f"steps that end within {2**63 / GRID / 86_400:.0f} days"
        raise job_error("costs", "ops too long to be explained to the tick", allowed=allowed)
    return found.astype(np.int64)


def chain_of(scenario: EngineScenario, run: EngineRun, duration: FloatArray) -> OpChain:
    """The chain of a run that ends in the step that repeats. duration: seconds of its ops alone."""
    plan, n = scenario.plan, len(scenario.plan)
    compute = np.flatnonzero(plan.kind == OpKind.COMPUTE)
    queue = tuple(compute[plan.program[compute] == p] for p in range(plan.programs))
    closing = np.array([q[-1] for q in queue])
    rows = [ticks(x) for x in (run.start, run.end)] + ([] if run.post is None else [ticks(run.post)])
    opened = rows[1][-2][closing] if len(rows[1]) > 1 else np.zeros(plan.programs, dtype=np.int64)
    window = rows[1][-1][closing] - opened
    period = int(window.max())
    if run.post is not None and len(run.post) > 1:
        dispatched = plan.bounds[1:] - 1
        period = max(period, int((rows[2][-1] - rows[2][-2])[dispatched].max()))
    if np.all(window == period):  # every step before is this one, shifted
        back = period * np.arange(STEPS - 1, -1, -1)[:, None]
        rows = [x[-1] - back for x in rows]
    steps, (start, end) = len(rows[0]), rows[:2]
    main = _main(plan, duration)
    lead = np.concatenate([_lead(plan, x) + s * n for s, x in enumerate(start)])
    lo, hi, bind = start.ravel()[lead], end.ravel(), _ended(scenario, end)
    if scenario.host is not None:
        post, launch = rows[2], ticks(scenario.host.launch)
        began = _turned(scenario, end, post)
        late = post.ravel() > np.where(bind >= 0, hi[bind], -1)
        bind = np.append(np.where(late, steps * n + np.arange(steps * n), bind), began)
        lo, hi = np.append(lo, (post - launch).ravel()), np.append(hi, post.ravel())
    return OpChain(n, start.ravel(), lo, hi, lead, main, bind, plan.program, plan.kind, queue, opened, period)


def _main(plan: Plan, duration: FloatArray) -> IntArray:
    n = len(plan)
    out = np.where(plan.kind == OpKind.RECV, np.where(plan.partner >= 0, plan.partner, np.arange(n)), np.arange(n))
    return _chosen(plan, ticks(duration), out)


def _lead(plan: Plan, start: IntArray) -> IntArray:
    own = np.arange(len(plan))
    out = np.where((plan.partner >= 0) & (start[plan.partner] > start), plan.partner, own)
    return _chosen(plan, start, out)


def _chosen(plan: Plan, value: IntArray, out: IntArray) -> IntArray:
    """`out` with each collective's member of the greatest value, the first of equals."""
    members = np.flatnonzero(plan.collective >= 0)
    group = plan.collective[members]
    order = np.lexsort((members, -value[members], group))
    first = np.diff(group[order], prepend=-1) != 0
    best = np.zeros(int(plan.collective.max(initial=-1)) + 1, dtype=np.int64)
    best[group[order][first]] = members[order][first]
    out[members] = best[group]
    return out


def _ended(scenario: EngineScenario, end: IntArray) -> IntArray:
    """[node] of an op, what ended last of the op before it in its stream and of what it waits for."""
    plan, n = scenario.plan, len(scenario.plan)
    ahead = np.empty(n, dtype=np.int64)
    for queue in plan.queues:
        ahead[queue] = [queue[-1] - n, *queue[:-1]]
    rows = [np.arange(n), plan.waits.rows(), scenario.late]
    items = [ahead, plan.waits.items, scenario.before - n]
    return _latest(np.concatenate(rows), np.concatenate(items), end)


def _turned(scenario: EngineScenario, end: IntArray, post: IntArray) -> IntArray:
    """[node] of a dispatch, what ended last of the dispatch before it and of what holds the host."""
    plan, n = scenario.plan, len(scenario.plan)
    assert scenario.host is not None
    hold = scenario.host.hold
    ahead = np.arange(n) - 1
    ahead[plan.bounds[:-1]] = plan.bounds[1:] - 1 - n
    held = _latest(hold.rows(), np.where(hold.items < n, hold.items, hold.items - 2 * n), end)
    nodes = end.size
    own = (ahead + n * np.arange(len(end))[:, None]).ravel()
    flat_post, flat_end = post.ravel(), end.ravel()
    own_at = np.where(own >= 0, flat_post[own], np.iinfo(np.int64).min)
    held_at = np.where(held >= 0, flat_end[held], np.iinfo(np.int64).min)
    return np.where(held_at > own_at, held, np.where(own >= 0, own + nodes, -1))


def _latest(rows: IntArray, items: IntArray, end: IntArray) -> IntArray:
    """[node] the item of its row that ended last, the first of equals; items < 0 are of the step before."""
    steps, n = end.shape
    out, flat = np.full((steps, n), -1, dtype=np.int64), end.ravel()
    for s in range(steps):
        node = items + s * n
        known = np.flatnonzero(node >= 0)
        mine, at = rows[known], node[known]
        order = np.lexsort((-np.arange(len(at)), flat[at], mine))
        last = np.diff(mine[order], append=-1) != 0
        out[s][mine[order][last]] = at[order][last]
    return out.ravel()
