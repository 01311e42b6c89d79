"""`piper-sim search JOB`: the best strategy for a job's model and GPUs, and what was excluded and why."""

import argparse
import sys
from collections import Counter
from functools import partial

from cost_models import DeviceHardware
from ir.job import Job
from ir.job.build import PreparedJob, blaming
from piper_sim.app.captured import load_job
from piper_sim.app.commands.output import dumps, print_json, refuse_existing, show, warn, warn_uncorrected, write
from piper_sim.frameworks.exporting import export_launch, exported_to
from piper_sim.frameworks.from_job import ranges_of
from piper_sim.pricing.prepare import hardware_of, prepare_priced
from piper_sim.report.table import compare_table
from piper_sim.study.search import JobLimits, JobSearchResult, search
from piper_sim.study.search.evaluate import ANY
from piper_sim.study.search.result import winner_toml

FILES = ("search.json", "best.toml")


def main(args: argparse.Namespace) -> int:
    """Search, print, write; 3 where nothing fits."""
    job = load_job(args.job, args.sets)
    refuse_existing(args.out, FILES, args.force)
    warn_uncorrected(job, "search")
    with blaming(job):
        limits = ANY if args.to is None else _limits(job, exported_to(args.to))
        found = search(job, args.budget, args.workers, _progress, args.journal, limits)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    warn(found.warnings)
    if not args.json:  # whatever becomes of the files
        _print(found)
    if args.out is not None:
        best = {} if found.best is None else {"best.toml": winner_toml(found, args.out)}
        write(args.out, {"search.json": dumps(found.to_dict()), **best}, args.force)
    if args.json:
        print_json(found.to_dict())
    else:
        _print_next(found, args)
    return 0 if found.best is not None else 3


def _limits(job: Job, framework: str) -> JobLimits:
    """What a launch can say: ranges; and each configuration that would count, written and read back."""
    check = partial(_said_by, framework=framework, hardware=hardware_of(job))
    return JobLimits(ranges_of(job, framework), check, framework)


def _said_by(p: PreparedJob, framework: str, hardware: DeviceHardware) -> None:
    export_launch(p, framework, lambda read: prepare_priced(read, hardware))


def _progress(line: str) -> None:
    """On a terminal, one line that is written over; a line that ends stays, and is written anywhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
    elif line.endswith("\n"):
        print(line, end="", file=sys.stderr, flush=True)


def _print_next(found: JobSearchResult, args: argparse.Namespace) -> None:
    """Where the files are, and what to do with them."""
    if args.out is not None:
        print(f"written to {args.out}/: {', '.join(FILES if found.best is not None else FILES[:1])}")
    if args.to is not None and found.best is not None:
        kept = f"{args.out}/best.toml" if args.out is not None else "DIR/best.toml, with --out DIR here,"
        print(f"next: piper-sim export {kept} --to {args.to} --out launch --against YOUR_LAUNCH")


def _print(found: JobSearchResult) -> None:
    counts = Counter(str(r.kind) for r in found.all_rejected)
    closed = ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())) or "none rejected"
    if found.best is not None:
        rows = [{**p, "schedule": _said(p["changes"])} for p in found.pareto]
        show(compare_table(rows, f"{found.job.model.name}: step time against memory of the fullest rank"))
    else:
        print(found.to_dict()["reason"])
        if found.nearest is not None:
            print(f"the nearest miss: {_said(found.nearest['changes'])}")
    sure = "the best is proven" if found.best is not None else "that nothing fits is proven"
    state = sure if found.proven else "the budget ran out before anything was proven"
    print(f"{found.space} configurations, {found.evaluated} simulated; {closed}; {state}; {found.seconds:.1f} s")


def _said(changes: dict[str, object]) -> str:
    return " ".join(f"{k.split('.', 1)[1]}={v}" for k, v in changes.items()) or "the job itself"
