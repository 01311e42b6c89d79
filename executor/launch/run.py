"""`piper-sim run`: launch a job's plan on processes of this machine and gather what happened.

Not here yet, and refused: what `executor.launch.refusals` lists. In the trace, compute rows are exact; a
communication row starts when its stream comes to the op and ends when the stream's thread has seen it end, on a busy
machine some tenths of a millisecond late. Peak memory is that of one more step, at the end, in which every storage
is followed; it is neither timed nor reported otherwise. Ranks are those of the mesh, in the object, in the trace and
in failures.

Under `--emulate SECONDS` each pass of a layer takes that long (`ir.trace.durations.emulated_seconds`) and nothing is
computed: messages between stages have their real size, buckets at most 1 MiB or so, there is no model, and `losses`,
`grad_norms` and peak memory are null.
"""

import json
import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from executor.checkpoint.settings import settled, verified
from executor.launch.launch import folder_for, launch
from executor.launch.refusals import refuse
from executor.launch.step_log import loss_of, norm_of_ranks, told_steps
from executor.parallel.stragglers import slowest
from executor.runtime.given import Checksums, given_text
from executor.runtime.spec import PlanRun, taken
from executor.runtime.target import Target, write_whole
from ir.core.errors import ErrorKind, PiperError
from ir.core.files import finite, writing
from ir.job import load_job
from ir.job.build import PreparedJob, prepare
from ir.job.routing.recorded import counts_text
from ir.job.run_options import CheckpointOptions, JobRunOptions
from ir.plan.places import RankPlacement
from ir.plan.plan import Plan
from ir.plan.text import plan_digest
from ir.trace.text import read_trace
from ir.trace.trace import Trace

ROUTING, LOG = "routing.csv", "log.jsonl"
RANK: Target = "executor.runtime.rank:train_rank"


def run(
    prepared: PreparedJob,
    plan: Plan,
    options: JobRunOptions,
    saving: CheckpointOptions = CheckpointOptions(),
    tell: Callable[[dict[str, Any]], None] | None = None,
) -> tuple[dict[str, Any], Trace]:
    """Run the judged plan up to step `options.steps`. Returns the object of `piper-sim run` and the trace.

    saving: what is asked of checkpoints. tell: called once for each step that is logged, from another thread; out's
    log.jsonl gets the same (`executor.launch.step_log`).

    Raises PiperError: a wrong number of ranks or something not there yet (exit 2), RankFailed (exit 4).
    """
    options.check()
    drawn = check(prepared, plan, options)
    found = verified(settled(saving, prepared, options.steps, real=options.real))
    if found.done(options.steps):
        return nothing_left(prepared, plan, found)
    told: list[Callable[[dict[str, Any]], None]] = [tell] if tell is not None else []
    if options.out is not None and options.real:
        folder_for(options.out)
        _begin(options.out / LOG, found.first)
        told.append(partial(_append, options.out / LOG))
    with told_steps(prepared, options.steps, told) if told else nullcontext() as log:
        results = launch(
            RANK,
            options.ranks,
            PlanRun(options, found, note=options.out is not None, log=log).told(),
            given=[given_text(prepared, plan, drawn)],
            out=options.out,
            watchdog_s=options.watchdog_s,
            together=options.backend == "local",
        )
    if races := results[0]["races"]:
        raise _raced(races)
    if options.out is not None and any(r["routing"] for r in results):
        (options.out / ROUTING).write_text(_routing(results, RankPlacement.of(plan)))
    return gathered(prepared, plan, results)


def _begin(log: Path, first: int) -> None:
    """Of a run before, lines of the steps that this one goes on from stay; without any, the first step makes it."""
    lines = log.read_text("utf-8", "replace").splitlines(keepends=True) if first and log.is_file() else []
    kept = "".join(line for line in lines if _is_before(line, first))
    with writing(log, "--out"):
        write_whole(log, kept) if kept else log.unlink(missing_ok=True)


def _is_before(line: str, first: int) -> bool:
    """Whether a whole line is of an earlier step than `first`; a kill may have left half of one."""
    with suppress(ValueError, TypeError, KeyError):
        return line.endswith("\n") and bool(json.loads(line)["step"] < first)
    return False


def _append(file: Path, line: dict[str, Any]) -> None:
    with writing(file, "--out"), file.open("a", encoding="utf-8") as f:
        f.write(json.dumps(finite(line), allow_nan=False) + "\n")


def _raced(races: list[str]) -> PiperError:
    """What touched what, unordered."""
    message = f"{len(races)} races on a device with queues of its own:\n" + "\n".join(f"  {r}" for r in races[:12])
    return PiperError(ErrorKind.ILLEGAL_PLAN, message, key="--racecheck", suggestion="do not run this plan on a GPU")


def _routing(results: list[dict[str, Any]], places: RankPlacement) -> str:
    """The ranks' counts as a file that `[routing]` reads. Sources are positions."""
    rows = ((layer, mb, places.position(k), n) for k, r in enumerate(results) for layer, mb, n in r["routing"])
    return counts_text(rows)


def check(prepared: PreparedJob, plan: Plan, options: JobRunOptions) -> Checksums:
    """Refuse what `run` would refuse. Raises PiperError (exit 2). Returns what a module's build() draws."""
    if options.ranks != prepared.ranks:
        raise _wrong_ranks(prepared, options)
    drawn = refuse(prepared, options.backend, real=options.real)
    if options.racecheck and prepared.job.run.compile:
        message = "compiled code touches memory unseen"
        raise PiperError(ErrorKind.USAGE, message, key="--racecheck", suggestion="--set run.compile=false")
    if options.replay is not None:
        _check_replay(options.replay, plan)
    return drawn


def _check_replay(file: Path, plan: Plan) -> None:
    """Refuse a trace that some rank could not replay."""
    trace, places = read_trace(file), RankPlacement.of(plan)
    try:
        for rank in places.table[0]:
            taken(trace, plan, places, rank)
    except PiperError as error:
        fix = f"a trace.tsv that a run of this very plan has left in its --out; {plan_digest(plan)[:12]} is its digest"
        said = f"a trace of another plan: {error.message}"
        raise PiperError(ErrorKind.USAGE, said, file=str(file), key="--replay", suggestion=fix) from error


def _wrong_ranks(prepared: PreparedJob, options: JobRunOptions) -> PiperError:
    """N processes for a job of another size, and the overrides that make it a job of N."""
    p, ranks = prepared.job.parallel, options.ranks
    sizes = {"pp": (p.pp, ranks)} | {a: (getattr(p, a), 1) for a in ("tp", "cp", "dp", "ep", "etp", "dp_replicate")}
    needed = [f"parallel.{axis}={new}" for axis, (old, new) in sizes.items() if old != new]
    if not isinstance(p.layers, str):
        needed.append("parallel.layers=balanced")
    cluster, schedule = ["cluster.nodes=1", f"cluster.gpus_per_node={ranks}"], ["schedule.name=1f1b"]
    fix = f"-n {prepared.ranks}"
    for more in ([], cluster, schedule, [*cluster, *schedule]):
        with suppress(PiperError):
            if prepare(load_job(prepared.job.file, [*options.sets, *needed, *more])).ranks == ranks:
                fix = " ".join(f"--set {s}" for s in [*needed, *more])
                break
    message = f"{ranks} processes for a job of {prepared.ranks} ranks"
    return PiperError(ErrorKind.USAGE, message, key="-n", allowed=str(prepared.ranks), suggestion=fix)


def gathered(prepared: PreparedJob, plan: Plan, results: list[dict[str, Any]]) -> tuple[dict[str, Any], Trace]:
    """The object of `piper-sim run`, and the trace, from what the ranks returned."""
    trace, steps = _trace(results, prepared.schedule), len(results[0]["squares"])
    real = results[0]["losses"] is not None
    peaks, held, counted = (
        None if results[0][key] is None else {str(rank): r[key] for rank, r in enumerate(results)}
        for key in ("peak_bytes", "state_bytes", "allocator")
    )
    late = slowest(plan, trace)
    return {
        "schema_version": 1,
        "losses": [loss_of([r["losses"][k] for r in results]) for k in range(steps)] if real else None,
        "grad_norms": [
            norm_of_ranks(results[0]["grad_norms"][k], [r["squares"][k] for r in results]) for k in range(steps)
        ]
        if real
        else None,
        "evals": _evals(results, steps),
        "aux_losses": [_balance(results, step) for step in range(steps)] if any(map(any, _told(results))) else None,
        "first_step": results[0]["first_step"],
        "iteration_s": median(_durations(results)),
        "connect_s": max(r["connect_s"] for r in results),
        "memory": {"peak_allocated_bytes": peaks, "persistent_bytes": held, "allocator": counted},
        "ranks": prepared.ranks,
        "slowest": None if late is None else {"rank": late.rank, "waited_s": late.waited_s},
        "plan_digest": plan_digest(plan),
        "saved": results[0]["saved"],
        "races": results[0]["races"],
        "host_syncs": results[0]["host_syncs"],
        "compiled": _compiled(results) if prepared.job.run.compile and real else None,
        "trace": None,
    }, trace


def nothing_left(prepared: PreparedJob, plan: Plan, saving: CheckpointOptions) -> tuple[dict[str, Any], Trace]:
    """What `gathered` says of a run whose last step was saved before it began: no step, so no time and no memory."""
    return {
        "schema_version": 1,
        "losses": [],
        "grad_norms": [],
        "evals": [],
        "aux_losses": None,
        "first_step": saving.first,
        "iteration_s": None,
        "connect_s": 0.0,
        "memory": {"peak_allocated_bytes": None, "persistent_bytes": None, "allocator": None},
        "ranks": prepared.ranks,
        "slowest": None,
        "plan_digest": plan_digest(plan),
        "saved": saving.resume,
        "races": None,
        "host_syncs": None,
        "compiled": None,
        "trace": None,
    }, Trace.of({"writer": "executor", "schedule": prepared.schedule}, [])


def _compiled(results: list[dict[str, Any]]) -> dict[str, Any]:
    """By rank, how many units were compiled, to how many graphs; and how long the slowest rank took."""
    units, graphs, seconds = zip(*(r["compiled"] for r in results), strict=True)
    counts = {"units": units, "graphs": graphs}
    return {k: {str(r): n for r, n in enumerate(of)} for k, of in counts.items()} | {"seconds": max(seconds)}


def _evals(results: list[dict[str, Any]], steps: int) -> list[dict[str, float]]:
    """The losses of what was evaluated, with the steps behind which it was."""
    tests = [[r["tests"][k] for r in results] for k in range(steps)]
    first = results[0]["first_step"]
    return [{"step": first + k, "loss": loss_of(test)} for k, test in enumerate(tests) if any(test)]


def _told(results: list[dict[str, Any]]) -> list[Any]:
    return [r["balance"] for r in results]


def _balance(results: list[dict[str, Any]], step: int) -> float:
    """The auxiliary losses of all layers, likewise."""
    total = 0.0
    for _, _, loss in sorted((mb, layer, loss) for told in _told(results) for layer, mb, loss in told[step]):
        total += loss
    return total


def _durations(results: list[dict[str, Any]]) -> list[float]:
    """Seconds of each step that is traced, from the last op of the step before to its own: what is done between two
    counts.

    The first, and one before which was saved or evaluated, counts from its first op.
    """
    apart = {step + 1 for r in results for step in r["paused"]}
    spans: dict[int, tuple[float, float]] = {}
    for r in results:
        for step, _, _, _, start, end in r["rows"]:
            first, last = spans.get(step, (math.inf, 0.0))
            spans[step] = min(first, start), max(last, end)
    before = {step + 1: end for step, (_, end) in spans.items()}
    begins = {step: max(before.get(step, start), start if step in apart else 0.0) for step, (start, _) in spans.items()}
    return [end - begins[step] for step, (_, end) in spans.items()]


def _trace(results: list[dict[str, Any]], schedule: str) -> Trace:
    """All ranks' rows on rank 0's clock. Processes of one machine share it; others say how far theirs is ahead."""
    clocks = [r.get("clock", (0.0, 0.0)) for r in results]
    zero = min(row[3] - ahead for r, (ahead, _) in zip(results, clocks, strict=True) for row in r["rows"])
    rows = [
        (int(step), rank, stream, op, post - ahead - zero, start - ahead - zero, end - ahead - zero)
        for rank, (r, (ahead, _)) in enumerate(zip(results, clocks, strict=True))
        for step, stream, op, post, start, end in r["rows"]
    ]
    header = {
        "writer": "executor",
        "clock_offset_s": max((ahead for ahead, _ in clocks), key=abs),
        "clock_uncertainty_s": max(known for _, known in clocks),
        "schedule": schedule,
    }
    return Trace.of(header, rows)
