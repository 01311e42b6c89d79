"""`piper-sim validate JOB -n N`: calibrate on another plan of the job, predict this one, run it, compare."""

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

from cost_models.profile.file import profile_text
from ir.job.run_options import JobRunOptions
from ir.plan.text import plan_text
from ir.trace.text import write_trace
from ir.trace.trace import Trace
from piper_sim.app.captured import load_job
from piper_sim.app.commands.output import dumps, print_json, progress, refuse_existing, show_table, show_timeline, write
from piper_sim.report.page.html import ReportTrace, report_html
from piper_sim.report.units import percent
from piper_sim.report.units import seconds as written
from piper_sim.study.validate import PlanTools, PlanValidation, validate

FILES = ("validate.json", "profile.json", "plan.txt", "report.html", "predicted.tsv", "trace.tsv", "ranks.json")
MISSED = 5


def main(args: argparse.Namespace) -> int:
    """Print the comparison; 5 where a gate is missed."""
    from executor.launch.forkserver import RankForkServer

    job = load_job(args.job, args.sets)
    RankForkServer.get()  # imports torch while this process does
    from executor.launch import run as executor
    from executor.measure.peak_bytes import peak_bytes

    refuse_existing(args.out, FILES, args.force)
    options = JobRunOptions.of(args, args.ranks)
    with progress(f"calibrating and running on {args.ranks} processes"):
        v = validate(job, PlanTools(executor, peak_bytes), options)
    if not args.json:  # whatever becomes of the files
        _show(v)
    if args.out is not None:
        write(args.out, files(v), args.force)
    if args.json:
        print_json(v.found)
    return 0 if v.found["passed"] else MISSED


def files(v: PlanValidation) -> dict[str, bytes | str]:
    """What --out holds, beside the `ranks.json` that the run has left there."""
    p = v.prediction.prepared
    title = f"{p.job.model.name}, {p.schedule}, {p.ranks} ranks: predicted above measured"
    tables = {"Gates": _gate_rows(v.found), "Operations": _rows(v.found["ops"]), "Messages": _rows(v.found["links"])}
    return {
        "validate.json": dumps(v.found),
        "profile.json": profile_text(v.calibration.profile),
        "plan.txt": plan_text(v.prediction.plan),
        "report.html": report_html(_runs(v), title, tables),
        "predicted.tsv": write_trace(v.prediction.last_step),
        "trace.tsv": write_trace(v.run.trace),
    }


def _runs(v: PlanValidation) -> list[ReportTrace]:
    found, on = v.found, v.found["calibrated_on"]
    digest = {"plan digest": found["plan_digest"][:12]}
    source = f"{on['schedule']}, {on['microbatches']} microbatches"
    iteration = found["iteration"]
    return [
        ReportTrace(
            "predicted",
            v.prediction.last_step,
            {"step": written(iteration["predicted_s"]), "error": percent(iteration["error"]), "calibrated on": source}
            | digest,
        ),
        ReportTrace(
            "measured", one_step(v), {"step": written(iteration["measured_s"]), "steps": found["steps"]} | digest
        ),
    ]


def one_step(v: PlanValidation) -> Trace:
    """The step nearest the median, from its first start."""
    t, steps = v.run.trace, sorted(set(v.run.trace.step.tolist()))
    mine = np.flatnonzero(t.step == steps[len(steps) - len(v.run.step_s) + v.run.usual()])
    zero = float(t.start_s[mine].min())
    columns = zip(
        t.rank[mine].tolist(), (t.post_s[mine] - zero).tolist(), (t.start_s[mine] - zero).tolist(),
        (t.end_s[mine] - zero).tolist(), mine.tolist(), strict=True,
    )  # fmt: skip
    return Trace.of(t.header, ((0, rank, t.stream[i], t.op[i], *times) for rank, *times, i in columns))


def _gate_rows(found: dict[str, Any]) -> list[dict[str, object]]:
    return [
        {"gate": k, "error": None if g["error"] is None else percent(g["error"]), "limit": percent(g["limit"]),
         "passed": g["passed"]}
        for k, g in found["gates"].items()
    ]  # fmt: skip


def _rows(pairs: dict[str, Any]) -> list[dict[str, object]]:
    return [
        {"class": k, "predicted": written(x["predicted_s"]), "measured": written(x["measured_s"]),
         "error": percent(x["error"])}
        for k, x in pairs.items()
    ]  # fmt: skip


def _show(v: PlanValidation) -> None:
    found, p = v.found, v.prediction
    print("predicted")
    show_timeline(p.last_step)
    print("measured")
    show_timeline(one_step(v))
    show_table(("", "predicted", "measured", "error"), _table_rows(found), left=("",))
    on = found["calibrated_on"]
    print(
        f"calibrated on {on['schedule']} with {on['microbatches']} microbatches, {on['steps']} steps; {on['machine']}"
    )
    bare = found["without_communication"]
    print(f"without communication the prediction would be {written(bare['predicted_s'])} ({bare['error']:+.1%})")
    if (replay := found["replay"]) is not None:
        print(f"each op at what it took, replayed: {written(replay['predicted_s'])} ({replay['error']:+.2%})")
    missed = [k for k, g in found["gates"].items() if g["passed"] is False]
    print("passed" if not missed else f"missed: {', '.join(missed)}")


def _table_rows(found: dict[str, Any]) -> Iterator[list[str]]:
    for name, x in {"iteration": found["iteration"], **found["ops"], **found["links"]}.items():
        yield [name, written(x["predicted_s"]), written(x["measured_s"]), f"{x['error']:+.1%}"]
    memory = {"peak": found["memory"] or {}, **(found["allocator"] or {})}
    for kind, rank, x in ((kind, rank, x) for kind, ranks in memory.items() for rank, x in ranks.items()):
        sizes = (f"{x[k] / 2**20:.2f} MiB" for k in ("predicted_bytes", "measured_bytes"))
        yield [f"{kind} of rank {rank}", *sizes, f"{x['error']:+.2%}"]
