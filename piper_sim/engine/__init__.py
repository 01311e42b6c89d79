"""Running a plan in simulated time."""

from piper_sim.engine.loop import Run, Wire, run
from piper_sim.engine.steady import steady

__all__ = ["Run", "Wire", "run", "steady"]
