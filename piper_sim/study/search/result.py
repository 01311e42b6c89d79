"""What a search found: the best, the front, and why everything else is not there."""

import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property

from ir.core.errors import PiperError
from ir.job import Job
from ir.job.table import job_toml
from piper_sim.pricing.prepare import hardware_of
from piper_sim.study.inputs import named_files
from piper_sim.study.predict import planned
from piper_sim.study.search.evaluate import JobRefusal, RejectedJob
from piper_sim.study.search.space import Changes, replaced
from piper_sim.study.simulate import Object, less_measured

MOST_REJECTED = 1000


@dataclass(frozen=True, eq=False)
class JobSearchResult:
    """What was found. best, pareto: `simulate`'s objects with `changes`; nearest: where nothing fits, what lacks least.

    all_rejected: each with its reason; the JSON object has the first 1,000 and the counts. space: configurations;
    evaluated: those simulated. proven: none that is left could be the best; pareto_proven: nor on the front.
    seconds: of all; first_s, proven_s: when the first that fits was known, and the best proven; None if never.
    """

    job: Job
    best: Object | None = field(repr=False)
    nearest: Object | None = field(repr=False)
    pareto: list[Object] = field(repr=False)
    all_rejected: list[RejectedJob] = field(repr=False)
    evaluated: int
    space: int
    proven: bool
    pareto_proven: bool
    seconds: float
    first_s: float | None
    proven_s: float | None

    def to_dict(self) -> Object:
        """The object of `piper-sim search`."""
        keys = ("best", "pareto", "evaluated", "space", "proven", "pareto_proven", "seconds", "first_s", "proven_s")
        out: Object = {"schema_version": 1} | {k: getattr(self, k) for k in keys}
        out["rejected"] = [r.to_dict() for r in self.all_rejected[:MOST_REJECTED]]
        counts = Counter(r.kind for r in self.all_rejected)
        out["rejected_counts"] = {str(k): counts[k] for k in JobRefusal}
        out["objective"] = self.objective
        out["warnings"] = self.warnings
        if self.best is None:
            said = "nothing fits" if self.proven else "the budget ran out before anything was found that fits"
            out |= {"fits": False, "nearest": self.nearest, "reason": said + self._why()}
        return deepcopy(out)

    def _why(self) -> str:
        """What is nearest to a fit, or why most cannot even be built."""
        if self.nearest is not None:
            return f"; what lacks least: {self.nearest['reason']}"
        whys = Counter(r.reason for r in self.all_rejected if r.kind is JobRefusal.ILLEGAL).most_common(1)
        return "".join(f"; most often ({n} of {self.space}): {why}" for why, n in whys)

    @cached_property
    def warnings(self) -> list[str]:
        """That the best is the best by what a profile has not measured of it."""
        if self.best is None or self.job.costs.profile is None:
            return []
        with suppress(PiperError):  # the job itself need not be one that can be built
            own, best = planned(self.job, hardware_of(self.job)).sources.shares, self.best["cost_shares"]
            if less_measured(best, own):
                said = f"{best['modelled']:.0%} of the best's seconds are modelled, {own['modelled']:.0%} of the job's"
                return [f"{said}: costs.profile may have to measure its sizes, too, before the two can be compared"]
        return []

    @property
    def objective(self) -> Object:
        """What was asked for, and the best's: GPUs and global batch are the job's, so one order serves all."""
        name, best = self.job.search.objective, self.best
        price = self.job.cluster.price
        value = None
        if best is not None:
            per_gpu = best["tokens_per_s_per_gpu"]
            dear = 1e6 * (price or 0.0) / 3600 / per_gpu  # of a million tokens
            value = {"iteration": best["iteration_s"], "tokens_per_gpu": per_gpu, "cost": dear}[name]
        return {"name": name, "value": value}


def front(points: Iterable[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    """The (seconds, bytes, number) that none beats in one and equals in the other; of equals the first.

    >>> front([(2.0, 5, 0), (1.0, 9, 1), (2.0, 5, 2), (3.0, 6, 3)])
    [(1.0, 9, 1), (2.0, 5, 0)]
    """
    out: list[tuple[float, float, int]] = []
    for t, m, number in sorted(points):
        if not out or m < out[-1][1]:
            out.append((t, m, number))
    return out


def said(changes: Changes) -> str:
    """Changes in a line."""
    return ", ".join(f"{k} = {v}" for k, v in changes.items()) or "the job itself"


def winner_toml(found: JobSearchResult, folder: str) -> str:
    """The text of a job file in a folder that simulates to `found.best`. `[search]` is left out: it has been done."""
    assert found.best is not None
    job = found.job
    job = replace(replaced(job, found.best["changes"]), search=type(job.search)())
    for key, file in named_files(job).items():
        section, name = key.split(".")
        here = os.path.relpath(file.path, folder) + file.function
        job = replace(job, **{section: replace(getattr(job, section), **{name: here})})
    return job_toml(job)
