"""`torchrun … -m executor JOB`: one rank of a run that somebody else launches, on one machine or several.

Rank 0 reads the job, builds and checks the plan, and gives both to all through the store, as text; the digests of the
plans that the ranks have read are compared before the first op. `layers = "balanced"` weighs by FLOPs here, as no cost
model is at hand: to run exactly what `piper-sim` judged, give its layers, and `--digest` to be sure. Rank 0 prints the
object of `piper-sim run`, and whoever finds a failure first prints that; then every rank ends with a code other than 0.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from executor.checkpoint.settings import settled
from executor.device.progress import RankProgress, create
from executor.launch.launch import folder_for, scratch
from executor.launch.refusals import refuse
from executor.launch.run import gathered, nothing_left
from executor.launch.store import clocks, meeting
from executor.launch.watch.watchdog import STARTUP_S, RankWatchdog
from executor.runtime.flight import arm, forget, kept_in
from executor.runtime.given import Judged, given_name, given_text
from executor.runtime.rank import train_rank
from executor.runtime.spec import PlanRun
from executor.runtime.target import write_whole
from executor.runtime.worker import RankContext
from ir.core.errors import ErrorKind, PiperError
from ir.core.files import finite, writing
from ir.job import load_job
from ir.job.build import PreparedJob, prepare
from ir.job.run_options import CheckpointOptions, JobRunOptions
from ir.plan.text import plan_digest
from ir.trace.text import write_trace
from ir.trace.trace import Trace
from ir.verify import check_plan

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")


class RankParser(argparse.ArgumentParser):
    """Flags of ranks."""

    def error(self, message: str) -> NoReturn:
        """Raises PiperError (usage)."""
        raise PiperError(ErrorKind.USAGE, message, key="python -m executor", suggestion="python -m executor --help")


def flags() -> RankParser:
    """Of `-m executor`."""
    p = RankParser(prog="torchrun … -m executor", description="Run a job's plan as one rank.", allow_abbrev=False)
    p.add_argument("job", metavar="JOB", help="a job file (TOML)")
    p.add_argument(
        "--set", action="append", default=[], metavar="section.key=value", dest="sets", help="override a key"
    )
    p.add_argument("--steps", type=int, default=1, metavar="K", help="training steps, those of --resume among them")
    p.add_argument("--backend", choices=("gloo", "nccl"), default="gloo", help="transport")
    p.add_argument("--watchdog", type=float, default=15.0, metavar="SECONDS", help="no progress for so long is failure")
    p.add_argument("--emulate", type=float, metavar="SECONDS", help="each pass of a layer takes so long, without sums")
    p.add_argument(
        "--emulate-comm", type=float, default=0.0, metavar="SECONDS", help="each transfer ends so much later"
    )
    p.add_argument("--save", metavar="DIR", help="write checkpoints there: all ranks must see one file system")
    p.add_argument("--every", type=int, metavar="K", help="steps between two checkpoints (default: at the end only)")
    p.add_argument("--keep", type=int, metavar="N", help="the last N checkpoints are kept (default: 2)")
    p.add_argument("--resume", metavar="DIR", help="go on from a checkpoint; if-present: in --save, if one is there")
    p.add_argument("--force", action="store_true", help="save to a DIR that holds something else; it goes")
    p.add_argument("--digest", help="the plan_digest that piper-sim printed: run no other plan")
    p.add_argument("--out", metavar="DIR", help="also write ranks.json, run.json and trace.tsv there (rank 0)")
    p.add_argument("--json", action="store_true", help="the object is printed in any case")
    return p


@dataclass(frozen=True)
class TorchrunRank:
    """Who this process is: torchrun's environment."""

    rank: int
    world: int
    local_rank: int

    @classmethod
    def here(cls) -> TorchrunRank:
        """Raises PiperError: not started by a launcher."""
        if missing := [name for name in NEEDED if name not in os.environ]:
            message = f"no {', '.join(missing)} in the environment"
            fix = "torchrun --nproc-per-node N -m executor JOB; or piper-sim run JOB -n N"
            raise PiperError(ErrorKind.USAGE, message, key="torchrun", allowed=", ".join(NEEDED), suggestion=fix)
        rank, world = _counted("RANK"), _counted("WORLD_SIZE")
        if rank >= world:
            fix = f"RANK of 0 to {world - 1}"
            raise PiperError(ErrorKind.USAGE, f"rank {rank} of {world}", key="RANK", allowed=fix, suggestion=fix)
        local = {name: _counted(name) for name in LOCAL if name in os.environ}
        if not 0 < (port := _counted("MASTER_PORT")) < 2**16:  # of 0 the system makes a port that nobody is told
            fix = "MASTER_PORT = 29500"
            raise PiperError(ErrorKind.USAGE, f"port {port}", key="MASTER_PORT", allowed="1 to 65535", suggestion=fix)
        return cls(rank, world, local.get("LOCAL_RANK", rank))


def _counted(name: str) -> int:
    """A number of torchrun's environment. Raises PiperError (usage): it is none."""
    text = os.environ[name].strip()
    if not (text.isascii() and text.isdecimal()):
        fix = f"{name} as torchrun sets it"
        raise PiperError(ErrorKind.USAGE, f"{text!r} is no number", key=name, allowed="0, 1, 2 …", suggestion=fix)
    return int(text)


def port_taken(error: Exception) -> PiperError | None:
    """That another process listens where rank 0 is to, if that is what went wrong."""
    if "address already in use" not in str(error).lower():
        return None
    message, fix = f"another process listens at port {os.environ['MASTER_PORT']}", "another MASTER_PORT, for all ranks"
    return PiperError(ErrorKind.RANK_FAILED, message, key="MASTER_PORT", allowed="a free port", suggestion=fix)


def printed(found: Mapping[str, Any]) -> None:
    """The object of a run, as the only thing on stdout."""
    print(json.dumps(finite(found), allow_nan=False), flush=True)


def main(argv: Sequence[str], tell: Callable[[Mapping[str, Any]], None] = printed) -> int:
    """One rank's life; returns its exit code. tell: is given the run's object, on rank 0."""
    try:
        args = flags().parse_args(list(argv))
        place = TorchrunRank.here()
        options = JobRunOptions.of(args, place.world)
        options.check()
        wanted, told = CheckpointOptions(args.save, args.every, args.keep, args.force, args.resume), None
        if place.rank == 0:
            told = judged(prepare(load_job(args.job, options.sets)), options, args.digest)
            settled(wanted, told[0], options.steps, real=options.real)
            if options.out is not None:
                folder_for(options.out)
    except PiperError as error:
        if error.key == "RANK" or not os.environ.get("RANK", "").strip().strip("0"):
            report(error)
        elif error.key in ("torchrun", *NEEDED, *LOCAL):  # what rank 0 need not have met
            print(f"error: rank {os.environ['RANK']}: {error}", file=sys.stderr, flush=True)
        return error.kind.exit_code
    torch.set_num_threads(1)
    try:
        with scratch("piper-rank-") as name:
            try:
                store, lookout = joined(place, Path(name), options, told)
            except (RuntimeError, TimeoutError, ValueError) as error:  # rank 0 has refused the job, or is gone
                if place.rank == 0:
                    fix = "start the launcher on every node; see that each reaches MASTER_ADDR:MASTER_PORT"
                    alone = PiperError(ErrorKind.RANK_FAILED, f"rank 0 met nobody: {error}", suggestion=fix)
                    report(port_taken(error) or alone)
                else:
                    print(f"error: rank {place.rank} was told nothing to run: {error}", file=sys.stderr, flush=True)
                return ErrorKind.RANK_FAILED.exit_code
            return _live(store, lookout, place, Path(name), PlanRun(options, wanted), tell)
    except PiperError as error:  # no room for temporary files, on this machine perhaps alone
        if place.rank == 0:
            report(error)
        else:
            print(f"error: rank {place.rank}: {error}", file=sys.stderr, flush=True)
        return error.kind.exit_code


def judged(prepared: PreparedJob, options: JobRunOptions, digest: str | None = None) -> Judged:
    """What is to be run, by rank 0. digest: of the only plan that may be.

    Raises PiperError: another number of processes, another plan, or not to be run here.
    """
    if prepared.ranks != options.ranks:
        message = f"{options.ranks} processes for a job of {prepared.ranks} ranks"
        fix = f"--nproc-per-node {prepared.ranks}, over all nodes"
        raise PiperError(ErrorKind.USAGE, message, key="WORLD_SIZE", allowed=str(prepared.ranks), suggestion=fix)
    plan = prepared.plan()
    check_plan(plan)
    drawn = refuse(prepared, options.backend, real=options.real, here=int(os.environ.get("LOCAL_WORLD_SIZE", 0)))
    if digest not in (None, found := plan_digest(plan)):
        fix = f"--set 'parallel.layers={list(prepared.layers)}' in both places"
        raise PiperError(ErrorKind.ILLEGAL_PLAN, f"the plan's digest is {found}", key="--digest", suggestion=fix)
    return prepared, plan, drawn


def joined(place: TorchrunRank, folder: Path, options: JobRunOptions, told: Judged | None) -> tuple[Any, RankWatchdog]:
    """Meet the others at torchrun's store; what rank 0 has judged is written to the folder."""
    patience = timedelta(seconds=STARTUP_S)
    kept, _, _ = next(rendezvous("env://", place.rank, place.world, timeout=patience))
    store = PrefixStore(meeting(kept, place.rank, place.world, STARTUP_S), kept)
    create(folder / "progress", 1)
    mine, kept = PrefixStore("piper", store), kept_in(options.out, options.watchdog_s, os.getppid())
    lookout = RankWatchdog(mine, place.rank, place.world, folder / "progress", options.watchdog_s, report, kept)
    text = lookout.tell(None if told is None else given_text(*told))
    (folder / given_name(0)).write_text(text, encoding="utf-8")
    return store, lookout


def rank_context(store: Any, place: TorchrunRank, folder: Path) -> RankContext:
    """What this rank's function gets."""
    return RankContext(
        place.rank,
        place.world,
        folder,
        RankProgress(folder / "progress", 0),
        local_rank=place.local_rank,
        open_store=lambda name: PrefixStore(name, store),
    )


def _live(
    store: Any,
    lookout: RankWatchdog,
    place: TorchrunRank,
    folder: Path,
    spec: PlanRun,
    tell: Callable[[Mapping[str, Any]], None],
) -> int:
    """From the text that says what to run to the end."""
    context = rank_context(store, place, folder)
    out = spec.options.out if place.rank == 0 else None
    try:
        prepared, plan = context.given()
        saving = settled(spec.saving, prepared, spec.options.steps, real=spec.options.real)
        if lookout.flight.out is not None:
            forget(lookout.flight.out, place.rank)
            arm(folder, place.rank)
        pids = lookout.meet(f"{plan_digest(plan)} from step {saving.first}")
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            table = {"ranks": {str(r): {"pid": pid} for r, pid in enumerate(pids)}}
            write_whole(out / "ranks.json", json.dumps(table))
        lookout.start()
        clock = clocks(lookout.store, place.rank, lookout.sights.hosts)
        if left := not saving.done(spec.options.steps):
            result = train_rank(context, **replace(spec, saving=saving).told())
            results = lookout.exchange({**result, "clock": clock})
    except BaseException as error:
        lookout.fall(error)  # does not return
    code = 0
    if place.rank == 0:
        found = gathered(prepared, plan, results) if left else nothing_left(prepared, plan, saving)
        code = _handed_over(*found, out, tell)
    lookout.part()
    return code


def _handed_over(
    found: dict[str, Any], trace: Trace, out: Path | None, tell: Callable[[Mapping[str, Any]], None]
) -> int:
    """What is left of a run that went well; returns the exit code. The others wait for it: nothing here may raise."""
    try:
        if out is not None:
            with writing(out, "--out"):
                if trace.op:
                    found["trace"] = str(out / "trace.tsv")
                    write_whole(out / "trace.tsv", write_trace(trace))
                write_whole(out / "run.json", json.dumps(finite(found), indent=1, allow_nan=False) + "\n")
        tell(found)
    except PiperError as error:
        report(error)
        return error.kind.exit_code
    except BrokenPipeError:  # nobody reads on
        return 0
    except OSError as error:
        print(f"error: cannot write to stdout: {error.strerror}", file=sys.stderr, flush=True)
        return ErrorKind.IO.exit_code
    return 0


def end(code: int) -> NoReturn:
    """End this process as its run has ended. A thread inside torch when Python takes itself down, a daemon of ours too,
    aborts it: to end such a thread Python (before 3.14) unwinds it, through C++ that lets nothing through ("terminate
    called without an active exception"). A run that went well would count as failed."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a full disk, or a reader that has left: nothing is left to be said
            stream.flush()
    os._exit(code)


def report(e: PiperError) -> None:
    """The error as `piper-sim run --json` prints it, and as people read it. Who watches reports, and must go on: what
    cannot be printed is lost."""
    with suppress(OSError):
        print(json.dumps({"schema_version": 1, "error": e.to_dict()}), flush=True)
    with suppress(OSError):
        print(f"{e.details}\nerror: {e}".lstrip(), file=sys.stderr, flush=True)
