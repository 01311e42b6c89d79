"""From graph and orders to a plan: sequences, templates, stamping, messages, waits, frees."""

from ir.lower.lower import lower
from ir.lower.policy import ExpertOverlap, MessageQueue, PassMerge, PlanPolicy

__all__ = ["ExpertOverlap", "MessageQueue", "PassMerge", "PlanPolicy", "lower"]
