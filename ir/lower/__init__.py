"""From graph and orders to a plan: sequences, templates, stamping, messages, waits, frees."""

from ir.lower.lower import lower
from ir.lower.policy import P2P, Merge, Policy

__all__ = ["P2P", "Merge", "Policy", "lower"]
