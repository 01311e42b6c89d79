"""The engine where ops in flight share a device: rates change when something starts or ends.

The arithmetic is fixed by docs/ENGINE.md, so that a second engine can agree to the last bit.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from simpy.events import NORMAL, Event, EventPriority

from ir.order import FloatArray, IntArray
from ir.plan import OpKind, Plan
from piper_sim.engine.loop import Run, Wire, _End, _run, _World

GRID = 2.0**40
SETTLE = EventPriority(NORMAL + 1)  # behind everything else that happens at one time


@dataclass(frozen=True, eq=False)
class Interference:
    """Who slows whom, by op class. All entries are added slowdowns: 0.4 makes a kernel take 1.4 times as long.

    kind: [op] class, compute classes and communication classes each counted from 0.
    held: [compute class, communication class] while the communication kernel holds its SMs, from its post to its end.
    moving: the same, while it also moves bytes. wire: [communication class, compute class] on the message itself.
    """

    kind: IntArray
    held: FloatArray
    moving: FloatArray
    wire: FloatArray


def run_shared(
    plan: Plan, duration: FloatArray, interference: Interference, wire: Wire = Wire.RENDEZVOUS, steps: int = 1
) -> Run:
    """As `run`, with pairwise interference between what is in flight on one program's devices.

    duration: seconds of each op alone on its device, multiples of 2**-40. Transfers are rendezvous.
    """
    if wire is not Wire.RENDEZVOUS:
        raise ValueError("a buffered message holds nothing, so there is nothing to share")
    return _run(plan, _Shared(plan, duration, interference, steps))


class _Work:
    """Something that runs: seconds of it left at `since` if it were alone, and how fast it goes."""

    __slots__ = ("end", "left", "members", "op", "rate", "since", "turn")

    def __init__(self, op: int, left: float, members: list[int], end: _End) -> None:
        self.op, self.left, self.members, self.end = op, left, members, end
        self.since, self.rate, self.turn = 0.0, 0.0, 0


class _Shared(_World):
    """Streams as in `loop`; durations as work that is done at the rate the device allows."""

    def __init__(self, plan: Plan, duration: FloatArray, table: Interference, steps: int) -> None:
        super().__init__(plan, duration, Wire.RENDEZVOUS, steps)
        self.program = plan.program.tolist()
        self.compute = (plan.kind == OpKind.COMPUTE).tolist()
        self.kind = table.kind.tolist()
        self.held, self.moving, self.wire_table = table.held.tolist(), table.moving.tolist(), table.wire.tolist()
        classes = range(table.held.shape[1])
        self.n_held = [[0 for _ in classes] for _ in range(plan.programs)]
        self.n_moving = [[0 for _ in classes] for _ in range(plan.programs)]
        self.computing: list[list[int]] = [[0] * table.held.shape[0] for _ in range(plan.programs)]
        self.running: list[dict[int, _Work]] = [{} for _ in range(plan.programs)]
        self.touched: set[int] = set()
        self.mates: dict[int, list[int]] = {}
        for i, m in enumerate(self.meeting):
            self.mates.setdefault(m, []).append(i)

    def _stream(self, queue: list[int]) -> Generator[Event, None, None]:
        env, new, past = self.env, self._new, self.past
        for step in range(self.steps):
            ends, missing = self._step(step)
            start, end = self.start[step], self.end[step]
            for i in queue:
                for w in self.waits[i]:
                    if (awaited := ends[w] or new(ends, w)).callbacks is not None:
                        yield awaited
                start[i] = env.now
                m = self.meeting[i]
                together = ends[m] or new(ends, m)
                missing[m] -= 1
                if not self.compute[i]:
                    self.n_held[self.program[i]][self.kind[i]] += 1
                    self._touch(self.program[i])
                if not missing[m]:
                    self._begin(m, together)
                yield together
                end[i] = env.now
                ends[m] = past

    def _begin(self, m: int, end: _End) -> None:
        work = _Work(m, self.duration[m], self.mates[m], end)
        for i in work.members:
            p = self.program[i]
            (self.computing if self.compute[i] else self.n_moving)[p][self.kind[i]] += 1
            self.running[p][m] = work
            self._touch(p)
        if work.left == 0.0:
            self._tick(work, 0.0)

    def _finish(self, work: _Work) -> None:
        for i in work.members:
            p = self.program[i]
            if self.compute[i]:
                self.computing[p][self.kind[i]] -= 1
            else:
                self.n_moving[p][self.kind[i]] -= 1
                self.n_held[p][self.kind[i]] -= 1
            del self.running[p][work.op]
            self._touch(p)
        waiting, work.end.callbacks = work.end.callbacks, None  # type: ignore[assignment]  # it has happened, now
        for resume in waiting or ():
            resume(work.end)

    def _touch(self, p: int) -> None:
        """Program p's rates are to be looked at again, once nothing more happens at this time."""
        if not self.touched:
            settle = _End(self.env)
            settle.callbacks.append(self._settle)
            self.env.schedule(settle, SETTLE)
        self.touched.add(p)

    def _settle(self, _: Event) -> None:
        now = self.env.now
        affected = {m: w for p in self.touched for m, w in self.running[p].items()}
        self.touched.clear()
        for m in sorted(affected):
            work = affected[m]
            rate = self._rate(work)
            if rate == work.rate:
                continue
            done = round((now - work.since) * work.rate * GRID) / GRID
            work.left, work.since, work.rate = max(0.0, work.left - done), now, rate
            self._tick(work, round(work.left / rate * GRID) / GRID)

    def _tick(self, work: _Work, delay: float) -> None:
        """Its end, unless its rate changes before."""
        work.turn += 1
        turn, tick = work.turn, _End(self.env)

        def ended(_: Event) -> None:
            if work.turn == turn:
                self._finish(work)

        tick.callbacks.append(ended)
        self.env.schedule(tick, NORMAL, delay)

    def _rate(self, work: _Work) -> float:
        return min(self._rate_of(i) for i in work.members)

    def _rate_of(self, i: int) -> float:
        """1 / (1 + the sum over classes present on the op's program, in ascending order)."""
        p, k, slow = self.program[i], self.kind[i], 1.0
        if self.compute[i]:
            for c, n in enumerate(self.n_held[p]):
                if n:
                    slow += self.held[k][c]
            for c, n in enumerate(self.n_moving[p]):
                if n:
                    slow += self.moving[k][c]
        else:
            for a, n in enumerate(self.computing[p]):
                if n:
                    slow += self.wire_table[k][a]
        return 1.0 / slow
