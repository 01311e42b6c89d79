"""Mixture of experts of the reference decoder: on one rank, or spread over ranks."""
