"""Several jobs, or several schedules of one job on equal devices and global batch, and why the winner wins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from html import escape
from math import isclose
from pathlib import Path
from typing import TYPE_CHECKING

from ir.core.errors import PiperError, usage_error
from ir.job import Job
from ir.job.build import DEFAULT_SCHEDULE, blaming
from ir.job.load import no_job
from ir.schedules.registry import canonical, default_chunks, legal_chunks
from piper_sim.report.units import GIB, duration
from piper_sim.study.history.backtest import PredictionBacktest, backtest
from piper_sim.study.history.show import applied
from piper_sim.study.predict import predict
from piper_sim.study.prediction import Prediction
from piper_sim.study.simulate import Object, less_measured

if TYPE_CHECKING:
    from pandas import DataFrame

SIX = ("1f1b", "interleaved-1f1b", "zb1p", "zbv", "dualpipe", "dualpipev")
KEYS = tuple(
    """
    iteration_s iteration_s_interval tokens_per_s tokens_per_s_per_gpu model_tflops_per_gpu mfu time_breakdown
    bubble_fraction exposed_comm_s fits memory parameters ops folded host_model interference_level messages software
    cost_source cost_shares warnings plan_digest cost_digest job_digest
    """.split()  # noqa: SIM905
)
_WORDS = {
    "exposed_ep": "exposed all-to-all",
    "exposed_dp": "exposed data-parallel communication",
    "exposed_pp": "exposed pipeline transfers",
    "exposed_tp": "exposed tensor-parallel communication",
    "exposed_cp": "exposed context-parallel communication",
    "dependency": "waiting for other ranks",
    "recompute": "recomputation",
    "compute": "compute",
    "slowdown": "compute slowed by messages beside it",
    "host": "waiting for the host",
    "optimizer": "the optimizer",
}

Progress = Callable[[str], AbstractContextManager[object]]


@dataclass(frozen=True, eq=False)
class Comparison:
    """Jobs side by side. `rows`: `simulate`'s objects, the fastest that fits first, what does not fit last.

    A row has `schedule` and `stages_per_rank` too, where several jobs are compared `job`, and a `reason` where it does
    not fit or cannot be built; then its figures are None. predictions: row by row, None where it cannot be built. past:
    what `[history]` says, job by job, None where one has none.
    """

    rows: list[Object]
    predictions: list[Prediction | None]
    past: list[PredictionBacktest | None]

    def __repr__(self) -> str:
        """In a line; the fields are whole predictions."""
        return f"Comparison({', '.join(label(r) for r in self.rows)})"

    @property
    def best(self) -> Prediction | None:
        """The fastest that fits."""
        return self.predictions[0] if self.rows[0]["fits"] else None

    @property
    def why(self) -> str:
        """Why the winner wins, in one sentence with its price."""
        return why(self.rows)

    @property
    def table(self) -> DataFrame:
        """A row for each, by label: seconds of a step, rates, fractions, the fullest rank's GiB, the reason."""
        from pandas import DataFrame, Index

        keys = ("iteration_s", "tokens_per_s_per_gpu", "mfu", "bubble_fraction", "exposed_comm_s", "fits")
        found = [{k: r[k] for k in keys} | {"peak_GiB": _peak_gib(r), "reason": r.get("reason", "")} for r in self.rows]
        return DataFrame(found, index=Index([label(r) for r in self.rows], name="label"))

    def _repr_html_(self) -> str:
        """The table and the sentence, for a notebook."""
        return f"{self.table.to_html()}<p>{escape(self.why)}</p>"


def compare(
    jobs: Job | Iterable[Job], schedules: Sequence[str] | None = None, progress: Progress = nullcontext
) -> Comparison:
    """Predict each job under each of some schedules.

    schedules: by default the demo's six where there is one job, and each job's own where there are several. progress:
    entered around each prediction with what is being done. What cannot be built is a row with a reason.

    Raises PiperError (usage): an unknown schedule, no job; any kind: none can be built, because of the jobs themselves.

    >>> from piper_sim import compare, load_job
    >>> job = load_job({"model": {"config": "tiny-llama", "seq_len": 64}, "parallel": {"pp": 2}})
    >>> sorted(r["schedule"] for r in compare(job, ["gpipe", "1f1b"]).rows), compare([job, job]).rows[0]["job"]
    (['1f1b', 'gpipe'], 'job')
    """
    if isinstance(jobs, (str, Mapping)) or not isinstance(jobs, (Job, Iterable)):
        raise no_job(jobs)
    many = [jobs] if isinstance(jobs, Job) else list(jobs)
    if wrong := [job for job in many if not isinstance(job, Job)]:
        raise no_job(wrong[0])
    if not many:
        raise usage_error("compare", "no job to compare")
    if isinstance(schedules, str) or (schedules is not None and not schedules):
        raise usage_error("schedules", f"{schedules!r} is no list of schedules", f'["{DEFAULT_SCHEDULE}", "zbv"]')
    names = SIX if schedules is None and len(many) == 1 else schedules
    past, found = list[PredictionBacktest | None](), list[tuple[Object, Prediction | None]]()
    for job, told in zip(many, told_apart([job.file for job in many]), strict=True):
        with progress(f"predicting the past runs of {job.file}"), blaming(job):
            past.append(backtest(job))
        for head, one in _asked(job, names, {"job": job.file, "name": told} if len(many) > 1 else {}):
            with progress(f"simulating {label(head)}"):
                found.append(_row(head, one, past[-1]))
    if all(p is None for _, p in found):
        raise_common(many[0])
    found.sort(key=lambda x: (not x[0]["fits"], x[0]["iteration_s"] is None, x[0]["iteration_s"] or 0.0))
    return Comparison([row for row, _ in found], [p for _, p in found], past)


def label(row: Object) -> str:
    """What tells a row from the others: its schedule, behind its job's name where there are several."""
    return f"{row['name']} {row['schedule']}" if "name" in row else str(row["schedule"])


def told_apart(files: Sequence[str]) -> list[str]:
    """The files' names without their ends, behind as many of their folders as it takes.

    >>> told_apart(["a/job.toml", "b/job.toml"]), told_apart(["a/one.toml", "b/two.toml"]), told_apart(["a/x", "a/x"])
    (['a/job', 'b/job'], ['one', 'two'], ['x', 'x'])
    """
    parts = [Path(file).with_suffix("").parts for file in files]
    different, depth = len({*parts}), 1
    while len({p[-depth:] for p in parts}) < different:
        depth += 1
    return ["/".join(p[-depth:]) for p in parts]


def _asked(job: Job, names: Sequence[str] | None, first: Object) -> Iterator[tuple[Object, Job]]:
    """(what a row begins with, its job): under each schedule, or as it is. first: what it begins with of its job."""
    if names is None:
        s = job.schedule
        given = next((k for k in ("directives", "csv", "builder") if getattr(s, k)), None)
        name = given or canonical(s.name or DEFAULT_SCHEDULE)
        yield first | {"schedule": name, "stages_per_rank": s.stages_per_rank}, job
    for name in dict.fromkeys(canonical(n) for n in names or ()):
        wanted = job.schedule.stages_per_rank
        chunks = wanted if wanted is not None and legal_chunks(name, wanted) else default_chunks(name)
        yield first | {"schedule": name, "stages_per_rank": chunks}, _with(job, name, chunks)


def _row(head: Object, job: Job, past: PredictionBacktest | None) -> tuple[Object, Prediction | None]:
    try:
        with blaming(job):
            p = predict(job)
            return head | applied(p.to_dict(), job, past), p
    except PiperError as e:
        fix = f" ({e.suggestion})" if e.suggestion else ""
        none: Object = dict.fromkeys(KEYS)
        return head | none | {"schema_version": 1, "fits": False, "reason": e.message + fix}, None


def _with(job: Job, name: str, chunks: int) -> Job:
    schedule = replace(job.schedule, name=name, stages_per_rank=chunks, directives=None, builder=None, csv=None)
    return replace(job, schedule=schedule)


def raise_common(job: Job) -> None:
    """Where not even 1f1b with layers of our choice can be built, the job itself is wrong: raise its own error."""
    layers = job.parallel.layers if isinstance(job.parallel.layers, str) else "balanced"
    plain = _with(replace(job, parallel=replace(job.parallel, layers=layers)), "1f1b", 1)
    with blaming(job):
        predict(plain)


def why(rows: Sequence[Object]) -> str:
    """Why the winner wins, in one sentence with its price.

    It is held against 1f1b, or against the next best where 1f1b itself wins. A step of fewer tokens is shorter by that
    alone: then it is said how many, and at what rates.
    """
    good = [r for r in rows if r["fits"]]
    timed = [r for r in rows if r["iteration_s"] is not None]
    if not good:
        least = min(timed, key=_worst_peak, default=None)
        return "No schedule fits." + (f" {label(least)} comes nearest: {least['reason']}." if least else "")
    best = good[0]
    others = [r for r in timed if r is not best]
    if not others:
        return f"{label(best)} is the only one that could be predicted."
    rival = next((r for r in others if r["schedule"] == "1f1b"), min(others, key=lambda r: float(r["iteration_s"])))
    gain = rival["iteration_s"] - best["iteration_s"]
    a, b = _mean(best), _mean(rival)
    saved = sorted(((b[k] - a[k], k) for k in _WORDS), reverse=True)
    parts = [
        f"{_WORDS[k]} {duration(b[k])} -> {duration(a[k])}" for d, k in saved[:2] if d > 0.02 * rival["iteration_s"]
    ]
    cause = f" because of {' and '.join(parts) or 'small savings everywhere'} (means over ranks)" if gain > 0 else ""
    price = (_worst_peak(best) - _worst_peak(rival)) / GIB
    memory = f"{abs(price):.1f} GiB {'more' if price > 0 else 'less'} on the worst rank"
    fit = "" if rival["fits"] else ", which does not fit,"
    how = (
        f"it is {'faster' if gain > 0 else 'slower'} than {label(rival)}{fit} by {abs(gain) / rival['iteration_s']:.1%}"
    )
    how = how if gain else f"it takes as long as {label(rival)}"
    mine, theirs = (round(r["tokens_per_s"] / r["tokens_per_s_per_gpu"]) for r in (best, rival))
    how += f", on {mine / theirs:.3g} times its GPUs" if mine != theirs else ""
    mine, theirs = (r["tokens_per_s"] * r["iteration_s"] for r in (best, rival))
    does = "wins"
    if not isclose(mine, theirs, rel_tol=1e-6):
        rates = f"{best['tokens_per_s']:,.0f} tokens/s, {rival['tokens_per_s']:,.0f} there"
        does, how = "has the shortest step", f"{how}, with {mine / theirs:.3g} times its tokens ({rates})"
    return f"{label(best)} {does}: {how}{cause}; its price is {memory}.{_unlike(best, rival)}"


def _unlike(best: Object, rival: Object) -> str:
    """That a profile knows the two unequally well, where it does."""
    a, b = best["cost_shares"], rival["cost_shares"]
    if not (less_measured(a, b) or less_measured(b, a)):
        return ""
    said = f"{a['modelled']:.0%} of its seconds are modelled, {b['modelled']:.0%} of {label(rival)}'s"
    return f" But {said}: what costs.profile has not measured may decide it."


def _mean(row: Object) -> dict[str, float]:
    ranks = list(row["time_breakdown"].values())
    return {k: sum(r[k] for r in ranks) / len(ranks) for k in _WORDS}


def _worst_peak(row: Object) -> float:
    return float(max(row["memory"]["device_peak_bytes"].values()))


def _peak_gib(row: Object) -> float | None:
    return None if row["memory"] is None else _worst_peak(row) / GIB
