"""A backtest as JSON and as text, and a prediction with its suggested correction where the job asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from ir.job import Job
from piper_sim.study.history.backtest import PredictionBacktest, PredictionResidual
from piper_sim.study.history.correct import PredictionCorrection, suggest


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


_SLOWER = ("iteration_s", "exposed_comm_s")
_FASTER = ("tokens_per_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "mfu")


def backtest_object(past: PredictionBacktest) -> dict[str, Any]:
    """Every run, every class, how `fits` did, and what is suggested (null: nothing)."""
    found = suggest(past.residuals, past.columns)
    return {
        "file": past.file,
        "runs": [_run(r) for r in past.residuals],
        "classes": [
            {"of": of, "column": column, "value": value, **asdict(spread)}
            for of, column, value, spread in _spreads(past)
        ],
        "fits": confusion(past.residuals),
        "suggestion": None if found is None else asdict(found),
    }


def _run(r: PredictionResidual) -> dict[str, Any]:
    return {
        "line": r.run.line,
        "class": r.run.label,
        "note": r.run.note,
        "settings": dict(r.run.settings),
        "measured_s": r.run.iteration_s,
        "predicted_s": r.predicted_s,
        "error": r.time,
        "memory_error": r.memory,
        "fits": r.fits,
    }


def _spreads(past: PredictionBacktest) -> Iterator[tuple[str, str, str, PredictionErrors]]:
    """(time or memory, column, value, errors): of all, then by class, as the file has them."""
    errors: dict[str, Callable[[PredictionResidual], float | None]] = {
        "time": lambda r: r.time,
        "memory": lambda r: r.memory,
    }
    for of, error in errors.items():
        for column in ("", *past.columns):
            values = dict.fromkeys(r.traits[column] if column else "" for r in past.residuals)
            for value in values:
                mine = [error(r) for r in past.residuals if not column or r.traits[column] == value]
                if (spread := PredictionErrors.of([e for e in mine if e is not None])) is not None:
                    yield of, column, value, spread


def confusion(residuals: Sequence[PredictionResidual]) -> dict[str, int]:
    """Runs by what came of them and whether they are said to fit."""
    out = dict.fromkeys(("ran_fits", "ran_does_not_fit", "oom_fits", "oom_does_not_fit"), 0)
    for r in residuals:
        ran = "oom" if r.run.iteration_s is None else "ran"
        out[f"{ran}_{'fits' if r.fits else 'does_not_fit'}"] += 1
    return out


def backtest_text(past: PredictionBacktest) -> str:
    """Residuals by class, then what is suggested."""
    rows = [["of", "class", "n", "median", "p90", "worst", "sign"]]
    for of, column, value, x in _spreads(past):
        sizes = (f"{100 * v:.1f} %" for v in (x.median, x.p90, x.worst))
        rows.append([of, f"{column} {value}".strip() or "all", str(x.n), *sizes, f"{100 * x.sign:+.1f} %"])
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    out = [f"{len(past.residuals)} past runs of {past.file}, predicted / measured - 1:"]
    for of, name, *numbers in rows:
        right = (t.rjust(w) for t, w in zip(numbers, wide[2:], strict=True))
        out.append("  ".join(("", of.ljust(wide[0]), name.ljust(wide[1]), *right)))
    seen = confusion(past.residuals)
    if seen["ran_does_not_fit"]:
        out.append(f"{seen['ran_does_not_fit']} of those that ran are said not to fit")
    if died := seen["oom_fits"] + seen["oom_does_not_fit"]:
        out.append(f"{seen['oom_does_not_fit']} of {died} that ran out of memory are said not to fit")
    return "\n".join([*out, suggestion_text(suggest(past.residuals, past.columns))])


def suggestion_text(found: PredictionCorrection | None) -> str:
    """What is suggested, in a sentence or two."""
    if found is None:
        return "no correction is suggested: none makes runs that it was not taken from come out nearer"
    gain = f"median error of runs left out {100 * found.before:.1f} -> {100 * found.after:.1f} %, {found.rows} runs"
    if not found.by:
        return f"suggested: seconds x {found.factor:.3f} ({gain})"
    each = ", ".join(f"{v} x {f:.3f}" for v, f in found.factors.items())
    return f"suggested: seconds by {found.by}: {each}, others x {found.factor:.3f} ({gain})"


def applied(found: Mapping[str, Any], job: Job, past: PredictionBacktest | None) -> dict[str, Any]:
    """The object of a prediction with `[history] apply`: seconds times the suggested factor, all that is made of them
    with it, the raw numbers kept beside. As it came where the job does not ask, or nothing is suggested.
    """
    suggestion = None if past is None or not job.history.apply else suggest(past.residuals, past.columns)
    if suggestion is None:
        return dict(found)
    factor = suggestion.of(job)
    raw = {k: found[k] for k in ("iteration_s_interval", *_SLOWER, *_FASTER)}
    parts = {rank: _slower(row, factor) for rank, row in found["time_breakdown"].items()}
    return {
        **found,
        **{k: found[k] * factor for k in _SLOWER},
        **{k: found[k] / factor for k in _FASTER},
        "iteration_s_interval": [s * factor for s in found["iteration_s_interval"]],
        "time_breakdown": parts,
        **({} if "slow_nodes" not in found else {"slow_nodes": _slower(found["slow_nodes"], factor)}),
        "cost_source": f"{found['cost_source']}, corrected by history",
        "correction": {"factor": factor, "raw": raw},
    }


def _slower(table: Mapping[str, float], factor: float) -> dict[str, float]:
    return {k: v if k == "chance" else v * factor for k, v in table.items()}


def corrected_text(found: Mapping[str, Any]) -> str:
    """What a correction did to a prediction."""
    made = found["correction"]
    step = f"{made['raw']['iteration_s']:.4g} -> {found['iteration_s']:.4g} s"
    return f"corrected by the past runs, x {made['factor']:.3f}: {step} (timelines and traces are as predicted)"
