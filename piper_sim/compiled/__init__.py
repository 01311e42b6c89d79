"""The compiled twin: what the SimPy engine computes, bit for bit, from loops of its own."""

from piper_sim.compiled.events import event_loop, play
from piper_sim.compiled.path import longest_path
from piper_sim.compiled.structure import CompiledEngine

__all__ = ["CompiledEngine", "event_loop", "longest_path", "play"]
