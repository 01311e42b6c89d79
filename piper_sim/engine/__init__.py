"""Running a plan in simulated time: SimPy."""

from piper_sim.engine.contention import play
from piper_sim.engine.loop import run
from piper_sim.engine.scenario import EngineRun, EngineScenario, HostModel, KernelInterference, Links, MessageMode

__all__ = [
    "EngineRun",
    "EngineScenario",
    "HostModel",
    "KernelInterference",
    "Links",
    "MessageMode",
    "play",
    "run",
]
