"""The compiled twin: what the SimPy engine computes, bit for bit, from loops of its own."""

from piper_sim.compiled.events import event_loop, play
from piper_sim.compiled.path import CompiledEngine, longest_path

__all__ = ["CompiledEngine", "event_loop", "longest_path", "play"]
