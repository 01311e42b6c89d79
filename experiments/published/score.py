"""Rows to errors: each predicted once, its failure kept where it has one."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

from experiments.published.rows import FULLEST, Row, Table
from ir.core.errors import PiperError
from ir.job import Job
from ir.job.load import job_from
from piper_sim.pricing.prepare import hardware_of, prepare_priced
from piper_sim.study.history.show import PredictionErrors
from piper_sim.study.planned import PlannedJob, fits
from piper_sim.study.predict import predict
from piper_sim.study.prediction import Prediction
from piper_sim.study.simulate import traits
from piper_sim.study.sure import PredictionTraits

__all__ = ["Change", "PredictionErrors", "Score", "Table", "memories", "scored", "scores", "times"]

Change = Callable[[Table], Table]
Each = Callable[[Callable[[Row], "Score"], Iterable[Row]], Iterable["Score"]]


@dataclass(frozen=True)
class Score:
    """A row and its errors, predicted / measured - 1. failure: why there is no prediction.

    memory: by pipeline rank, or of the fullest. fits: whether the run that ran is said to fit. split: key of the
    breakdown -> share of the step, mean over pipeline ranks. traits: what the run is like.
    """

    row: Row
    time: float | None = None
    memory: Mapping[int, float] | None = None
    failure: str = ""
    fits: bool | None = None
    predicted_s: float | None = None
    split: Mapping[str, float] | None = None
    traits: PredictionTraits | None = None


def scores(rows: Iterable[Row], change: Change | None = None, each: Each = map) -> Iterator[Score]:
    """Predict each row that can be; `change` alters every job first (controls of time: failed runs are left out).

    each: `map`, or that of a pool of processes.
    """
    return iter(each(partial(_changed, change=change), (r for r in rows if not (r.failed and change is not None))))


def _changed(row: Row, change: Change | None) -> Score:
    if row.job is None:
        return Score(row, failure="")
    table = deepcopy(row.job)
    return scored(row, table if change is None else change(table))


def scored(row: Row, table: Table) -> Score:
    """One row's errors."""
    try:
        job: Job = job_from(table, file=row.name)
        if row.failed:
            hardware = hardware_of(job)
            return Score(row, fits=fits(PlannedJob.of(prepare_priced(job, hardware), hardware)))
        p = predict(job)
    except PiperError as e:
        return Score(row, failure=str(e).splitlines()[0])
    time = None if row.seconds is None else p.iteration_s / row.seconds - 1
    return Score(row, time, _memory(row, p), "", fits(p.planned), p.iteration_s, _split(p), traits(p.planned, p.times))


def _memory(row: Row, p: Prediction) -> dict[int, float]:
    peak = p.planned.memory.peak
    return {r: int(peak.max() if r == FULLEST else peak[r]) / b - 1 for r, b in row.memory.items()}


def _split(p: Prediction) -> dict[str, float]:
    ranks = p.times.seconds
    return {k: sum(r[k] for r in ranks) / len(ranks) / p.iteration_s for k in ranks[0]}


def times(found: Iterable[Score]) -> list[float]:
    """Errors of step times."""
    return [s.time for s in found if s.time is not None]


def memories(found: Iterable[Score]) -> list[float]:
    """Errors of peaks, all ranks."""
    return [e for s in found for e in (s.memory or {}).values()]
