"""`piper-sim demo`: DeepSeek-V3 on 2,048 H800, DualPipe against 1F1B and the others. No arguments needed."""

from __future__ import annotations

import argparse
from pathlib import Path

from ir.job.load import job_from
from piper_sim.app.commands.compare import files, print_rows
from piper_sim.app.commands.output import print_json, progress, width, write
from piper_sim.report.timeline import text_timeline
from piper_sim.study.compare import SIX, compare

JOB = """\
# DeepSeek-V3's published training shape (arXiv:2412.19437): 16-way pipeline, 64-way experts, ZeRO-1, fp8.
[model]
config = "deepseek-v3"
seq_len = 4096
[cluster]
gpu = "h800-sxm"
nodes = 256
[parallel]
pp = 16
ep = 64
zero = 1
[schedule]
name = "dualpipe"
microbatches = 120
recompute = ["norm", "up_projection", "activation"]
[precision]
compute = "fp8"
dispatch = "fp8"
combine = "bf16"
"""


def main(args: argparse.Namespace) -> int:
    """Predict the six schedules, print the table, write the report."""
    import tomllib

    job = job_from(tomllib.loads(JOB), file="demo")
    rows, found = compare(job, SIX, progress=progress)
    title = "deepseek-v3 on 2048 GPUs"
    with progress("writing the report"):
        written = write(args.out, {"job.toml": JOB, **files(rows, found, title)}, force=True)
    if args.json:
        print_json({"schema_version": 1, "rows": rows})
        return 0
    best = found[rows[0]["schedule"]]
    print(text_timeline(best.trace(), width()))
    print()
    print_rows(rows, title)
    print(f"\nReport: {Path(args.out) / 'report.html'} (open it in a browser); {len(written)} files in {args.out}/")
    return 0
