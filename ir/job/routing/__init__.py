"""Which experts tokens go to, as a job says it: counts by layer, microbatch, source, expert; both engines read them."""

from ir.job.routing.counts import ExpertCounts, ExpertLayer, moe_layers
from ir.job.routing.described import check_routing, counts_of

__all__ = ["ExpertCounts", "ExpertLayer", "check_routing", "counts_of", "moe_layers"]
