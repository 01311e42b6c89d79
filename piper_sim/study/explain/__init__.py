"""Why a step takes as long as it does."""

from piper_sim.study.explain.explanation import StepExplanation, explain, explained
from piper_sim.study.explain.what_if import JobChange

__all__ = ["JobChange", "StepExplanation", "explain", "explained"]
