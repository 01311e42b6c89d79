"""The SimPy engine's door: a scenario and durations to a run."""

from __future__ import annotations

from ir.core.order import FloatArray
from piper_sim.engine.contention import SharedWorld
from piper_sim.engine.loop import World, finish
from piper_sim.engine.scenario import Run, Scenario


def play(scenario: Scenario, duration: FloatArray, steps: int = 1) -> Run:
    """Simulate `steps` repetitions of a scenario. duration: seconds of each op alone on an idle device.

    A transfer's duration is its send's, a collective's its longest member's; multiples of 2**-40 where rates change.
    Streams run on from one step into the next. Raises PiperError (deadlock) naming where every rank stands.
    """
    return finish((SharedWorld if scenario.shared else World)(scenario, duration, steps))
