"""Several schedules of one job on equal devices and global batch, and why the winner wins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from ir.core.errors import PiperError
from ir.job import Job
from ir.job.build import blaming
from ir.schedules.registry import canonical, default_chunks, legal_chunks
from piper_sim.study.history import Backtest, applied
from piper_sim.study.predict import GIB, Prediction, predict
from piper_sim.study.simulate import simulate_object

SIX = ("1f1b", "interleaved-1f1b", "zb1p", "zbv", "dualpipe", "dualpipev")
KEYS = tuple(
    """
    iteration_s tokens_per_s tokens_per_s_per_gpu model_tflops_per_gpu mfu time_breakdown bubble_fraction
    exposed_comm_s fits memory ops folded host_model interference_level cost_source cost_shares plan_digest cost_digest
    job_digest
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
    "optimizer": "the optimizer",
}

Row = dict[str, Any]
Progress = Callable[[str], AbstractContextManager[object]]


def compare(
    job: Job, names: Sequence[str], past: Backtest | None = None, progress: Progress = nullcontext
) -> tuple[list[Row], dict[str, Prediction]]:
    """Rows sorted by step time, infeasible ones last with a reason; and the predictions by schedule.

    past: what `[history] apply` corrects them by. progress: entered around each prediction with what is being done.

    Raises PiperError where no schedule can be built because of the job itself.
    """
    rows, found = [], {}
    for name in dict.fromkeys(canonical(n) for n in names):
        wanted = job.schedule.stages_per_rank
        chunks = wanted if wanted is not None and legal_chunks(name, wanted) else default_chunks(name)
        head: Row = {"schedule": name, "stages_per_rank": chunks}
        try:
            with progress(f"simulating {name}"), blaming(job):
                p = predict(one := _with(job, name, chunks))
                rows.append(head | applied(simulate_object(p), one, past))
                found[name] = p
        except PiperError as e:
            fix = f" ({e.suggestion})" if e.suggestion else ""
            rows.append(
                head | {k: None for k in KEYS} | {"schema_version": 1, "fits": False, "reason": e.message + fix}
            )
    if not found:
        raise_common(job)
    rows.sort(key=lambda r: (not r["fits"], r["iteration_s"] is None, r["iteration_s"] or 0.0))
    return rows, found


def _with(job: Job, name: str, chunks: int) -> Job:
    schedule = replace(job.schedule, name=name, stages_per_rank=chunks, directives=None, builder=None, csv=None)
    return replace(job, schedule=schedule)


def raise_common(job: Job) -> None:
    """Where not even 1f1b with layers of our choice can be built, the job itself is wrong: raise its own error."""
    layers = job.parallel.layers if isinstance(job.parallel.layers, str) else "balanced"
    plain = _with(replace(job, parallel=replace(job.parallel, layers=layers)), "1f1b", 1)
    with blaming(job):
        predict(plain)


def why(rows: Sequence[Row]) -> str:
    """Why the winner wins, in one sentence with its price.

    It is held against 1f1b, or against the next best where 1f1b itself wins.
    """
    good = [r for r in rows if r["fits"]]
    timed = [r for r in rows if r["iteration_s"] is not None]
    if not good:
        least = min(timed, key=_worst_peak, default=None)
        return "No schedule fits." + (f" {least['schedule']} comes nearest: {least['reason']}." if least else "")
    best = good[0]
    others = [r for r in timed if r["schedule"] != best["schedule"]]
    if not others:
        return f"{best['schedule']} is the only schedule that could be predicted."
    rival = next((r for r in others if r["schedule"] == "1f1b"), min(others, key=lambda r: float(r["iteration_s"])))
    gain = rival["iteration_s"] - best["iteration_s"]
    a, b = _mean(best), _mean(rival)
    saved = sorted(((b[k] - a[k], k) for k in _WORDS), reverse=True)
    parts = [f"{_WORDS[k]} {b[k]:.2f} -> {a[k]:.2f} s" for d, k in saved[:2] if d > 0.02 * rival["iteration_s"]]
    cause = " and ".join(parts) or "small savings everywhere"
    price = (_worst_peak(best) - _worst_peak(rival)) / GIB
    memory = f"{abs(price):.1f} GiB {'more' if price > 0 else 'less'} on the worst rank"
    verb = "is faster than" if gain > 0 else "is slower than"
    fit = "" if rival["fits"] else ", which does not fit"
    share = abs(gain) / rival["iteration_s"]
    says = f"{best['schedule']} wins: it {verb} {rival['schedule']}{fit} by {share:.1%} because of {cause}"
    return f"{says} (means over ranks); its price is {memory}."


def _mean(row: Row) -> dict[str, float]:
    ranks = list(row["time_breakdown"].values())
    return {k: sum(r[k] for r in ranks) / len(ranks) for k in _WORDS}


def _worst_peak(row: Row) -> float:
    return float(max(row["memory"]["device_peak_bytes"].values()))
