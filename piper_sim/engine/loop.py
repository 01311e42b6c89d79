"""The SimPy engine: one process per program and stream; ops in order inside a stream, streams side by side.

An op starts when it heads its stream, what it waits for has ended and its host has dispatched it. Transfers and
collectives that span programs move when their last member has come. One event per op or meeting; processes exist only
for streams and hosts. docs/ENGINE.md is the arithmetic.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Generator
from itertools import pairwise

import numpy as np
import simpy
from simpy.events import NORMAL, Event

from ir.core.order import FloatArray, IntArray
from ir.plan.plan import OpKind, OpLists, Plan
from piper_sim.engine.scenario import EngineRun, EngineScenario, MessageMode
from piper_sim.engine.stuck import deadlock


def run(plan: Plan, duration: FloatArray, wire: MessageMode = MessageMode.RENDEZVOUS, steps: int = 1) -> EngineRun:
    """Simulate `steps` repetitions of a bare plan: no host, nothing shared. See `play`."""
    return finish(EngineState(EngineScenario.of(plan, wire), duration, steps))


def finish(world: EngineState) -> EngineRun:
    """Let a world run until nothing is left to happen."""
    was = gc.isenabled()
    gc.disable()  # a million short-lived events, no cycles: collection would only cost
    try:
        world.env.run()
    finally:
        if was:
            gc.enable()
    shape = (world.steps, world.count)
    start, end = (np.array(x).reshape(shape) for x in (world.start, world.end))
    found = EngineRun(start, end, np.array(world.post).reshape(shape) if world.hosted else None)
    if (found.end < 0).any():
        raise deadlock(world.scenario, found.start >= 0, found.end >= 0, found.post)
    return found


class OpEnd(Event):
    """The end of an op or of a meeting, or a dispatch. It cannot fail, so only its time is open: when it is due."""

    _ok, _value = True, None


class EngineState:
    """All state of one run: plain lists, because the processes touch them a million times.

    A row of `ends` has an entry per op or meeting, then one per op of the step before that some op waits for.
    """

    def __init__(self, scenario: EngineScenario, duration: FloatArray, steps: int) -> None:
        self.scenario, plan = scenario, scenario.plan
        self.count, self.steps, self.env = len(plan), steps, simpy.Environment()
        meeting = _meetings(plan, scenario.wire)
        waits = plan.waits.rows(), meeting[plan.waits.items]
        late, before = (scenario.late, scenario.before) if steps > 1 else (meeting[:0], meeting[:0])
        host, self.hosted = scenario.host, scenario.host is not None
        hold = (host.hold.rows(), host.hold.items) if host else (meeting[:0], meeting[:0])
        over = np.unique(np.concatenate([before, hold[1][hold[1] >= self.count] - self.count]))
        self.before = meeting[over].tolist()
        # What is carried over stands behind the step's own ops.
        self.waits = _lists(self.count, [waits, (late, self.count + np.searchsorted(over, before))])
        old = hold[1] >= self.count
        on = np.where(old, self.count + np.searchsorted(over, hold[1] - self.count), hold[1])
        on[~old] = meeting[on[~old]]
        self.hold = _lists(self.count, [(hold[0], on)]) if host else []
        self.launch = host.launch.tolist() if host else []
        self.meeting, self.partner = meeting.tolist(), plan.partner.tolist()
        self.members = np.bincount(meeting, minlength=self.count).tolist()
        self.duration = _durations(plan, np.asarray(duration, dtype=np.float64), meeting).tolist()
        self.sends = (plan.kind == OpKind.SEND).tolist()
        self.start, self.end, self.post = ([array("d", [-1.0]) * self.count for _ in range(steps)] for _ in range(3))
        self.past = OpEnd(self.env)
        self.past.callbacks = None  # type: ignore[assignment]  # as SimPy marks what has happened
        self.ends: list[list[OpEnd | None]] = []
        self.missing: list[list[int]] = []
        self.calls: list[list[OpEnd | None]] = [[None] * self.count for _ in range(steps)] if host else []
        for a, b in pairwise(plan.bounds.tolist() if host else ()):
            self.env.process(self._host(range(a, b)))
        for queue in plan.queues:
            channel = scenario.wire is MessageMode.BUFFERED and plan.partner[queue[0]] >= 0
            self.env.process(self._channel(queue) if channel else self._stream(queue))

    def _step(self, step: int) -> tuple[list[OpEnd | None], list[int]]:
        """Of one step: the end of each op or meeting, None until somebody needs it; how many members are to come."""
        while step >= len(self.ends):
            last = self.ends[-1] if self.ends else []
            over = [last[i] or self._new(last, i) for i in self.before] if last else [self.past] * len(self.before)
            self.ends.append([None] * self.count + over)
            self.missing.append(self.members.copy())
        return self.ends[step], self.missing[step]

    def _new(self, ends: list[OpEnd | None], i: int) -> OpEnd:
        end = ends[i] = OpEnd(self.env)
        return end

    def _host(self, ops: range) -> Generator[Event, None, None]:
        """Dispatch a program's ops, one after the other."""
        env, new, past = self.env, self._new, self.past
        for step in range(self.steps):
            ends, _ = self._step(step)
            calls, post = self.calls[step], self.post[step]
            for i in ops:
                for w in self.hold[i]:
                    if (awaited := ends[w] or new(ends, w)).callbacks is not None:
                        yield awaited
                if self.launch[i]:
                    yield env.timeout(self.launch[i])
                post[i] = env.now
                call, calls[i] = calls[i], past
                if call is not None:
                    env.schedule(call)

    def _stream(self, queue: list[int]) -> Generator[Event, None, None]:
        """Ops one after the other: each ends when its meeting has, which begins when its last member has come."""
        env, new, past, hosted = self.env, self._new, self.past, self.hosted
        waits, meeting, begin = self.waits, self.meeting, self._begin
        for step in range(self.steps):
            ends, missing = self._step(step)
            start, end = self.start[step], self.end[step]
            for i in queue:
                for w in waits[i]:
                    if (awaited := ends[w] or new(ends, w)).callbacks is not None:
                        yield awaited
                if hosted:
                    calls = self.calls[step]
                    if (call := calls[i] or new(calls, i)).callbacks is not None:
                        yield call
                start[i] = env.now
                m = meeting[i]
                together = ends[m] or new(ends, m)
                missing[m] -= 1
                begin(i, m, together, not missing[m])
                yield together
                end[i] = env.now
                ends[m] = past

    def _begin(self, _: int, m: int, end: OpEnd, complete: bool) -> None:
        """An op has started; its meeting begins if that completes it."""
        if complete:
            self.env.schedule(end, NORMAL, self.duration[m])

    def _channel(self, queue: list[int]) -> Generator[Event, None, None]:
        """Buffered transfers: a send's message leaves at once; a receive ends when its message is there."""
        env, new, schedule, past = self.env, self._new, self.env.schedule, self.past
        waits, duration, partner, sends = self.waits, self.duration, self.partner, self.sends
        for step in range(self.steps):
            ends, _ = self._step(step)
            start, end = self.start[step], self.end[step]
            for i in queue:
                for w in waits[i]:
                    if (awaited := ends[w] or new(ends, w)).callbacks is not None:
                        yield awaited
                now = start[i] = env.now
                if sends[i]:
                    schedule(ends[i] or new(ends, i), NORMAL, duration[i])
                    end[i] = now + duration[i]
                    continue
                message = ends[partner[i]] or new(ends, partner[i])
                mine = ends[i]
                if mine is None:  # nobody waits for the receive yet: its end will be the message's
                    ends[i] = message
                if message.callbacks is not None:
                    yield message
                end[i] = env.now
                if mine is not None:
                    schedule(mine)
                else:
                    ends[i] = past
                ends[partner[i]] = past


def _lists(count: int, pairs: list[tuple[IntArray, IntArray]]) -> list[list[int] | tuple[()]]:
    """By op, the second of each pair that has it first."""
    rows, items = (np.concatenate([p[k] for p in pairs]) for k in (0, 1))
    csr = OpLists.of(count, rows, items)
    at, flat = csr.at.tolist(), csr.items.tolist()
    return [flat[a:b] if a != b else () for a, b in pairwise(at)]


def _meetings(plan: Plan, wire: MessageMode) -> IntArray:
    """For each op the least op that it must meet: its own, where it runs alone."""
    out = np.arange(len(plan))
    if wire is MessageMode.RENDEZVOUS:
        met = np.flatnonzero(plan.partner >= 0)
        out[met] = np.minimum(met, plan.partner[met])
    joint = np.flatnonzero(plan.collective >= 0)
    if len(joint):
        first = np.full(int(plan.collective.max()) + 1, len(plan))
        np.minimum.at(first, plan.collective[joint], joint)
        out[joint] = first[plan.collective[joint]]
    return out


def _durations(plan: Plan, duration: FloatArray, meeting: IntArray) -> FloatArray:
    """Of each meeting: a transfer's send's, a collective's longest."""
    out = np.zeros(len(plan))
    counts = plan.kind != OpKind.RECV
    np.maximum.at(out, meeting[counts], duration[counts])
    return out
