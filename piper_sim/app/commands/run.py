"""`piper-sim run JOB -n N`: execute the plan that simulate judges."""

import argparse
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from ir.core.files import finite
from ir.job.run_options import JobRunOptions
from ir.plan.text import plan_text
from piper_sim.app.captured import load_job
from piper_sim.app.commands import output
from piper_sim.app.commands.simulate import COUNTS_ON_OVERLAP
from piper_sim.report.metrics import FILE as METRICS
from piper_sim.report.metrics import write_metrics
from piper_sim.report.tensorboard import StepEvents, step_events
from piper_sim.study.predict import predict
from piper_sim.study.simulate import MESSAGES
from piper_sim.study.validate.verdict import allocator

FILES = (
    "ranks.json", "routing.csv", "log.jsonl", METRICS, "run.json", "plan.txt", "timeline.png", "trace.json.gz",
    "trace.tsv",
)  # fmt: skip


def main(args: argparse.Namespace) -> int:
    """Build the plan, launch it, print losses and where the time went."""
    from executor.launch.forkserver import RankForkServer

    job = load_job(args.job, args.sets)
    RankForkServer.get()  # imports torch while this process does
    from executor.launch.run import run
    from ir.job.run_options import CheckpointOptions

    p = predict(job)
    out = None if args.out is None else Path(args.out)
    output.refuse_existing(args.out, FILES, args.force)  # before the ranks start, not after their work
    options = JobRunOptions.of(args, args.ranks)
    if options.backend == "nccl" and p.to_dict()["messages"] == MESSAGES[False]:
        output.warn([COUNTS_ON_OVERLAP])
    saving = CheckpointOptions(args.save, args.every, args.keep, args.force, args.resume)
    board = nullcontext() if args.tensorboard is None else step_events(Path(args.tensorboard))
    with board as events, output.progress(f"running {args.steps} step(s) on {args.ranks} processes"):
        said = partial(_tell, out, events, p.to_dict())
        found, trace = run(p.prepared, p.plan, options, saving, said)
    found["allocator"] = allocator(p, found)
    if not args.json and trace.op:  # whatever becomes of the files
        output.show_timeline(trace)
        _show(found)
    elif not args.json:
        print(f"nothing left to do: {found['saved']} is of step {found['first_step']}")
    if out is not None:
        title = f"{job.model.name}, {p.prepared.schedule}, {args.ranks} ranks (measured)"
        found["trace"] = str(out / "trace.tsv") if trace.op else None
        traced = output.trace_files(trace, title) if trace.op else {}
        files = {"run.json": output.dumps(finite(found)), "plan.txt": plan_text(p.plan), **traced}
        output.write(args.out, files, args.force)
    if args.json:
        output.print_json({k: finite(v) for k, v in found.items()})
    return 0


def _tell(out: Path | None, events: StepEvents | None, predicted: Mapping[str, Any], line: dict[str, Any]) -> None:
    """A line per step, on stderr, while it goes on, beside what was predicted; the same for Prometheus with --out."""
    drift = line["step_s"] / predicted["iteration_s"]
    mfu = (predicted["mfu"] or 0.0) / drift
    whole = line | {"predicted_s": predicted["iteration_s"], "drift": drift, "mfu": mfu}
    if out is not None:
        write_metrics(out, whole, predicted["plan_digest"])
    if events is not None:
        events(whole)
    test = f", held out {line['eval_loss']:.6f}" if "eval_loss" in line else ""
    text = f"step {line['step']}: loss {line['loss']:.6f}{test}, gradient norm {line['grad_norm']:.4f}, "
    text += f"lr {line['lr']:.2e}, {line['step_s']:.4f} s, {line['tokens_per_s']:,.0f} tokens/s, "
    print(f"{text}MFU {mfu:.2%}, {drift:,.2f} × predicted", file=sys.stderr)


def _show(found: dict[str, Any]) -> None:
    steps = zip(found["losses"] or (), found["grad_norms"] or (), strict=True)
    for step, (loss, norm) in enumerate(steps, found["first_step"]):
        print(f"step {step}: loss {loss:.6f}, gradient norm {norm:.6f}")
    print(f"{found['iteration_s']:.4f} s per step (median) on {found['ranks']} ranks; plan {found['plan_digest'][:12]}")
    if found["saved"]:
        print(f"saved to {found['saved']}")
    if late := found["slowest"]:
        print(f"slowest: rank {late['rank']}, for which each other rank waited {late['waited_s']:.4f} s of a step")
    if peaks := found["memory"]["peak_allocated_bytes"]:
        print(f"peak allocated, rank by rank: {', '.join(f'{b / 2**20:.2f}' for b in peaks.values())} MiB")
    for kind, ranks in (found["allocator"] or {}).items():
        sizes = ", ".join(f"{x['measured_bytes'] / 2**20:.2f} ({x['error']:+.1%})" for x in ranks.values())
        print(f"{kind} on the GPU at most, rank by rank: {sizes} MiB (and the prediction's error)")
