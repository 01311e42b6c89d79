"""`piper-sim simulate JOB`: predict one job."""

from __future__ import annotations

import argparse
from typing import Any

from ir.job import load_job
from ir.job.build import blaming
from ir.plan.text import plan_text
from piper_sim.app.commands.output import (
    TRACE_FILES,
    dumps,
    print_json,
    progress,
    refuse_existing,
    show,
    trace_files,
    width,
    write,
)
from piper_sim.report.page.html import ReportRun, report_html
from piper_sim.report.table import compare_cells, compare_table, memory_cells, memory_table
from piper_sim.report.timeline import text_timeline
from piper_sim.study.history import applied, backtest, backtest_object, backtest_text, corrected_text
from piper_sim.study.predict import Prediction, predict
from piper_sim.study.simulate import simulate_object

FILES = ("simulate.json", "plan.txt", "report.html", *TRACE_FILES)


def main(args: argparse.Namespace) -> int:
    """Predict, print, write; 3 where the job does not fit."""
    job = load_job(args.job, args.sets)
    refuse_existing(args.out, FILES, args.force)
    with progress(f"predicting the past runs of {args.job}"), blaming(job):
        past = backtest(job)
    with progress(f"simulating {args.job}"), blaming(job):
        p = predict(job)
        found = applied(simulate_object(p), job, past)
    if past is not None:
        found["history"] = backtest_object(past)
    if args.out is not None:
        with progress("writing the report"):
            write(args.out, files(p, found), args.force)
    if args.json:
        print_json(found)
    else:
        if past is not None:
            print(backtest_text(past), end="\n\n")
        _print(p, found, args.out)
    return 0 if found["fits"] else 3


def files(p: Prediction, found: dict[str, Any]) -> dict[str, bytes | str]:
    """What --out holds."""
    trace, name = p.trace(), p.prepared.schedule
    title = f"{p.prepared.job.model.name}, {name}, {p.prepared.ranks} GPUs (modelled)"
    page = report_html(
        [report_run(p, found)],
        title,
        {"Prediction": compare_cells([{**found, "schedule": name}]), "Memory by rank": memory_cells(found["memory"])},
    )
    return {
        "simulate.json": dumps(found),
        "plan.txt": plan_text(p.plan),
        "report.html": page,
        **trace_files(trace, title),
    }


def report_run(p: Prediction, found: dict[str, Any]) -> ReportRun:
    """A prediction as one run of a report."""
    facts = {
        "step": f"{p.iteration_s:.4g} s",
        "mfu": f"{found['mfu']:.1%}",
        "ops simulated": found["ops"],
        "costs": found["cost_source"],
        "interference": found["interference_level"],
        "host": found["host_model"],
        "replicas simulated": "{replicas_simulated} of {replicas}".format(**found["folded"]),
        "plan digest": found["plan_digest"][:12],
    }
    trace, capacity = p.trace(), found["memory"]["capacity_bytes"]
    costs = None
    if p.planned.sources.word != "modelled":
        at = p.planned.sources.by_op(p.plan)
        costs = [at[key] for key in zip(trace.rank.tolist(), trace.op, strict=True)]
    return ReportRun(p.prepared.schedule, trace, facts, cost_source=costs, capacity_bytes=capacity)


def _print(p: Prediction, found: dict[str, Any], out: str | None) -> None:
    job = p.prepared.job
    show(compare_table([{**found, "schedule": p.prepared.schedule}], f"{job.model.name} on {p.prepared.ranks} GPUs"))
    print()
    print(text_timeline(p.trace(), width()))
    print()
    show(memory_table(found["memory"], "memory at the peak, by pipeline rank"))
    print(f"layers per stage: {list(p.prepared.layers)}")
    folded = found["folded"]
    print(f"simulated: {folded['replicas_simulated']} of {folded['replicas']} replicas, the others are equal to them")
    how = f"host {found['host_model']}, interference {found['interference_level']}"
    if "correction" in found:
        print(corrected_text(found))
    source = {"modelled": "modelled from the hardware file", "measured": "the profile's"}
    times = source.get(p.planned.sources.word)
    print(
        f"all times are {times} ({how}); reserved bytes are modelled" if times else f"{p.planned.sources.text} ({how})"
    )
    if not found["fits"]:
        print(f"does not fit: {found['reason']}")
    if out is not None:
        print(f"written to {out}/: report.html, timeline.png, trace.json.gz, trace.tsv, plan.txt, simulate.json")
