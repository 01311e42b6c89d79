"""Which strategy a job should run: every configuration simulated, or excluded by a bound that cannot be wrong."""

from piper_sim.study.search.evaluate import JobLimits
from piper_sim.study.search.search import JobSearchResult, search

__all__ = ["JobLimits", "JobSearchResult", "search"]
