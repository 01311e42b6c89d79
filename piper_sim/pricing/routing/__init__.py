"""Uneven routing: the seconds and bytes that tokens by layer, microbatch, source and expert make on each rank."""

from piper_sim.pricing.routing.model import ExpertRouting, ExpertSizes, routing_of
from piper_sim.pricing.routing.uneven import price

__all__ = ["ExpertRouting", "ExpertSizes", "price", "routing_of"]
