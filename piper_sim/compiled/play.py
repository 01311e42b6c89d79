"""The twin's door: what `piper_sim.engine.play` returns, from the faster kernel that is still exact."""

from ir.core.order import FloatArray
from piper_sim.compiled.events import event_loop
from piper_sim.compiled.path import longest_path
from piper_sim.engine.scenario import EngineRun, EngineScenario


def play(scenario: EngineScenario, duration: FloatArray, steps: int = 1) -> EngineRun:
    """Longest path where nothing is shared, else the event loop."""
    return (event_loop if scenario.shared else longest_path)(scenario, duration, steps)
