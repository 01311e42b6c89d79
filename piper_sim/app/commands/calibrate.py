"""`piper-sim calibrate JOB`: measure a job's ops and messages here, or import what was measured elsewhere."""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cost_models.profile.file import profile_text
from ir.core.errors import usage_error
from piper_sim.app.captured import load_job
from piper_sim.app.commands.output import print_json, progress, refuse_existing, show_table, write
from piper_sim.report.units import percent
from piper_sim.report.units import seconds as written
from piper_sim.study.calibrate import ProfileOptions, ProfileResult, calibrate

FILE = "profile.json"
MOST = 8  # names of what is missing, for people


def main(args: argparse.Namespace) -> int:
    """Measure or import, write the profile, say what it holds."""
    job = load_job(args.job, args.sets)
    refuse_existing(args.out, (FILE,), args.force)
    asked = asked_of(args)
    stopwatch, executor = (None, None) if asked.imports else _tools()
    with progress(f"reading what {args.job} takes" if asked.imports else f"measuring what {args.job} takes"):
        found = calibrate(job, args.sets, asked, stopwatch, executor)
    told = found.object(None if args.out is None else str(Path(args.out) / FILE))
    if not args.json:  # whatever becomes of the file
        _show(found, told)
    write(args.out, {FILE: profile_text(found.profile)}, args.force)
    if args.json:
        print_json(told)
    else:
        _show_use(told["profile"], args.job)
    return 0


def _tools() -> tuple[Any, Any]:
    """What measures here; needs torch."""
    from executor.launch.forkserver import RankForkServer

    RankForkServer.get()  # imports it while this process does
    from executor.launch import run
    from executor.measure import calibrate as stopwatch

    return stopwatch, run


def asked_of(args: argparse.Namespace) -> ProfileOptions:
    """The flags. Raises PiperError: those that do not go together, or no sizes."""
    flags = {"seq_len": args.seq_len, "sequences": args.microbatch_size, "tp": args.tp}
    others = {name: _sizes(flag, text) for (name, text), flag in zip(flags.items(), _FLAGS, strict=True) if text}
    asked = ProfileOptions(
        args.ranks,
        args.backend,
        args.repeats,
        args.by,
        args.watchdog,
        others,
        tuple(args.kineto),
        tuple(args.nccl),
        args.pairs,
        args.onto,
    )
    usual = ProfileOptions()
    given = [flag for flag, text in zip(_FLAGS, flags.values(), strict=True) if text]
    given += [flag for flag, name in _MEASURING.items() if getattr(asked, name) != getattr(usual, name)]
    if asked.imports and given:
        message = f"{', '.join(given)} is for measuring, and files are read instead"
        fix = f"leave {given[0]} out; or measure first, and lay the import over that with --onto"
        raise usage_error(given[0], message, fix)
    return asked


_FLAGS = ("--seq-len", "--microbatch-size", "--tp")
_MEASURING = {
    "-n": "processes",
    "--backend": "backend",
    "--repeats": "repeats",
    "--by": "by",
    "--watchdog": "watchdog_s",
}


def _sizes(flag: str, text: str) -> tuple[int, ...]:
    values = text.split(",")
    if not all(v.strip().isdecimal() and int(v) > 0 for v in values):
        raise usage_error(flag, f"{text!r}", allowed="sizes with commas between: 1024,2048,4096")
    return tuple(int(v) for v in values)


def _show(c: ProfileResult, found: dict[str, Any]) -> None:
    """What people read."""
    if found["curves"]:
        heads = ("message", "latency", "GB/s", "knees at", "fit error")
        show_table(heads, _curve_rows(found["curves"]), left=heads[:1])
    for line in found["origins"]:
        print(line)
    print(f"machine: {found['fingerprint']}, {c.profile.machine.date}")
    spreads = [e.time.spread_s / e.time.median_s for e in c.profile.ops.values() if e.time.median_s]
    spread = f", median spread {percent(sorted(spreads)[len(spreads) // 2])} %" if spreads else ""
    print(f"{found['ops']} op classes{spread}; {found['links']} links; worst fit error {percent(found['fit_error'])} %")
    if c.profile.host_s is not None:
        print(f"a host that computes itself needs {written(c.profile.host_s)} for each op beside its work")
    print(f"of this job's step: {c.covers.text}")
    if missing := found["missing"]:
        more = f" and {len(missing) - MOST} more" if len(missing) > MOST else ""
        print(f"not measured, hence modelled: {', '.join(missing[:MOST])}{more}")


def _show_use(where: str | None, job: str) -> None:
    """Where the profile is, and what to do with it. job: the file."""
    print(f"written to {where}" if where else "not written anywhere: --out DIR keeps it")
    if where:
        there = os.path.relpath(where, Path(job).parent)
        print(f"use it: piper-sim simulate {job} --set costs.profile={there}")


def _curve_rows(curves: dict[str, Any]) -> Iterator[list[str]]:
    for name, c in curves.items():
        rate = "" if c["bytes_per_s"] is None else f"{c['bytes_per_s'] / 1e9:.3g}"
        knees = ", ".join(f"{n:,}" for n in c["knees_bytes"])
        yield [name, written(c["latency_s"]), rate, knees, f"{percent(c['error'])} %"]
