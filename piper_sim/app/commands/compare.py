"""`piper-sim compare JOB [JOB…]`: several jobs, or several schedules of one."""

import argparse
from collections.abc import Mapping, Sequence

from ir.core.errors import PiperError, usage_error
from ir.schedules.registry import canonical
from piper_sim.app.captured import load_job
from piper_sim.app.commands import output
from piper_sim.app.commands.simulate import essentials, fit_answer, report_run
from piper_sim.report.marks import idle_rows
from piper_sim.report.page.html import Answer, report_html
from piper_sim.report.table import compare_cells, compare_table, memory_cells
from piper_sim.report.units import duration
from piper_sim.study.compare import Comparison, compare, label
from piper_sim.study.history.show import backtest_object, backtest_text, corrected_text
from piper_sim.study.simulate import Object

FILES = ("compare.json", "report.html", *output.TRACE_FILES)
EXPLAINED = 2


def main(args: argparse.Namespace) -> int:
    """Predict each, print them sorted; 0 even where some are infeasible, 3 where all that was built does not fit."""
    names = _names(args.schedules)
    jobs = [load_job(path, args.sets) for path in args.job]
    output.refuse_existing(args.out, FILES, args.force)
    found = compare(jobs if len(jobs) > 1 else jobs[0], names, output.progress)
    title = title_of(found)
    if args.out is not None:
        with output.progress("writing the report"):
            output.write(args.out, files(found, title), args.force)
    output.warn(f"{label(r)}: {w}" for r in found.rows for w in r["warnings"] or ())
    past = [p for p in found.past if p is not None]
    if args.json:
        shown = [backtest_object(p) for p in past]
        output.print_json(table_object(found) | ({"history": shown[0] if len(jobs) == 1 else shown} if shown else {}))
    else:
        for p in past:
            print(backtest_text(p), end="\n\n")
        print_rows(found, title)
    return 3 if any(p is not None for p in found.predictions) and found.best is None else 0


def _names(schedules: str | None) -> tuple[str, ...] | None:
    """--schedules. Raises PiperError (usage): an unknown one, or none."""
    if schedules is None:
        return None
    names = tuple(n.strip() for n in schedules.split(",") if n.strip())
    if not names:
        raise usage_error("--schedules", "no schedule named", allowed="a,b,c")
    for name in names:
        try:
            canonical(name)
        except PiperError as e:
            raise PiperError(e.kind, e.message, key="--schedules", allowed=e.allowed, suggestion=e.suggestion) from None
    return names


def table_object(found: Comparison) -> Object:
    """The JSON object of `piper-sim compare`."""
    return {"schema_version": 1, "rows": found.rows}


def title_of(found: Comparison) -> str:
    """The models and their GPUs."""
    jobs = [p.prepared for p in found.predictions if p is not None]
    return ", ".join(dict.fromkeys(f"{j.job.model.name} on {j.ranks} GPUs" for j in jobs))


def print_rows(found: Comparison, title: str) -> None:
    """The table, the sentence, and what is modelled."""
    output.show(compare_table([{**r, "schedule": label(r)} for r in found.rows], title))
    print(found.why)
    for line in dict.fromkeys(essentials(p) for p in found.predictions if p is not None):
        print(line)
    timed = [r for r in found.rows if r["iteration_s"] is not None]
    if not timed:
        return
    levels = {(r["host_model"], r["interference_level"]) for r in timed}
    how = ", ".join(f"host {host}, interference {level}" for host, level in sorted(levels))
    for r in timed:
        if "correction" in r:
            print(f"{label(r)}: {corrected_text(r)}")
    sources = ", ".join(sorted({str(r["cost_source"]) for r in timed}))
    print(f"Step times and exposed communication are {sources} ({how}), reserved memory is modelled;")
    print("FLOPs, parameters and buffer sizes are exact sums over the plan.")


def _answers(found: Comparison, name: str) -> list[Answer]:
    """What wins, why, does it fit."""
    row, (says, _, price) = found.rows[0], found.why.partition("; its price is ")
    if not row["fits"]:
        return [("What wins?", "Nothing fits", found.why, "bad")]
    step = f"{duration(row['iteration_s'])} a step, {row['mfu']:.1%} of the model FLOPs"
    says, _, why = says.partition(" because of ")
    by = says.partition(": it ")[2] or "the only one predicted"
    out = [("What wins?", name, step, "good"), ("By how much?", by, "of those below the timeline", "")]
    if why:
        out.append(("Why?", why.removesuffix(" (means over ranks)"), f"its price is {price}", ""))
    return [*out, fit_answer(row)]


def files(found: Comparison, title: str) -> dict[str, bytes | str]:
    """What --out holds: one report with every row that could be predicted, the winner's picture and trace."""
    table = output.dumps(table_object(found))
    shown = [(r, p) for r, p in zip(found.rows, found.predictions, strict=True) if p is not None]
    if not shown:
        return {"compare.json": table}
    (row, best), name = shown[0], label(shown[0][0])
    cells = compare_cells([{**r, "schedule": label(r)} for r in found.rows])
    # What is behind waits takes as long as predicting did: told of the two that people look at.
    runs = [report_run(p, r, label(r), i < EXPLAINED) for i, (r, p) in enumerate(shown)]
    marks = runs[0].marks
    assert marks is not None
    tables: dict[str, Sequence[Mapping[str, object]]] = {
        "Schedules": cells,
        f"Why ranks are idle in {name}": idle_rows(marks.gaps),
        f"Memory of {name}": memory_cells(row["memory"]),
    }
    return {
        "compare.json": table,
        "report.html": report_html(runs, title, tables, _answers(found, name)),
        **output.trace_files(best.last_step, f"{title}, {name} (modelled)", marks),
    }
