"""A scenario run to the step that repeats, by the faster of two engines that agree to the last bit."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np

from ir.core.order import FloatArray, IntArray
from piper_sim import engine
from piper_sim.engine import EngineRun, EngineScenario

# Measured on two slow cores (experiments/engine_speed.py), seconds: SimPy per op, alone and where rates change;
# importing numba and loading the twin's machine code.
SIMPY_S = 1.8e-6
SIMPY_SHARED_S = 11e-6
TWIN_LOAD_S = 0.7
TWIN_LOADED_S = 0.005  # a structure of a thousand ops, built
TRIED = 2, 3, 6, 12, 24  # steps simulated, until they repeat


def play(scenario: EngineScenario, duration: FloatArray, steps: int = 1) -> EngineRun:
    """Simulate with SimPy where that is quicker than loading the compiled twin, or where numba is missing."""
    if twin_pays(len(scenario.plan) * steps, scenario.shared):
        from piper_sim import compiled

        return compiled.play(scenario, duration, steps)
    return engine.play(scenario, duration, steps)


def twin_pays(ops: int, shared: bool) -> bool:
    """Whether SimPy would take longer than the twin takes to load, if it is not here already.

    >>> twin_pays(0, shared=True)
    False
    """
    load_s = TWIN_LOADED_S if _loaded() else TWIN_LOAD_S
    return ops * (SIMPY_SHARED_S if shared else SIMPY_S) > load_s and find_spec("numba") is not None


def _loaded() -> bool:
    return "piper_sim.compiled.events" in sys.modules


def steady(
    scenario: EngineScenario, duration: FloatArray, clipped: bool, tried: Sequence[int] = TRIED[1:]
) -> tuple[EngineRun, int]:
    """The last two steps of a run long enough that further steps only repeat the last; and how many were simulated.

    A step starts from the ends of its streams' last ops, of what is carried over and of what hosts wait for, and from
    each host's last dispatch. Once all of these have moved by one time, every later step is this one, shifted: times
    are multiples of 2**-40, so shifting them changes no bit. With clipping and no host, all ranks meet in every step
    and nothing but that meeting's time matters behind it, so the second step is already the one that repeats.

    tried: how many steps, one after the other. Two are enough for the period: if the second leaves what the first did,
    shifted, so does the third. Only the third can be looked at, since the one before it is no first step.
    """
    if clipped and scenario.host is None:
        return play(scenario, duration, 2), 2
    for steps in tried:
        ran = play(scenario, duration, steps)
        if _repeats(scenario, ran):
            break
    return ran.last(2), steps


def _repeats(scenario: EngineScenario, ran: EngineRun) -> bool:
    """Whether all that the last step left has moved by one time since the step before."""
    ends, posts = _state(scenario)
    moved = (ran.end[-1] - ran.end[-2])[ends]
    if ran.post is not None:
        moved = np.append(moved, (ran.post[-1] - ran.post[-2])[posts])
    return bool(np.ptp(moved) == 0)


def _state(scenario: EngineScenario) -> tuple[IntArray, IntArray]:
    """What a step leaves to the next: (ops whose end counts, ops whose dispatch does)."""
    plan, host = scenario.plan, scenario.host
    counts = np.zeros(len(plan), dtype=np.bool_)
    counts[[queue[-1] for queue in plan.queues]] = True
    counts[scenario.before] = True
    if host is not None:
        counts[host.hold.items[host.hold.items >= len(plan)] - len(plan)] = True
    return np.flatnonzero(counts), plan.bounds[1:] - 1
