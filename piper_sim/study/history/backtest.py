"""Past runs predicted as any job is, and how far off each prediction is."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ir.core.errors import ErrorKind, PiperError, job_error
from ir.core.files import named_path
from ir.job import Job
from ir.job.build import DEFAULT_SCHEDULE, resolve
from ir.job.load import job_from
from ir.job.schema import JobHistory
from ir.job.table import table_of, value_of
from ir.schedules.registry import canonical
from piper_sim.pricing.prepare import hardware_of
from piper_sim.study.history.table import CLASS, PastStep, read_runs
from piper_sim.study.predict import predict
from piper_sim.study.simulate import job_digest


@dataclass(frozen=True)
class PredictionResidual:
    """A past run and its prediction. time, memory: predicted / measured - 1, None where that was not measured.

    fits: as predicted, whatever came of the run. traits: column -> what the run's job says there.
    """

    run: PastStep
    predicted_s: float
    time: float | None
    memory: float | None
    fits: bool
    traits: dict[str, str]


@dataclass(frozen=True)
class PredictionBacktest:
    """All past runs of a job. columns: those that tell runs apart, the user's `class` first."""

    file: str
    residuals: tuple[PredictionResidual, ...]
    columns: tuple[str, ...]


def backtest(job: Job) -> PredictionBacktest | None:
    """Predict every past run of `[history]`; None where a job has none. Raises PiperError: a row cannot be built."""
    if job.history.file is None:
        if job.history.apply:
            message, fix = "there are no past runs to correct by", 'history.file = "past_runs.csv"'
            raise job_error("history.apply", message, fix, file=job.file)
        return None
    path = named_path(job.file, job.history.file)
    runs = read_runs(path)
    plain = replace(job, history=JobHistory())
    columns = tuple(dict.fromkeys(k for r in runs for k in r.settings))
    known: dict[str, tuple[float, int, bool]] = {}
    found = [_residual(plain, run, columns, known, path) for run in runs]
    # A column's values make classes where there are more than one, and some value more than once.
    tell = (c for c in (CLASS, *columns) if 1 < len({r.traits[c] for r in found}) < len(found))
    return PredictionBacktest(path, tuple(found), tuple(tell))


def _residual(
    job: Job, run: PastStep, columns: Sequence[str], known: dict[str, tuple[float, int, bool]], file: str
) -> PredictionResidual:
    past = _past(job, run, file)
    key = job_digest(past)
    if key not in known:
        try:
            p = predict(past)
        except PiperError as e:
            raise _blamed(e, run, file) from None
        known[key] = (p.iteration_s, int(p.planned.memory.peak.max()), p.fits)
    step, peak, fit = known[key]
    traits = {c: trait(past, c) for c in columns} | {CLASS: run.label}
    return PredictionResidual(run, step, off(step, run.iteration_s), off(peak, run.peak), fit, traits)


def _past(job: Job, run: PastStep, file: str) -> Job:
    """The job with a row's settings."""
    try:
        return job_from(table_of(job), [f"{k}={v}" for k, v in run.settings.items()], job.file)
    except PiperError as e:
        raise _blamed(e, run, file) from None


def _blamed(e: PiperError, run: PastStep, file: str) -> PiperError:
    """The error of a row's job, laid at the row: its column where the row has one for that key."""
    key = (e.key or "").removeprefix("--set ")
    at = f"line {run.line}, column {key}" if key in run.settings else f"line {run.line}"
    message = e.message if key in run.settings or not key else f"{key}: {e.message}"
    kind = ErrorKind.JOB if e.kind.exit_code == 2 else e.kind
    return PiperError(kind, message, file=file, key=at, allowed=e.allowed, suggestion=e.suggestion)


def trait(job: Job, column: str) -> str:
    """What a job says in a column, as text; schedules by their one name. What it leaves open is what that comes to.

    >>> from ir.job.load import job_from
    >>> job = job_from({"model": {"config": "x"}, "schedule": {"name": "vpp"}, "cluster": {"nodes": 2}})
    >>> trait(job, "schedule.name"), trait(job, "parallel.dp")
    ('interleaved-1f1b', '16')
    """
    value, s = value_of(job, column), job.schedule
    if value is None and column == "schedule.name" and not (s.directives or s.builder or s.csv):
        value = DEFAULT_SCHEDULE
    if value is None and column in _RESOLVED:
        value = value_of(resolve(job, hardware_of(job).gpus_per_node), column)
    if column == "schedule.name" and isinstance(value, str):
        return canonical(value)
    return "default" if value is None else str(value)


_RESOLVED = ("parallel.dp", "cluster.nodes", "cluster.gpus_per_node", "schedule.microbatches")


def off(predicted: float, measured: float | None) -> float | None:
    """Predicted / measured - 1."""
    return None if measured is None else predicted / measured - 1
