"""A trace as arrays of a plan's ops, and what each op took by itself: without what it waited for."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ir.core.errors import ErrorKind, PiperError
from ir.core.order import FloatArray, IntArray
from ir.plan.host import host_reads
from ir.plan.plan import OpKind, Plan
from ir.trace.trace import Trace
from piper_sim.engine import EngineScenario
from piper_sim.study.breakdown import greatest


@dataclass(frozen=True, eq=False)
class TraceTimes:
    """When the ops of some steps were posted, started and had ended: [step, op], seconds."""

    post: FloatArray
    start: FloatArray
    end: FloatArray

    @classmethod
    def of(cls, plan: Plan, trace: Trace, rank: IntArray) -> TraceTimes:
        """Every step of a trace, in order. rank: of each program. Raises PiperError: a trace of another plan."""
        at = {key: i for i, key in enumerate(zip(rank[plan.program].tolist(), plan.texts, strict=True))}
        steps = {step: k for k, step in enumerate(sorted(set(trace.step.tolist())))}
        rows = np.array([steps[s] for s in trace.step.tolist()], dtype=np.int64)
        ops = np.array([at.get(key, -1) for key in zip(trace.rank.tolist(), trace.op, strict=True)], dtype=np.int64)
        columns = []
        for column in (trace.post_s, trace.start_s, trace.end_s):
            table = np.full((len(steps), len(plan)), np.nan)
            table[rows, ops] = column
            columns.append(table)
        if (ops < 0).any() or not len(steps) or np.isnan(columns[0]).any():
            raise PiperError(ErrorKind.ILLEGAL_PLAN, "the trace is one of another plan", key="trace")
        return cls(*columns)

    def __len__(self) -> int:
        return len(self.end)

    @property
    def step_s(self) -> FloatArray:
        """[step - 1] seconds from the end of the step before to a step's own; the first step has none."""
        return np.diff(self.end.max(axis=1))

    def behind(self, first: int) -> TraceTimes:
        """Without the first few steps."""
        return TraceTimes(self.post[first:], self.start[first:], self.end[first:])


def alone(s: EngineScenario, t: TraceTimes) -> FloatArray:
    """[step, op] seconds of every op by itself, as a simulator is given them: once all that it waits for is there.

    A compute op counts from when the host had come to it, and all it waits for and the op before it on its stream had
    ended: a host that runs ahead of its device comes to it long before. A transfer, on its send, from when both ends
    had come to it until the receiver saw its end; a collective, on each member, from the last to come until the last to
    see its end.
    """
    plan, out = s.plan, t.end - t.start
    compute = np.flatnonzero(plan.kind == OpKind.COMPUTE)
    ready = _free(plan, compute, t)
    np.maximum.at(ready.T, plan.waits.rows(), t.end.T[plan.waits.items])
    np.maximum.at(ready[1:].T, s.late, t.end[:-1].T[s.before])
    ready[0, s.late] = np.inf  # what it waited for is not known
    out[:, compute] = t.end[:, compute] - np.minimum(t.start, ready)[:, compute]
    out[:, plan.kind == OpKind.RECV] = 0.0
    recv = np.flatnonzero(plan.kind == OpKind.RECV)
    send = plan.partner[recv]
    out[:, send] = t.end[:, recv] - np.maximum(t.start[:, recv], t.start[:, send])
    joint = (plan.collective >= 0) & (plan.kind == OpKind.COLLECTIVE)
    out[:, joint] = (greatest(plan, t.end) - greatest(plan, t.start))[:, joint]
    return np.maximum(out, 0.0)


def _free(plan: Plan, compute: IntArray, t: TraceTimes) -> FloatArray:
    """[step, op] when the host had come to an op and, of those that compute, its stream to the op before."""
    ready = t.post.copy()
    before, after = compute[:-1], compute[1:]
    same = plan.stream[before] == plan.stream[after]
    np.maximum.at(ready.T, after[same], t.end.T[before[same]])
    first, last = compute[np.append(True, ~same)], compute[np.append(~same, True)]
    np.maximum.at(ready[1:].T, first, t.end[:-1].T[last])
    return ready


def dispatch(s: EngineScenario, t: TraceTimes) -> FloatArray:
    """[step, op] seconds that a host which computes itself needed to come to each op, by what it did not wait for.

    From the op before: its dispatch, or its end where it computes. The first op of the first step has none: 0.
    """
    plan = s.plan
    free = np.where(plan.kind == OpKind.COMPUTE, t.end, t.post)
    joint = np.flatnonzero(plan.kind == OpKind.COLLECTIVE)
    for i in joint.tolist():  # it may have waited there for what it reduces
        for w in plan.waits.row(i).tolist():
            free[:, i] = np.maximum(free[:, i], t.end[:, w])
    before = np.concatenate([np.full((len(t), 1), np.nan), free[:, :-1]], axis=1)
    reading, read = host_reads(plan)
    before[:, reading] = np.maximum(before[:, reading], t.end[:, read])
    for a, b in pairwise(plan.bounds.tolist()):
        before[:, a] = np.concatenate([[np.inf], t.end[:-1, a:b].max(axis=1)])
    return np.asarray(np.maximum(t.post - before, 0.0))
