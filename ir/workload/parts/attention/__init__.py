"""Attention: its projections, its core, what surrounds it; ordinary heads, latent ones, and another sequence's keys."""
