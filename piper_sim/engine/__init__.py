"""Running a plan in simulated time: SimPy."""

from piper_sim.engine.loop import run
from piper_sim.engine.play import play
from piper_sim.engine.scenario import Host, Interference, Links, Run, Scenario, Wire
from piper_sim.engine.steady import steady

__all__ = ["Host", "Interference", "Links", "Run", "Scenario", "Wire", "play", "run", "steady"]
