"""The compiled twin: what the SimPy engine computes, bit for bit, from loops of its own."""

from piper_sim.twin.compiled import Compiled
from piper_sim.twin.events import event_loop
from piper_sim.twin.path import longest_path, step_ends
from piper_sim.twin.play import play

__all__ = ["Compiled", "event_loop", "longest_path", "play", "step_ends"]
