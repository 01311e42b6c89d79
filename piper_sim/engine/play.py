"""The SimPy engine's door: a scenario and durations to a run."""

from __future__ import annotations

from ir.core.order import FloatArray
from piper_sim.engine.contention import SharedEngine
from piper_sim.engine.loop import EngineState, finish
from piper_sim.engine.scenario import EngineRun, EngineScenario


def play(scenario: EngineScenario, duration: FloatArray, steps: int = 1) -> EngineRun:
    """Simulate `steps` repetitions of a scenario. duration: seconds of each op alone on an idle device.

    A transfer's duration is its send's, a collective's its longest member's; multiples of 2**-40 where rates change.
    Streams run on from one step into the next. Raises PiperError (deadlock) naming where every rank stands.
    """
    return finish((SharedEngine if scenario.shared else EngineState)(scenario, duration, steps))
