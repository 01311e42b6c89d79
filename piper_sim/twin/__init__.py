"""The compiled twin: what the SimPy engine computes, bit for bit, from a loop of its own."""

from piper_sim.twin.choose import choose
from piper_sim.twin.compiled import Compiled
from piper_sim.twin.events import event_loop
from piper_sim.twin.path import longest_path, step_ends

__all__ = ["Compiled", "choose", "event_loop", "longest_path", "step_ends"]
