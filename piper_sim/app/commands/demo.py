"""`piper-sim demo`: DeepSeek-V3 on 2,048 H800, DualPipe against 1F1B and the others. No arguments needed."""

import argparse
import tomllib
from pathlib import Path

from ir.job import load_job
from piper_sim.app.commands.compare import files, print_rows, table_object, title_of
from piper_sim.app.commands.output import print_json, progress, refuse_existing, show_timeline, write
from piper_sim.study.compare import compare

JOB = Path(__file__).with_name("demo.toml").read_text(encoding="utf-8")


def main(args: argparse.Namespace) -> int:
    """Predict the six schedules, print the table, write the report."""
    refuse_existing(args.out, (), force=True)  # its own files it replaces
    job = load_job(tomllib.loads(JOB))
    found = compare(job, progress=progress)
    title = title_of(found)
    with progress("writing the report"):
        written = write(args.out, {"job.toml": JOB, **files(found, title)}, force=True)
    if args.json:
        print_json(table_object(found))
        return 0
    if found.best is not None:
        show_timeline(found.best.last_step)
        print()
    print_rows(found, title)
    print(f"\nReport: {Path(args.out) / 'report.html'} (open it in a browser); {len(written)} files in {args.out}/")
    return 0
