"""`piper-sim schedule NAME`: one pipeline schedule by itself."""

from __future__ import annotations

import argparse

from piper_sim.commands.output import dumps, print_json, progress, trace_files, width, write
from piper_sim.engine import Wire
from piper_sim.pipeline import Outcome, Times, report, run_schedule
from piper_sim.report.html import ReportRun, report_html
from piper_sim.report.timeline import text_timeline


def main(args: argparse.Namespace) -> int:
    """Build, check, simulate, print."""
    with progress(f"{args.name} on {args.ranks} ranks, {args.microbatches} microbatches"):
        times = Times.parse(args.times)
        wire = Wire(args.p2p_mode)
        out = run_schedule(args.name, args.ranks, args.microbatches, args.chunks, times, wire, args.w_memory)
        found = report(out, args.w_memory)
    if args.out is not None:
        write(args.out, _files(out, found), args.force)
    if args.json:
        print_json(found)
    else:
        _print(out, found)
    return 0


def _files(out: Outcome, found: dict[str, object]) -> dict[str, bytes | str]:
    trace = out.trace()
    title = f"{out.schedule.name}, {out.schedule.ranks} ranks, {out.schedule.microbatches} microbatches"
    facts: dict[str, object] = {k: v for k, v in found.items() if isinstance(v, str | int | float)}
    page = report_html([ReportRun(out.schedule.name, trace, facts)], title)
    return {"schedule.json": dumps(found), "report.html": page, **trace_files(trace, title)}


def _print(out: Outcome, found: dict[str, object]) -> None:
    s = out.schedule
    print(f"{s.name}: {s.ranks} ranks, {s.microbatches} microbatches, {s.chunks} stage(s) per rank\n")
    print(text_timeline(out.trace(), width()))
    peak: dict[str, float] = found["peak_inflight"]  # type: ignore[assignment]
    worst = max(peak, key=lambda r: peak[r])
    print(f"\nmakespan            {found['makespan']:g}")
    print(f"bubble              {found['bubble_fraction']:.1%} of all ranks' time")
    print(f"span bubble         {found['span_bubble_fraction']:.1%} between a rank's own first and last op (worst rank)")
    print(f"peak in flight      {peak[worst]:g} chunk-microbatches (rank {worst})")
    print(f"parameter copies    {found['param_copies']:g}")
    if found["order_depends_on_times"]:
        print("the order was searched for these op times")
