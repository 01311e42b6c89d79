"""`piper-sim schedule NAME`: one pipeline schedule by itself."""

import argparse
import re
from typing import cast

from ir.core.errors import ErrorKind, PiperError, usage_error
from ir.core.limits import check_passes
from ir.schedules.registry import check_shape, default_chunks
from piper_sim.app.commands import output
from piper_sim.engine import MessageMode
from piper_sim.report.page.html import ReportTrace, report_html
from piper_sim.study.pipeline import PassTimes, ScheduleOutcome, report, run_schedule

_LONGEST = 10**15
FILES = ("schedule.json", "report.html", *output.TRACE_FILES)
# A shape is refused in a job's words; here they were flags.
_FLAGS = {
    "schedule.name": "NAME",
    "parallel.pp": "--ranks",
    "schedule.microbatches": "--microbatches",
    "schedule.stages_per_rank": "--chunks",
}


def main(args: argparse.Namespace) -> int:
    """Build, check, simulate, print.

    Raises PiperError (usage): flags out of range, or that do not go together.
    """
    times = read_times(args.times)
    output.refuse_existing(args.out, FILES, args.force)
    try:
        check_shape(args.name, args.ranks, args.microbatches, chunks_of(args))
        check_passes(args.ranks * chunks_of(args), args.microbatches, ErrorKind.USAGE)
    except PiperError as e:
        key = _FLAGS.get(e.key or "", e.key)
        raise PiperError(e.kind, e.message, key=key, allowed=e.allowed, suggestion=e.suggestion) from None
    with output.progress(f"{args.name} on {args.ranks} ranks, {args.microbatches} microbatches"):
        wire = MessageMode(args.p2p_mode)
        out = run_schedule(args.name, args.ranks, args.microbatches, args.chunks, times, wire, args.w_memory)
        found = report(out, args.w_memory)
    if args.out is not None:
        output.write(args.out, _files(out, found), args.force)
    if args.json:
        output.print_json(found)
    else:
        _print(out, found)
    return 0


def read_times(text: str | None) -> PassTimes:
    """--times, within the range of floats. An exponent of many digits is refused before it is multiplied out.

    Raises PiperError (usage): no times, or times that do not add up.
    """
    wild = re.search(r"[eE][+-]?\d{3,}", text or "")
    try:
        if wild is None:
            times = PassTimes.parse(text)
            if max(times.F, times.I, times.W, times.FB, times.p2p) <= _LONGEST:
                return times
    except OverflowError:
        pass
    raise usage_error("--times", "a time out of range", "F=1,B=2", f"0, or numbers up to {_LONGEST:g}")


def chunks_of(args: argparse.Namespace) -> int:
    """--chunks, or the schedule's own number."""
    return int(args.chunks) if args.chunks is not None else default_chunks(args.name)


def _files(out: ScheduleOutcome, found: dict[str, object]) -> dict[str, bytes | str]:
    trace = out.trace()
    title = f"{out.schedule.name}, {out.schedule.ranks} ranks, {out.schedule.microbatches} microbatches"
    facts: dict[str, object] = {k: v for k, v in found.items() if isinstance(v, str | int | float)}
    page = report_html([ReportTrace(out.schedule.name, trace, facts)], title)
    return {"schedule.json": output.dumps(found), "report.html": page, **output.trace_files(trace, title)}


def _print(out: ScheduleOutcome, found: dict[str, object]) -> None:
    s = out.schedule
    print(f"{s.name}: {s.ranks} ranks, {s.microbatches} microbatches, {s.chunks} stage(s) per rank\n")
    output.show_timeline(out.trace())
    peak = cast("dict[str, float]", found["peak_inflight"])
    worst = max(peak, key=lambda r: peak[r])
    print(f"\nmakespan            {found['makespan']:g}")
    print(f"bubble              {found['bubble_fraction']:.1%} of all ranks' time")
    print(
        f"span bubble         {found['span_bubble_fraction']:.1%} between a rank's own first and last op (worst rank)"
    )
    print(f"peak in flight      {peak[worst]:g} chunk-microbatches (rank {worst})")
    print(f"parameter copies    {found['param_copies']:g}")
    if found["order_depends_on_times"]:
        print("the order was searched for these op times")
