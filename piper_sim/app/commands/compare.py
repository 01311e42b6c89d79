"""`piper-sim compare JOB`: several schedules of one job."""

from __future__ import annotations

import argparse
from typing import Any

from ir.core.errors import ErrorKind, PiperError
from ir.job import load_job
from ir.job.build import blaming
from ir.schedules.registry import canonical
from piper_sim.app.commands.output import (
    TRACE_FILES,
    dumps,
    print_json,
    progress,
    refuse_existing,
    show,
    trace_files,
    write,
)
from piper_sim.app.commands.simulate import report_run
from piper_sim.report.page.html import report_html
from piper_sim.report.table import compare_cells, compare_table, memory_cells
from piper_sim.study.compare import SIX, compare, why
from piper_sim.study.history import backtest, backtest_object, backtest_text, corrected_text
from piper_sim.study.predict import Prediction

FILES = ("compare.json", "report.html", *TRACE_FILES)


def main(args: argparse.Namespace) -> int:
    """Predict each, print them sorted; 0 even where some do not fit."""
    names = SIX if args.schedules is None else tuple(n.strip() for n in args.schedules.split(",") if n.strip())
    if not names:
        raise PiperError(ErrorKind.USAGE, "no schedule named", key="--schedules", allowed="a,b,c")
    for name in names:
        try:
            canonical(name)
        except PiperError as e:
            raise PiperError(e.kind, e.message, key="--schedules", allowed=e.allowed, suggestion=e.suggestion) from None
    job = load_job(args.job, args.sets)
    refuse_existing(args.out, FILES, args.force)
    with progress(f"predicting the past runs of {args.job}"), blaming(job):
        past = backtest(job)
    rows, found = compare(job, names, past, progress)
    title = job.model.name + "".join(f" on {p.prepared.ranks} GPUs" for p in list(found.values())[:1])
    if args.out is not None:
        with progress("writing the report"):
            write(args.out, files(rows, found, title), args.force)
    if args.json:
        print_json({"schema_version": 1, "rows": rows} | ({} if past is None else {"history": backtest_object(past)}))
    else:
        if past is not None:
            print(backtest_text(past), end="\n\n")
        print_rows(rows, title)
    return 0


def print_rows(rows: list[dict[str, Any]], title: str) -> None:
    """The table, the sentence, and what is modelled."""
    show(compare_table(rows, title))
    print(why(rows))
    levels = {(r["host_model"], r["interference_level"]) for r in rows if r["iteration_s"] is not None}
    how = ", ".join(f"host {host}, interference {level}" for host, level in sorted(levels))
    for r in rows:
        if "correction" in r:
            print(f"{r['schedule']}: {corrected_text(r)}")
    sources = ", ".join(sorted({str(r["cost_source"]) for r in rows if r["iteration_s"] is not None}))
    print(f"Step times and exposed communication are {sources} ({how}), reserved memory is modelled;")
    print("FLOPs, parameters and buffer sizes are exact sums over the plan.")


def files(rows: list[dict[str, Any]], found: dict[str, Prediction], title: str) -> dict[str, bytes | str]:
    """What --out holds: one report with every schedule, the winner's picture and trace."""
    shown = [r["schedule"] for r in rows if r["schedule"] in found]
    by_name = {r["schedule"]: r for r in rows}
    if not shown:
        return {"compare.json": dumps({"schema_version": 1, "rows": rows})}
    runs = [report_run(found[n], by_name[n]) for n in shown]
    tables = {"Schedules": compare_cells(rows), f"Memory of {shown[0]}": memory_cells(by_name[shown[0]]["memory"])}
    return {
        "compare.json": dumps({"schema_version": 1, "rows": rows}),
        "report.html": report_html(runs, f"{title}: {why(rows)}", tables),
        **trace_files(found[shown[0]].trace(), f"{title}, {shown[0]} (modelled)"),
    }
