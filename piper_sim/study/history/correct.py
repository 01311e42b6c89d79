"""A factor on predicted seconds, suggested only where it makes the runs that it was not taken from come out nearer."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, stdev

from ir.job import Job
from piper_sim.study.history.backtest import PredictionResidual, trait
from piper_sim.study.history.table import CLASS

LEAST = 3  # rows; and of a class, those that its own factor is taken from
SURE, SURER = 2.0, 3.0  # standard errors of the gain: of one factor; of a class's (many classes are tried)
WORTH = 0.1  # of the mean error


@dataclass(frozen=True)
class PredictionCorrection:
    """Predicted seconds are to be multiplied by their class's of `factors` where `by` names a column, else by `factor`.

    rows: it was taken from. before: median size of the errors as predicted. after: the same where each row is corrected
    by the others alone (leave-one-out).
    """

    factor: float
    rows: int
    before: float
    after: float
    by: str = ""
    factors: Mapping[str, float] = field(default_factory=dict)

    def of(self, job: Job) -> float:
        """The factor of a job."""
        return self.factors.get(trait(job, self.by), self.factor) if self.by else self.factor


def suggest(residuals: Sequence[PredictionResidual], columns: Sequence[str]) -> PredictionCorrection | None:
    """One factor for all, and on top of it factors for classes of the column that explains most; None of neither.

    Either counts only where rows, corrected by the others alone, come out nearer, by well more than their own scatter.
    Runs without seconds do not count.
    """
    timed = [r for r in residuals if r.time is not None]
    if len(timed) < LEAST:
        return None
    need = [-math.log1p(r.time or 0.0) for r in timed]  # log of measured / predicted
    rest = left_out(need)
    one = _gains(need, rest, SURE)
    rest = rest if one else need
    best = _Classes("", {}, rest)
    for column in columns:
        if column != CLASS:
            found = _classes(column, need, rest, [r.traits[column] for r in timed])
            if found.factors and fmean(map(abs, found.rest)) < fmean(map(abs, best.rest)):
                best = found
    if not one and not best.factors:
        return None
    before, after = (median(abs(math.expm1(-x)) for x in some) for some in (need, best.rest))
    factor = math.exp(median(need)) if one else 1.0
    return PredictionCorrection(factor, len(timed), before, after, best.column, best.factors)


@dataclass(frozen=True)
class _Classes:
    """Factors of those classes of a column that gain by one of their own. rest: what each row needs then."""

    column: str
    factors: dict[str, float]
    rest: Sequence[float]


def _classes(column: str, need: Sequence[float], rest: Sequence[float], values: Sequence[str]) -> _Classes:
    groups: dict[str, list[int]] = defaultdict(list)
    for i, v in enumerate(values):
        groups[v].append(i)
    factors, out = {}, list(rest)
    for value, rows in groups.items():
        own = [need[i] for i in rows]
        if len(rows) >= LEAST and _gains([rest[i] for i in rows], left := left_out(own), SURER):
            factors[value] = math.exp(median(own))
            for i, x in zip(rows, left, strict=True):
                out[i] = x
    return _Classes(column, factors, out)


def left_out(need: Sequence[float]) -> list[float]:
    """What each row still needs when corrected by the median of the others.

    >>> left_out([1.0, 1.0, 1.0, 5.0])
    [0.0, 0.0, 0.0, 4.0]
    """
    return [n - m for n, m in zip(need, _medians_without(need), strict=True)]


def _medians_without(numbers: Sequence[float]) -> list[float]:
    """For each number the median of the others.

    >>> _medians_without([1.0, 2.0, 9.0])
    [5.5, 5.0, 1.5]
    """
    order = sorted(range(len(numbers)), key=lambda i: numbers[i])
    rank = {i: k for k, i in enumerate(order)}
    low, high = (len(numbers) - 2) // 2, (len(numbers) - 1) // 2
    ranks = (rank[i] for i in range(len(numbers)))
    return [(numbers[order[low + (low >= k)]] + numbers[order[high + (high >= k)]]) / 2 for k in ranks]


def _gains(before: Sequence[float], after: Sequence[float], sure: float) -> bool:
    """Whether the errors shrink by enough, and by so many standard errors (more of them where rows are few)."""
    gain = [abs(b) - abs(a) for b, a in zip(before, after, strict=True)]
    error = stdev(gain) / math.sqrt(len(gain))
    few = 1 + (sure * sure + 1) / (4 * (len(gain) - 1))  # as Student's quantiles widen
    mean = fmean(gain)
    return mean > sure * few * error and mean >= WORTH * fmean(map(abs, before)) and mean > 1e-12
