"""The step that repeats: simulate until everything that a step starts from has moved by one and the same time."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ir.core.order import FloatArray, IntArray
from piper_sim.engine.play import play
from piper_sim.engine.scenario import EngineRun, EngineScenario

MAX_STEPS = 24


class Engine(Protocol):
    """Either engine's `play`."""

    def __call__(self, scenario: EngineScenario, duration: FloatArray, steps: int = 1) -> EngineRun:
        """Simulate some steps."""
        ...


def steady(
    scenario: EngineScenario, duration: FloatArray, clipped: bool, engine: Engine = play
) -> tuple[EngineRun, int]:
    """The last two steps of a run long enough that further steps only repeat the last; and how many were simulated.

    A step starts from the ends of its streams' last ops, of what is carried over and of what hosts wait for, and from
    each host's last dispatch. Once all of these have moved by one time, every later step is this one, shifted: times
    are multiples of 2**-40, so shifting them changes no bit. With clipping and no host, all ranks meet in every step
    and nothing but that meeting's time matters behind it, so the second step is already the one that repeats.
    """
    if clipped and scenario.host is None:
        return engine(scenario, duration, 2), 2
    ends, posts = _state(scenario)
    steps = 3
    while True:
        ran = engine(scenario, duration, steps)
        moved = (ran.end[-1] - ran.end[-2])[ends]
        if ran.post is not None:
            moved = np.append(moved, (ran.post[-1] - ran.post[-2])[posts])
        if np.ptp(moved) == 0 or steps >= MAX_STEPS:
            return ran.last(2), steps
        steps *= 2


def _state(scenario: EngineScenario) -> tuple[IntArray, IntArray]:
    """What a step leaves to the next: (ops whose end counts, ops whose dispatch does)."""
    plan, host = scenario.plan, scenario.host
    ends = [np.array([queue[-1] for queue in plan.queues]), scenario.before]
    if host is not None:
        ends.append(host.hold.items[host.hold.items >= len(plan)] - len(plan))
    return np.unique(np.concatenate(ends)), plan.bounds[1:] - 1
