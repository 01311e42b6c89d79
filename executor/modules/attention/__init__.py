"""Attention of the reference decoder: heads, latent attention, context parallelism."""
