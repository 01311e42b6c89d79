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

import numpy as np
import simpy
from simpy.events import NORMAL, Event

from ir.errors import ErrorKind, PiperError
from ir.order import FloatArray, IntArray
from ir.plan import OpKind, Plan

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

    Streams run on from one step into the next; an op of the next step waits only for what its own step posts.
    Raises PiperError (deadlock) naming where every rank stands.
    """
    world = _World(plan, duration, wire, steps)
    was = gc.isenabled()
    gc.disable()  # a million short-lived events, no cycles: collection would only cost
    try:
        world.env.run()
    finally:
        if was:
            gc.enable()
    shape = (steps, len(plan))
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
        self.wire, self.steps, self.count = wire, steps, len(plan)
        self.env = simpy.Environment()
        meeting = _meetings(plan, wire)
        self.members = np.bincount(meeting, minlength=len(plan)).tolist()
        seconds = _durations(plan, np.asarray(duration, dtype=np.float64), meeting)[meeting]
        at, items = plan.waits.at, meeting[plan.waits.items]
        self.start = [array("d", bytes(8 * self.count)) for _ in range(steps)]
        self.end = [array("d", bytes(8 * self.count)) for _ in range(steps)]
        self.past = _End(self.env)
        self.past.callbacks = None  # type: ignore[assignment]
        self.ends: list[list[_End | None]] = []
        self.missing: list[list[int]] = []
        self.done = 0
        first = at[:-1]
        for queue in plan.queues:
            rows = np.array(queue)
            counts = np.diff(at)[rows]
            cuts = np.cumsum(counts).tolist()
            own = items[np.repeat(first[rows] - np.cumsum(counts) + counts, counts) + np.arange(int(counts.sum()))].tolist()
            needs = [own[a:b] if a != b else () for a, b in zip([0, *cuts], cuts, strict=False)]
            columns = [queue, needs, meeting[rows].tolist(), seconds[rows].tolist(), plan.kind[rows].tolist(), plan.partner[rows].tolist()]
            self.env.process(self._stream(columns))

    def _step(self, step: int) -> tuple[list[_End | None], list[int]]:
        """Of one step: the end of each op or meeting, made by who needs it first; how many members are yet to come."""
        if step == len(self.ends):
            self.ends.append([None] * self.count)
            self.missing.append(self.members.copy())
        return self.ends[step], self.missing[step]

    def _stream(self, columns: list) -> Generator[Event, None, None]:
        env, schedule, past = self.env, self.env.schedule, self.past
        buffered, send, recv, compute = self.wire is Wire.BUFFERED, OpKind.SEND, OpKind.RECV, OpKind.COMPUTE
        for step in range(self.steps):
            ends, missing = self._step(step)
            start, end = self.start[step], self.end[step]
            for i, needs, m, seconds, kind, partner in zip(*columns):
                for w in needs:
                    awaited = ends[w]
                    if awaited is None:
                        awaited = ends[w] = _End(env)
                    if awaited.callbacks is not None:
                        yield awaited
                now = start[i] = env.now
                mine = ends[m]
                if buffered and kind == recv:
                    message = ends[partner]
                    if message is None:
                        message = ends[partner] = _End(env)
                    if message.callbacks is not None:
                        if mine is None:
                            mine = ends[i] = message
                        yield message
                    end[i] = env.now
                    if mine is None:
                        ends[i] = past
                    elif mine is not message:
                        schedule(mine)
                    continue
                if mine is None:
                    mine = ends[m] = _End(env)
                if kind == compute:
                    schedule(mine, NORMAL, seconds)
                else:
                    missing[m] -= 1
                    if not missing[m]:
                        schedule(mine, NORMAL, seconds)
                    if buffered and kind == send:
                        end[i] = now + seconds
                        continue
                yield mine
                end[i] = env.now
                ends[m] = past


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
            mates = [int(plan.partner[i])] if plan.partner[i] >= 0 else np.flatnonzero(plan.collective == plan.collective[i])
            lack = [f"{plan.text(j)} of rank {int(plan.program[j])}" for j in mates if found.start[step, j] < 0]
        lines.append(f"  rank {program} {stream} stands at {plan.text(i)}, which waits for {', '.join(lack)}")
    more = [f"  and {len(lines) - LINES} more"] if len(lines) > LINES else []
    return PiperError(ErrorKind.DEADLOCK, "no stream can move:\n" + "\n".join(lines[:LINES] + more))
