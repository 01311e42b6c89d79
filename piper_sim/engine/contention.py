"""The engine where ops in flight share a device and links: rates change when something starts or ends.

docs/ENGINE.md is the arithmetic, so that a second engine can agree to the last bit.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from simpy.events import NORMAL, Event, EventPriority

from ir.core.grid import GRID
from ir.core.order import FloatArray
from ir.plan.plan import OpKind
from piper_sim.engine.loop import EngineState, OpEnd, finish
from piper_sim.engine.scenario import EngineRun, EngineScenario, KernelInterference, Links

SETTLE = EventPriority(NORMAL + 1)  # behind everything else that happens at one time


def play(scenario: EngineScenario, duration: FloatArray, steps: int = 1) -> EngineRun:
    """Simulate `steps` repetitions of a scenario. duration: seconds of each op alone on an idle device.

    A transfer's duration is its send's, a collective's its longest member's; multiples of 2**-40 where rates change.
    Streams run on from one step into the next. Raises PiperError (deadlock) naming where every rank stands.
    """
    return finish((SharedEngine if scenario.shared else EngineState)(scenario, duration, steps))


class SharedOp:
    """Something that runs: seconds of it left at `since` if it were alone, and how fast it goes."""

    __slots__ = ("end", "left", "loads", "members", "op", "rate", "since", "turn")

    def __init__(self, op: int, left: float, members: list[int], loads: dict[int, float], end: OpEnd) -> None:
        self.op, self.left, self.members, self.loads, self.end = op, left, members, loads, end
        self.since, self.rate, self.turn = 0.0, 0.0, 0


class SharedEngine(EngineState):
    """Streams as in `loop`; durations as work that is done at the rate the device and the links allow."""

    def __init__(self, scenario: EngineScenario, duration: FloatArray, steps: int) -> None:
        super().__init__(scenario, duration, steps)
        plan, none = scenario.plan, np.zeros((1, 1))
        table = scenario.slow or KernelInterference(np.zeros(len(plan), dtype=np.int64), none, none, none)
        self.program = plan.program.tolist()
        self.compute = (plan.kind == OpKind.COMPUTE).tolist()
        self.kind = table.kind.tolist()
        self.held, self.moving, self.wire_table = table.held.tolist(), table.moving.tolist(), table.wire.tolist()
        classes = range(table.held.shape[1])
        self.n_held = [[0 for _ in classes] for _ in range(plan.programs)]
        self.n_moving = [[0 for _ in classes] for _ in range(plan.programs)]
        self.computing: list[list[int]] = [[0] * table.held.shape[0] for _ in range(plan.programs)]
        self.running: list[dict[int, SharedOp]] = [{} for _ in range(plan.programs)]
        self.touched: set[int] = set()
        self.mates: dict[int, list[int]] = {}
        for i, m in enumerate(self.meeting):
            self.mates.setdefault(m, []).append(i)
        self.loads = _Loads(scenario.links) if scenario.links else None
        self.users: dict[int, dict[int, SharedOp]] = {}
        self.loosened: set[int] = set()

    def _begin(self, i: int, m: int, end: OpEnd, complete: bool) -> None:
        if not self.compute[i]:
            self.n_held[self.program[i]][self.kind[i]] += 1
            self._touch(self.program[i])
        if complete:
            self._run(m, end)

    def _run(self, m: int, end: OpEnd) -> None:
        members = self.mates[m]
        work = SharedOp(m, self.duration[m], members, self.loads.of(members) if self.loads else {}, end)
        for i in members:
            p = self.program[i]
            (self.computing if self.compute[i] else self.n_moving)[p][self.kind[i]] += 1
            self.running[p][m] = work
            self._touch(p)
        if work.left == 0.0:
            work.loads = {}
            self._tick(work, 0.0)
        for r in work.loads:
            self.users.setdefault(r, {})[m] = work

    def _finish(self, work: SharedOp) -> None:
        for i in work.members:
            p = self.program[i]
            if self.compute[i]:
                self.computing[p][self.kind[i]] -= 1
            else:
                self.n_moving[p][self.kind[i]] -= 1
                self.n_held[p][self.kind[i]] -= 1
            del self.running[p][work.op]
            self._touch(p)
        for r in work.loads:
            del self.users[r][work.op]
            self.loosened.add(r)
        waiting, work.end.callbacks = work.end.callbacks, None  # type: ignore[assignment]  # it has happened, now
        for resume in waiting or ():
            resume(work.end)

    def _touch(self, p: int) -> None:
        """Program p's rates are to be looked at again, once nothing more happens at this time."""
        if not self.touched:
            settle = OpEnd(self.env)
            settle.callbacks.append(self._settle)
            self.env.schedule(settle, SETTLE)
        self.touched.add(p)

    def _settle(self, _: Event) -> None:
        affected = {m: w for p in self.touched for m, w in self.running[p].items()}
        self.touched.clear()
        bound = self._component([w for w in affected.values() if w.loads])
        flows = [bound[m] for m in sorted(bound)]
        for work, rate in zip(flows, fill([self._pace(w) for w in flows], [w.loads for w in flows]), strict=True):
            self._change(work, rate)
        for m in sorted(affected.keys() - bound.keys()):
            self._change(affected[m], self._pace(affected[m]))

    def _component(self, found: list[SharedOp]) -> dict[int, SharedOp]:
        """All work that shares links with what was touched, or with what left a link, directly or by others."""
        out = {w.op: w for w in found}
        links, self.loosened = self.loosened, set()
        links.update(r for w in found for r in w.loads)
        todo = list(links)
        while todo:
            for m, w in self.users.get(todo.pop(), {}).items():
                if m not in out:
                    out[m] = w
                    new = w.loads.keys() - links
                    links |= new
                    todo += new
        return out

    def _change(self, work: SharedOp, rate: float) -> None:
        """Note what has been done so far, if the rate differs from now on."""
        if rate == work.rate:
            return
        now = self.env.now
        done = round((now - work.since) * work.rate * GRID) / GRID
        work.left, work.since, work.rate = max(0.0, work.left - done), now, rate
        self._tick(work, round(work.left / rate * GRID) / GRID)

    def _tick(self, work: SharedOp, delay: float) -> None:
        """Its end, unless its rate changes before."""
        work.turn += 1
        turn, tick = work.turn, OpEnd(self.env)

        def ended(_: Event) -> None:
            if work.turn == turn:
                self._finish(work)

        tick.callbacks.append(ended)
        self.env.schedule(tick, NORMAL, delay)

    def _pace(self, work: SharedOp) -> float:
        return min(self._pace_of(i) for i in work.members)

    def _pace_of(self, i: int) -> float:
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


class _Loads:
    """The links that ops load."""

    def __init__(self, links: Links) -> None:
        self.row, self.at = links.row.tolist(), links.at.tolist()
        self.resource, self.load = links.resource.tolist(), links.load.tolist()

    def of(self, members: list[int]) -> dict[int, float]:
        """What a meeting loads, each link once."""
        out: dict[int, float] = {}
        for row in (self.row[i] for i in members):
            for e in range(self.at[row], self.at[row + 1]) if row >= 0 else ():
                out[self.resource[e]] = out.get(self.resource[e], 0.0) + self.load[e]
        return out


Loads = Mapping[int, float]


def fill(paces: Sequence[float], loads: Sequence[Loads]) -> list[float]:
    """Rates of meetings, given in the order of their least op. paces: their most; loads: link -> share at full speed.

    Two transfers on one link; the second could only ever take a quarter of it, or is slowed by something else:

    >>> fill([1.0, 1.0], [{0: 1.0}, {0: 1.0}])
    [0.5, 0.5]
    >>> fill([1.0, 1.0], [{0: 1.0}, {0: 0.25}])
    [0.75, 1.0]
    >>> fill([1.0, 0.25], [{0: 1.0}, {0: 1.0}])
    [0.75, 0.25]
    """
    rate: list[float | None] = [None] * len(paces)
    weight = [max(mine.values()) for mine in loads]
    most = [p * w for p, w in zip(paces, weight, strict=True)]
    users: dict[int, list[int]] = {}
    for f, mine in enumerate(loads):
        for r in mine:
            users.setdefault(r, []).append(f)
    while open_ := [f for f, x in enumerate(rate) if x is None]:
        wanted = dict.fromkeys(r for f in open_ for r in loads[f])
        level = {r: _level(r, users[r], rate, loads, weight) for r in wanted}
        t = min([*level.values(), *(most[f] for f in open_)])
        tight = {r for r, x in level.items() if x == t}
        for f in open_:
            if most[f] == t:
                rate[f] = paces[f]
            elif not tight.isdisjoint(loads[f]):
                rate[f] = min(paces[f], t / weight[f])
    return [x for x in rate if x is not None]


def _level(
    r: int, users: Sequence[int], rate: Sequence[float | None], loads: Sequence[Loads], weight: Sequence[float]
) -> float:
    """The bandwidth at which a link's unfrozen users fill what the frozen ones leave of it."""
    taken = wanted = 0.0
    for f in users:
        x = rate[f]
        if x is None:
            wanted += loads[f][r] / weight[f]
        else:
            taken += loads[f][r] * x
    return max(0.0, 1.0 - taken) / wanted
