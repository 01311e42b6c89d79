"""`piper-sim run`: launch a job's plan on local processes and gather what happened.

What is here: dense llama-like models of a config; pipeline parallelism of any schedule, DualPipe's two copies and tied
embeddings reduced over their owners (ZeRO-0 and ZeRO-1); recomputed layers; bf16, fp32, fp64; gloo on one machine. Not
here yet, and refused (`executor.refusals`): data, tensor, context and expert parallelism, ZeRO-2/3, a module of your
own, nccl and local backends. Checkpoints, emulated ops and several machines have no flags yet.

In the trace, compute rows are exact; a communication row starts when its stream comes to the op and ends when the
stream's thread has seen it end, on a busy machine some tenths of a millisecond late. Peak memory is that of one more
step, at the end, in which every storage is followed; it is neither timed nor reported otherwise. A plan counts what a
GPU's kernels keep, not what torch's CPU kernels do, so its peaks are lower than these (3 to 29 % on tiny models).
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from executor.launch import launch
from executor.refusals import refuse
from executor.spec import Spec
from executor.target import Target
from ir.errors import ErrorKind, PiperError
from ir.job import load_job
from ir.job.build import Prepared, directives_json, prepare
from ir.plan import Plan
from ir.plan_text import plan_digest
from ir.trace import Trace

RANK: Target = "executor.rank:train_rank"


def run(
    prepared: Prepared,
    plan: Plan,
    sets: Sequence[str],
    *,
    ranks: int,
    steps: int,
    backend: str = "gloo",
    watchdog_s: float = 15.0,
    out: Path | None = None,
    dump: Path | None = None,
) -> tuple[dict[str, Any], Trace]:
    """Train `steps` steps of the judged plan. Returns the object of `piper-sim run` and the trace.

    sets: the job's `--set` overrides. out: a folder that gets `ranks.json`. dump: one for gradients and parameters.

    Raises PiperError: a wrong number of ranks or something not there yet (exit 2), RankFailed (exit 4).
    """
    if ranks != prepared.ranks:
        raise _wrong_ranks(prepared, sets, ranks)
    if steps < 1:
        raise PiperError(ErrorKind.USAGE, f"{steps} steps", key="--steps", allowed="1 or more", suggestion="--steps 1")
    if not watchdog_s > 0:
        message = f"{watchdog_s} seconds"
        raise PiperError(ErrorKind.USAGE, message, key="--watchdog", allowed="more than 0", suggestion="--watchdog 15")
    refuse(prepared, plan, backend)
    digest = plan_digest(plan)
    with tempfile.TemporaryDirectory(prefix="piper-plan-") as folder:
        strategy = Path(folder) / "strategy.json"
        strategy.write_text(json.dumps(directives_json(prepared.strategy)))
        spec = Spec(
            str(Path(prepared.job.file).resolve()),
            (*sets, *_resolved(prepared)),
            str(strategy),
            prepared.schedule,
            digest,
            steps,
            None if dump is None else str(dump.resolve()),
        )
        results = launch(RANK, ranks, asdict(spec), out=out, watchdog_s=watchdog_s)
    return _object(prepared, digest, results, steps), _trace(results, prepared.schedule)


def _resolved(prepared: Prepared) -> list[str]:
    """What the simulator's side has decided beyond the job file, as overrides."""
    return [
        f"parallel.layers=[{', '.join(map(str, prepared.layers))}]",
        f"parallel.dp={prepared.job.parallel.dp}",
        f"cluster.gpus_per_node={prepared.job.cluster.gpus_per_node}",
    ]


def _wrong_ranks(prepared: Prepared, sets: Sequence[str], ranks: int) -> PiperError:
    """N processes for a job of another size, and the overrides that make it a job of N."""
    p = prepared.job.parallel
    sizes = {"pp": (p.pp, ranks)} | {a: (getattr(p, a), 1) for a in ("tp", "cp", "dp", "ep", "etp")}
    needed = [f"parallel.{axis}={new}" for axis, (old, new) in sizes.items() if old != new]
    if not isinstance(p.layers, str):
        needed.append("parallel.layers=balanced")
    cluster, schedule = ["cluster.nodes=1", f"cluster.gpus_per_node={ranks}"], ["schedule.name=1f1b"]
    fix = f"-n {prepared.ranks}"
    for more in ([], cluster, schedule, [*cluster, *schedule]):
        with suppress(PiperError):
            if prepare(load_job(prepared.job.file, [*sets, *needed, *more])).ranks == ranks:
                fix = " ".join(f"--set {s}" for s in [*needed, *more])
                break
    message = f"{ranks} processes for a job of {prepared.ranks} ranks"
    return PiperError(ErrorKind.USAGE, message, key="-n", allowed=str(prepared.ranks), suggestion=fix)


def _object(prepared: Prepared, digest: str, results: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "losses": [_loss(results, step) for step in range(steps)],
        "grad_norms": [_norm(results, step) for step in range(steps)],
        "iteration_s": median(_durations(results, steps)),
        "memory": {"peak_allocated_bytes": {str(rank): r["peak_bytes"] for rank, r in enumerate(results)}},
        "ranks": prepared.ranks,
        "plan_digest": digest,
        "trace": None,
    }


def _loss(results: list[dict[str, Any]], step: int) -> float:
    """Summed in the order of microbatches, whatever ranks they ended on."""
    total = 0.0
    for _, loss in sorted((mb, loss) for r in results for mb, loss in r["losses"][step]):
        total += loss
    return total


def _norm(results: list[dict[str, Any]], step: int) -> float:
    """As the plan took it; without clipping the plan takes none, and the ranks' shares are put together here."""
    if (norm := results[0]["grad_norms"][step]) is not None:
        return float(norm)
    shares = [r["squares"][step] for r in results]
    return math.sqrt(sum(sum(one) for one in zip(*shares, strict=True)))


def _durations(results: list[dict[str, Any]], steps: int) -> list[float]:
    """Seconds of each step, from its first op anywhere (or the end of the step before, if later) to its last."""
    out, before = [], 0.0
    for step in range(steps):
        rows = [row for r in results for row in r["rows"] if row[0] == step]
        end = max(row[5] for row in rows)
        out.append(end - max(before, min(row[4] for row in rows)))
        before = end
    return out


def _trace(results: list[dict[str, Any]], schedule: str) -> Trace:
    """All ranks' rows on one clock: processes of one machine share its monotonic clock, so the offset is 0."""
    zero = min(row[3] for r in results for row in r["rows"])
    rows = [
        (int(step), rank, stream, op, post - zero, start - zero, end - zero)
        for rank, r in enumerate(results)
        for step, stream, op, post, start, end in r["rows"]
    ]
    header = {"writer": "executor", "clock_offset_s": 0.0, "clock_uncertainty_s": 0.0, "schedule": schedule}
    return Trace.of(header, rows)
