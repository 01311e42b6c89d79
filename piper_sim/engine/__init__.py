"""Running a plan in simulated time."""

from piper_sim.engine.loop import Run, Wire, run

__all__ = ["Run", "Wire", "run"]
