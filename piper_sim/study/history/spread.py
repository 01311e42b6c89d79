"""How errors lie: how many, median, 90th percentile and worst of their sizes, and on which side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class PredictionErrors:
    """Of some errors: how many, and median, 90th percentile and worst of their sizes; sign: the median error."""

    n: int
    median: float
    p90: float
    worst: float
    sign: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> PredictionErrors | None:
        """None of none.

        >>> PredictionErrors.of([-0.1, 0.2, 0.3])
        PredictionErrors(n=3, median=0.2, p90=0.3, worst=0.3, sign=0.2)
        """
        if not errors:
            return None
        sizes = sorted(abs(e) for e in errors)
        p90 = sizes[-(-9 * len(sizes) // 10) - 1]
        return cls(len(errors), median(sizes), p90, sizes[-1], median(errors))
