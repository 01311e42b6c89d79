"""The SimPy engine: one process per program and stream; ops in order inside a stream, streams side by side.

An op starts when it heads its stream and what it waits for has ended. Transfers and collectives that span programs
move when their last member has come. One event per op or meeting; processes exist only for streams.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Generator
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np
import simpy
from simpy.events import NORMAL, Event

from ir.errors import ErrorKind, PiperError
from ir.order import FloatArray, IntArray
from ir.plan import Csr, OpKind, Plan
from piper_sim.engine.steps import carried

LINES = 40


class Wire(StrEnum):
    """What a transfer means. rendezvous: it starts when both ends are posted and holds both streams.

    buffered: the message leaves when the send is posted and never holds the sender (pure latency).
    """

    BUFFERED = "buffered"
    RENDEZVOUS = "rendezvous"


@dataclass(frozen=True, eq=False)
class Run:
    """When ops started and ended. Arrays have shape (steps, ops); times are in the unit of the durations."""

    start: FloatArray
    end: FloatArray


def run(plan: Plan, duration: FloatArray, wire: Wire = Wire.RENDEZVOUS, steps: int = 1) -> Run:
    """Simulate `steps` repetitions of the plan. duration: one number per op (a transfer's: its send's).

    Streams run on from one step into the next, where some ops also wait for ops of the step before (`carried`).
    Raises PiperError (deadlock) naming where every rank stands.
    """
    return _run(plan, _World(plan, duration, wire, steps))


def _run(plan: Plan, world: _World) -> Run:
    """Let a world run until nothing is left to happen."""
    was = gc.isenabled()
    gc.disable()  # a million short-lived events, no cycles: collection would only cost
    try:
        world.env.run()
    finally:
        if was:
            gc.enable()
    shape = (world.steps, len(plan))
    found = Run(np.array(world.start).reshape(shape), np.array(world.end).reshape(shape))
    if (found.end < 0).any():
        raise _deadlock(plan, found)
    return found


class _End(Event):
    """The end of an op or of a meeting of several. It cannot fail, so only its time is open: when it is scheduled."""

    _ok, _value = True, None


class _World:
    """All state of one run: plain lists, because the processes touch them a million times."""

    def __init__(self, plan: Plan, duration: FloatArray, wire: Wire, steps: int) -> None:
        self.count, self.steps, self.env = len(plan), steps, simpy.Environment()
        meeting = _meetings(plan, wire)
        late, before = carried(plan) if steps > 1 else (meeting[:0], meeting[:0])
        # What is carried over stands behind the step's own ops.
        waits = Csr.of(
            len(plan),
            np.concatenate([plan.waits.rows(), late]),
            np.concatenate([meeting[plan.waits.items], self.count + np.arange(len(late))]),
        )
        at, items = waits.at.tolist(), waits.items.tolist()
        self.waits = [items[a:b] if a != b else () for a, b in pairwise(at)]
        self.before = meeting[before].tolist()
        self.meeting, self.partner = meeting.tolist(), plan.partner.tolist()
        self.members = np.bincount(meeting, minlength=len(plan)).tolist()
        self.duration = _durations(plan, np.asarray(duration, dtype=np.float64), meeting).tolist()
        self.sends = (plan.kind == OpKind.SEND).tolist()
        self.start = [array("d", [-1.0]) * self.count for _ in range(steps)]
        self.end = [array("d", [-1.0]) * self.count for _ in range(steps)]
        self.past = _End(self.env)
        self.past.callbacks = None  # type: ignore[assignment]  # as SimPy marks what has happened
        self.ends: list[list[_End | None]] = []
        self.missing: list[list[int]] = []
        for queue in plan.queues:
            channel = wire is Wire.BUFFERED and plan.partner[queue[0]] >= 0
            self.env.process(self._channel(queue) if channel else self._stream(queue))

    def _step(self, step: int) -> tuple[list[_End | None], list[int]]:
        """Of one step: the end of each op or meeting, None until somebody needs it; how many members are to come."""
        if step == len(self.ends):
            last = self.ends[-1] if step else []
            over = [last[i] or self._new(last, i) for i in self.before] if step else [self.past] * len(self.before)
            self.ends.append([None] * self.count + over)
            self.missing.append(self.members.copy())
        return self.ends[step], self.missing[step]

    def _new(self, ends: list[_End | None], i: int) -> _End:
        end = ends[i] = _End(self.env)
        return end

    def _stream(self, queue: list[int]) -> Generator[Event, None, None]:
        """Ops one after the other: each ends its duration after its last member has come."""
        env, new, schedule, past = self.env, self._new, self.env.schedule, self.past
        waits, meeting, duration = self.waits, self.meeting, self.duration
        for step in range(self.steps):
            ends, missing = self._step(step)
            start, end = self.start[step], self.end[step]
            for i in queue:
                for w in waits[i]:
                    if (awaited := ends[w] or new(ends, w)).callbacks is not None:
                        yield awaited
                start[i] = env.now
                m = meeting[i]
                together = ends[m] or new(ends, m)
                missing[m] -= 1
                if not missing[m]:
                    schedule(together, NORMAL, duration[m])
                yield together
                end[i] = env.now
                ends[m] = past

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


def _meetings(plan: Plan, wire: Wire) -> IntArray:
    """For each op the least op that it must meet: its own, where it runs alone."""
    out = np.arange(len(plan))
    if wire is Wire.RENDEZVOUS:
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


def _deadlock(plan: Plan, found: Run) -> PiperError:
    """Where every stream stands, and what for."""
    lines = []
    for queue, (program, stream) in zip(plan.queues, plan.streams, strict=True):
        stuck = next(((s, i) for s in range(len(found.end)) for i in queue if found.end[s, i] < 0), None)
        if stuck is None:
            continue
        step, i = stuck
        lack = [plan.text(w) for w in plan.waits.row(i).tolist() if found.end[step, w] < 0]
        if found.start[step, i] >= 0:
            met = plan.collective == plan.collective[i]
            mates = [int(plan.partner[i])] if plan.partner[i] >= 0 else np.flatnonzero(met).tolist()
            lack = [f"{plan.text(j)} of rank {int(plan.program[j])}" for j in mates if found.start[step, j] < 0]
        lines.append(f"  rank {program} {stream} stands at {plan.text(i)}, which waits for {', '.join(lack)}")
    more = [f"  and {len(lines) - LINES} more"] if len(lines) > LINES else []
    return PiperError(ErrorKind.DEADLOCK, "no stream can move:\n" + "\n".join(lines[:LINES] + more))
