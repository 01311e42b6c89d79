"""Which strategy a job should run: every configuration simulated, or excluded by a bound that cannot be wrong."""

from piper_sim.study.search.evaluate import JobLimits
from piper_sim.study.search.result import JobSearchResult
from piper_sim.study.search.search import search

__all__ = ["JobLimits", "JobSearchResult", "search"]
