"""`piper-sim explain JOB [JOB2]`: why a step takes as long as it does, and what would change that."""

import argparse
from collections.abc import Sequence

from ir.core.errors import usage_error
from piper_sim.app.captured import load_job
from piper_sim.app.commands.output import print_json, progress, show_table, warn_uncorrected
from piper_sim.pricing.prepare import hardware_of, prepare_priced
from piper_sim.report.units import duration, percent
from piper_sim.study.explain import StepExplanation, explain
from piper_sim.study.explain.explanation import against
from piper_sim.study.explain.kineto import FORM, read_traces
from piper_sim.study.explain.measured import explain_traces, refuse_others
from piper_sim.study.explain.path import words
from piper_sim.study.explain.what_if import settings

MOST = 12  # rows of a table for people


def main(args: argparse.Namespace) -> int:
    """Explain, print; 3 where a job does not fit.

    Raises PiperError (usage): neither a job nor a trace, or a trace and two jobs; any kind: as `explain` does.
    """
    jobs = [load_job(path, args.sets) for path in (args.job, args.job2) if path is not None]
    if len(jobs) not in ((0, 1) if args.trace else (1, 2)):
        fix = "piper-sim explain job.toml, or piper-sim explain --trace trace.tsv"
        what = "a trace is held against one job" if jobs else "neither a job nor a trace"
        raise usage_error("JOB", what, fix, "JOB, JOB JOB2, JOB --trace FILE…")
    for job in jobs:
        warn_uncorrected(job, "explain")
    found = explain(jobs[0], jobs[1] if len(jobs) > 1 else None, progress) if jobs else None
    if args.trace:
        with progress("reading traces"), FORM.naming(" ".join(args.trace)):
            traces = read_traces(args.trace)
            for job in jobs:
                refuse_others(traces, prepare_priced(job, hardware_of(job)).plan())
            seen = explain_traces(traces)
        found = seen if found is None else against(found, seen)
    assert found is not None
    if args.json:
        print_json(found.to_dict())
    else:
        print_explanation(found)
    return 0 if found.fits else 3


def print_explanation(found: StepExplanation) -> None:
    """The path in words, causes, idle by rank, what-ifs, and of two jobs the difference."""
    print(f"one step takes {duration(found.iteration_s)}; its critical path:")
    path = [(int(x["rank"]), str(x["op"]), str(x["cause"]), x["end_s"] - x["start_s"]) for x in found.critical_path]
    said = words(path)
    for line in said if len(said) <= 2 * MOST else [*said[:MOST], f"({len(said) - 2 * MOST} more)", *said[-MOST:]]:
        print(f"  {line}")
    idle = sum(c["seconds"] for c in found.causes)
    blamed = [
        (c["cause"], str(c["rank"]), c["op"], duration(c["seconds"]), percent(c["seconds"] / idle))
        for c in found.causes[:MOST]
    ]
    _table(
        f"why ranks idle: {duration(idle)} over all pipeline ranks", ("cause", "rank", "most at", "idle", "%"), blamed
    )
    spent = [(k, duration(v), percent(v / found.iteration_s)) for k, v in found.spent.items()]
    _table("a rank's mean step", ("cause", "seconds", "%"), spent)
    what = [
        (
            w.name,
            " ".join([*settings(w.changes), *(f"without {k}" for k, v in w.changes.items() if v is None)]),
            duration(w.iteration_s),
            _signed(w.gain_s),
            "" if w.fits else "does not fit",
        )
        for w in found.what_ifs
    ]
    _table("what if (each simulated)", ("what if", "changes", "step", "gain", ""), what)
    if found.difference is not None:
        rows = [(k, _signed(v)) for k, v in found.difference.items()]
        title = f"{found.second} takes {_signed(sum(found.difference.values()))}"
        _table(title, ("cause", "seconds"), rows or [("nothing", _signed(0.0))])
    if found.reason is not None:
        print(f"does not fit: {found.reason}")


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if rows:
        print(f"\n{title}")
        show_table(heads, rows, left=("cause", "most at", "what if", "changes"), ruled=True)


def _signed(seconds: float) -> str:
    return duration(seconds) if seconds < 0 else f"+{duration(seconds)}"
