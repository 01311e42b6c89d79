"""The SimPy engine: one process per program and stream; ops in order inside a stream, streams side by side.

An op starts when it heads its stream and what it waits for has ended. Transfers and collectives that span programs
start when their last member has come. One event per op or transfer; processes exist only for streams.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import simpy
from simpy.events import NORMAL, Event

from ir.errors import ErrorKind, PiperError
from ir.order import FloatArray
from ir.plan import OpKind, Plan


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
    if world.finished < len(plan) * steps:
        raise world.deadlock()
    shape = (steps, len(plan))
    return Run(np.array(world.start).reshape(shape), np.array(world.end).reshape(shape))


class _World:
    """All state of one run: plain lists, because the processes touch them a million times."""

    def __init__(self, plan: Plan, duration: FloatArray, wire: Wire, steps: int) -> None:
        self.plan, self.wire, self.steps = plan, wire, steps
        self.env = simpy.Environment()
        self.count = len(plan)
        self.duration = np.asarray(duration, dtype=np.float64).tolist()
        at, items = plan.waits.at.tolist(), plan.waits.items.tolist()
        self.waits = [items[a:b] if a != b else () for a, b in zip(at, at[1:], strict=False)]
        self.start = [-1.0] * (self.count * steps)
        self.end = [-1.0] * (self.count * steps)
        self.finished = 0
        self.partner = plan.partner.tolist()
        self.collective = plan.collective.tolist()
        self.size = np.bincount(plan.collective[plan.collective >= 0]).tolist()
        self.events: list[list[Event]] = []
        self.arrived: list[list[int]] = []
        kinds = plan.kind.tolist()
        for queue in plan.queues:
            self.env.process(self._stream(queue, kinds))

    def _step(self, step: int) -> list[Event]:
        """The events of one step: one per op, shared by the two ends of a transfer and by a collective's members."""
        if step == len(self.events):
            env = self.env
            events = [Event(env) for _ in range(self.count)]
            for i, j in enumerate(self.partner):
                if 0 <= j < i:
                    events[i] = events[j]
            first: dict[int, int] = {}
            for i, c in enumerate(self.collective):
                if c >= 0:
                    events[i] = events[first.setdefault(c, i)]
            self.events.append(events)
            self.arrived.append([0] * (self.count + len(self.size)))
        return self.events[step]

    def _stream(self, queue: list[int], kinds: list[int]) -> Generator[Event, None, None]:
        env, duration, waits, partner, collective = self.env, self.duration, self.waits, self.partner, self.collective
        schedule = env.schedule
        start, end = self.start, self.end
        compute, send = int(OpKind.COMPUTE), int(OpKind.SEND)
        buffered = self.wire is Wire.BUFFERED
        for step in range(self.steps):
            done = self._step(step)
            arrived = self.arrived[step]
            base = step * self.count
            for i in queue:
                for w in waits[i]:
                    if done[w].callbacks is not None:
                        yield done[w]
                event = done[i]
                now = start[base + i] = env.now
                if kinds[i] == compute:
                    event._ok, event._value = True, None
                    schedule(event, NORMAL, duration[i])
                elif partner[i] >= 0:
                    if buffered:
                        if kinds[i] == send:
                            end[base + i] = now + duration[i]
                            self.finished += 1
                            event._ok, event._value = True, None
                            schedule(event, NORMAL, duration[i])
                            continue
                    elif arrived[partner[i]]:
                        event._ok, event._value = True, None
                        schedule(event, NORMAL, duration[i])
                    else:
                        arrived[i] = 1
                else:
                    c = collective[i]
                    slot = self.count + c
                    if c >= 0:
                        arrived[slot] += 1
                    if c < 0 or arrived[slot] == self.size[c]:
                        event._ok, event._value = True, None
                        schedule(event, NORMAL, duration[i])
                if event.callbacks is not None:
                    yield event
                end[base + i] = env.now
                self.finished += 1

    def deadlock(self) -> PiperError:
        """Where every program stands, and what for."""
        plan, lines = self.plan, []
        for q, (program, stream) in zip(plan.queues, plan.streams, strict=True):
            for step in range(len(self.events)):
                stuck = next((i for i in q if self.end[step * self.count + i] < 0), None)
                if stuck is None:
                    continue
                lack = [plan.text(w) for w in self.waits[stuck] if self.events[step][w].callbacks is not None]
                if self.start[step * self.count + stuck] >= 0:
                    peer = self.partner[stuck]
                    lack = [f"{plan.text(peer)} of rank {int(plan.program[peer])}" if peer >= 0 else "its other members"]
                lines.append(f"  rank {program} {stream} stands at {plan.text(stuck)}, which waits for {', '.join(lack)}")
                break
        return PiperError(ErrorKind.DEADLOCK, "no stream can move:\n" + "\n".join(lines[:40]))
