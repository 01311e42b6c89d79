"""Equal replicas are simulated once: which ones are equal, and a plan unfolded to those that are not."""

from piper_sim.folding.classes import Classes, classes
from piper_sim.folding.ground import Ground, Seat, Spread
from piper_sim.folding.unfold import carry, replica, unfold

__all__ = ["Classes", "Ground", "Seat", "Spread", "carry", "classes", "replica", "unfold"]
