"""Which engine runs a scenario: the faster of two that agree to the last bit."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from ir.core.order import FloatArray
from piper_sim import engine
from piper_sim.engine import EngineRun, EngineScenario

# Measured on two slow cores (experiments/engine_speed.py), seconds: SimPy per op, alone and where rates change;
# importing numba and loading the twin's machine code.
SIMPY_S = 1.8e-6
SIMPY_SHARED_S = 11e-6
TWIN_LOAD_S = 0.7
TWIN_LOADED_S = 0.005  # a structure of a thousand ops, built


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
