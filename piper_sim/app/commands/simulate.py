"""`piper-sim simulate JOB`: predict one job."""

import argparse
from collections.abc import Sequence

from ir.job import Job
from ir.job.build import blaming
from ir.plan.text import plan_text
from piper_sim.app.captured import load_job
from piper_sim.app.commands import output
from piper_sim.report.marks import idle_rows
from piper_sim.report.page.html import Answer, ReportTrace, Tables, report_html
from piper_sim.report.table import compare_cells, compare_table, memory_cells, memory_table
from piper_sim.report.units import duration, gib, short
from piper_sim.study.explain.marks import marks_of
from piper_sim.study.explain.what_if import JobChange, what_ifs
from piper_sim.study.history.backtest import backtest
from piper_sim.study.history.show import applied, backtest_object, backtest_text, corrected_text
from piper_sim.study.predict import predict
from piper_sim.study.prediction import Prediction
from piper_sim.study.simulate import MESSAGES, Object

FILES = ("simulate.json", "plan.txt", "report.html", *output.TRACE_FILES)
COUNTS_ON_OVERLAP = (
    "messages: the plan counts on communicators that run side by side, as NCCL does and does not promise; "
    'with schedule.p2p = "ordered" it finishes in any case'
)


def main(args: argparse.Namespace) -> int:
    """Predict, print, write; 3 where the job does not fit."""
    job = load_job(args.job, args.sets)
    output.refuse_existing(args.out, FILES, args.force)
    with output.progress(f"predicting the past runs of {args.job}"), blaming(job):
        past = backtest(job)
    with output.progress(f"simulating {args.job}"), blaming(job):
        p = predict(job)
        found = applied(p.to_dict(), job, past)
    output.warn(found["warnings"])
    if past is not None:
        found["history"] = backtest_object(past)
    if args.out is not None:
        with output.progress("writing the report"):
            output.write(args.out, files(p, found, job), args.force)
    if args.json:
        output.print_json(found)
    else:
        if past is not None:
            print(backtest_text(past), end="\n\n")
        _print(p, found, args.out)
    return 0 if found["fits"] else 3


def files(p: Prediction, found: Object, job: Job) -> dict[str, bytes | str]:
    """What --out holds."""
    name, title = p.prepared.schedule, f"{p.title} (modelled)"
    run = report_run(p, found, name)
    assert run.marks is not None
    factor = found.get("correction", {}).get("factor", 1.0)
    others = [w.slower(factor) for w in what_ifs(job, p, output.progress)]
    changes = ((w, duration(w.iteration_s), duration(w.gain_s)) for w in others)
    tables: Tables = {
        "What if": [{"change": w.name, "step": step, "gain": gain, "fits": w.fits} for w, step, gain in changes],
        "Why ranks are idle": idle_rows(run.marks.gaps),
        "Prediction": compare_cells([{**found, "schedule": name}]),
        "Memory by rank": memory_cells(found["memory"]),
    }
    asked = [*answers(found), ("What would help most", *best_change(others), "")]
    page = report_html([run], title, tables, asked)
    return {
        "simulate.json": output.dumps(found),
        "plan.txt": plan_text(p.plan),
        "report.html": page,
        **output.trace_files(p.last_step, title, run.marks),
    }


def answers(found: Object) -> list[Answer]:
    """What a report says first of a prediction: how long, how well, does it fit."""
    low, high = found["iteration_s_interval"]
    idle = f"{found['bubble_fraction']:.1%} of the step ranks wait for each other"
    interval = f"80 % interval {duration(low, digits=3)} to {duration(high, digits=3)}"
    step = ("A step takes", duration(found["iteration_s"]), interval, "")
    rate = ("Model FLOPs used", f"{found['mfu']:.1%}", idle, "")
    return [step, rate, fit_answer(found)]


def fit_answer(found: Object) -> Answer:
    """Does it fit, and on which rank it is tightest."""
    memory = found["memory"]
    rank = max(memory["device_peak_bytes"], key=lambda r: memory["device_peak_bytes"][r])
    peak = memory["device_peak_bytes"][rank]
    spare = memory["capacity_bytes"] - memory["margin_bytes"] - peak
    if not found["fits"]:
        return ("Does it fit?", "No", str(found["reason"]), "bad")
    return ("Does it fit?", f"Yes, {gib(spare)} GiB to spare", f"rank {rank} is fullest: {gib(peak)} GiB", "good")


def best_change(others: Sequence[JobChange]) -> tuple[str, str]:
    """The what-if that gains most, and by how much."""
    found = next((w for w in others if w.fits and w.gain_s > 0), None)
    if found is None:
        return "Nothing that was tried", "see the table below"
    return found.name, f"{duration(found.gain_s)} less; others stand below the timeline"


def report_run(p: Prediction, found: Object, name: str, why: bool = True) -> ReportTrace:
    """A prediction as one run of a report. why: with what is behind its waits."""
    facts = {
        "step": f"{found['iteration_s']:.4g} s",
        "mfu": f"{found['mfu']:.1%}",
        "ops simulated": found["ops"],
        "costs": found["cost_source"],
        **({"timeline": f"as predicted, a step of {p.iteration_s:.4g} s"} if "correction" in found else {}),
        "interference": found["interference_level"],
        "host": found["host_model"],
        "replicas simulated": "{replicas_simulated} of {replicas}".format(**found["folded"]),
        "plan digest": found["plan_digest"][:12],
    }
    trace, capacity = p.last_step, found["memory"]["capacity_bytes"]
    costs = None
    if p.planned.sources.word != "modelled":
        at = p.planned.sources.by_op(p.plan)
        costs = [at[key] for key in zip(trace.rank.tolist(), trace.op, strict=True)]
    return ReportTrace(name, trace, facts, costs, capacity, marks_of(p, why))


def essentials(p: Prediction) -> str:
    """The job as it was understood, in a line: whoever meant another model or layout sees it here."""
    job, mesh, counts = p.prepared.job, p.prepared.mesh.sizes, p.to_dict()["parameters"]
    size = f"{short(counts['total'])} parameters, {short(counts['active'])} active"
    shown = ("tp", "cp", "pp", "dp", "ep", "etp", "dp_replicate")
    axes = " ".join(f"{a}={mesh[a]}" for a in shown if mesh.get(a, 1) > 1)
    batch = f"{p.prepared.mbs} microbatches of {job.schedule.microbatch_size} x {job.model.seq_len} tokens"
    layers = f"layers per stage {list(p.prepared.layers)}"
    software = f"software {p.to_dict()['software']}"
    layout = f"{axes} zero={job.parallel.zero}".strip()
    return f"{job.model.name}: {size}; {layout}; {batch}; {job.precision.compute}; {layers}; {software}"


def _print(p: Prediction, found: Object, out: str | None) -> None:
    title = f"{p.prepared.job.model.name} on {p.prepared.ranks} GPUs"
    output.show(compare_table([{**found, "schedule": p.prepared.schedule}], title))
    print()
    output.show_timeline(p.last_step)
    print()
    output.show(memory_table(found["memory"], "memory at the peak, by pipeline rank"))
    print(essentials(p))
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
    if found["messages"] == MESSAGES[False]:
        print(COUNTS_ON_OVERLAP)
    low, high = found["iteration_s_interval"]
    chance = found["memory"]["fits_probability"]
    print(f"80 % interval by published runs like it: {low:.4g} to {high:.4g} s; chance of room in memory {chance:.1%}")
    if (slow := found.get("slow_nodes")) is not None:
        steps = f"a step takes {slow['without_s']:.4g} s without, {slow['worst_s']:.4g} s at worst"
        print(f"slow nodes: {slow['chance']:.1%} chance of any; {steps}")
    if not found["fits"]:
        print(f"does not fit: {found['reason']}")
    if out is not None:
        print(f"written to {out}/: report.html, timeline.png, trace.json.gz, trace.tsv, plan.txt, simulate.json")
