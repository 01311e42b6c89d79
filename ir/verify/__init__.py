"""The complete rules: what a plan must satisfy before anything runs it."""

from ir.verify.check import check_plan

__all__ = ["check_plan"]
