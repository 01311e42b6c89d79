"""Uneven routing: tokens by layer, microbatch, source and expert, and the seconds and bytes they make on each rank."""

from piper_sim.routing.counts import Counts, MoeLayer, counts_of, moe_layers
from piper_sim.routing.keys import check_routing
from piper_sim.routing.model import Routing, Sizes, routing_of
from piper_sim.routing.reprice import reprice

__all__ = [
    "Counts",
    "MoeLayer",
    "Routing",
    "Sizes",
    "check_routing",
    "counts_of",
    "moe_layers",
    "reprice",
    "routing_of",
]
