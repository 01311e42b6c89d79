"""`piper-sim history LOG…`: what past runs left of their times, as a table for `[history]`."""

import argparse

from ir.core.errors import usage_error
from piper_sim.app.commands.output import print_json, refuse_existing, write
from piper_sim.study.history.logs import LOG, read_log
from piper_sim.study.history.table import parse_runs

FILE = "past_runs.csv"


def main(args: argparse.Namespace) -> int:
    """One row a log: median seconds of its steps, its peak; `--set` says what of the job differed, for all of them.

    Raises PiperError (usage): a `--set` that no cell can hold; as `read_log` does.
    """
    if args.skip < 0:
        raise usage_error("--skip", f"{args.skip} entries", "--skip 0", "a number from 0")
    refuse_existing(args.out, (FILE,), args.force)
    keys = [text.partition("=") for text in args.sets]
    if any(not equals or "," in value for _, equals, value in keys):
        raise usage_error("--set", "a table's cell holds one value", allowed="section.key=value")
    columns = [key for key, _, _ in keys]
    rows, table = list[dict[str, object]](), [", ".join([*columns, "iteration_s", "peak_allocated_GiB", "note"])]
    for path in args.logs:
        found = read_log(path)
        with LOG.naming(path):
            seconds, steps = found.usual(args.skip)
        peak = "" if found.peak_GiB is None else f"{found.peak_GiB:.4g}"
        note = f"{found.framework} {steps} steps"
        table.append(", ".join([*(value for _, _, value in keys), f"{seconds:.6g}", peak, note]))
        row = {"file": path, "framework": found.framework, "steps": steps, "iteration_s": seconds}
        rows.append({**row, "peak_allocated_GiB": found.peak_GiB})
    text = "\n".join(table) + "\n"
    parse_runs(text)  # what it would refuse is refused here
    write(args.out, {FILE: text}, args.force)
    if args.json:
        print_json({"schema_version": 1, "runs": rows})
    else:
        print(text, end="")
    return 0
