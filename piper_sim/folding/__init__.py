"""Equal replicas are simulated once: which ones are equal, and a plan unfolded to those that are not."""

from piper_sim.folding.classes import RankClasses, classes
from piper_sim.folding.ground import DevicePlacement, RankSlot, RankSpread
from piper_sim.folding.unfold import carry, replica, unfold

__all__ = ["DevicePlacement", "RankClasses", "RankSlot", "RankSpread", "carry", "classes", "replica", "unfold"]
