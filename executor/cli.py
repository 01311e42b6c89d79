"""`piper-sim run`: launch a job's plan on local processes and gather what happened.

What is here: dense models, pipeline parallelism of any schedule, DualPipe's two copies and tied embeddings reduced
over their owners (ZeRO-0 and ZeRO-1), gloo on one machine. Not here yet, and refused: data, tensor, context and expert
parallelism, ZeRO-2/3, nccl, checkpoints, emulated ops.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from executor.launch import launch
from executor.rank import Spec, refuse, train_rank
from ir.errors import ErrorKind, PiperError
from ir.job.build import Prepared, directives_json
from ir.trace import Trace


def run(
    prepared: Prepared,
    digest: str,
    job_file: str,
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

    Raises PiperError: a wrong number of ranks or an option not there yet (exit 2), RankFailed (exit 4).
    """
    if ranks != prepared.ranks:
        fix = f"-n {prepared.ranks}, or --set parallel.pp={ranks}"
        raise PiperError(ErrorKind.USAGE, f"{ranks} processes for a job of {prepared.ranks} ranks", key="-n", suggestion=fix)
    if steps < 1:
        raise PiperError(ErrorKind.USAGE, f"{steps} steps", key="--steps", allowed="1 or more")
    if backend != "gloo":
        raise PiperError(ErrorKind.USAGE, f"{backend} is not there yet", key="--backend", allowed="gloo")
    refuse(prepared.job, prepared)
    p = prepared.job.parallel
    resolved = [
        *sets,
        f"parallel.layers=[{', '.join(map(str, prepared.layers))}]",
        f"parallel.dp={p.dp}",
        f"cluster.gpus_per_node={prepared.job.cluster.gpus_per_node}",
    ]
    with tempfile.TemporaryDirectory(prefix="piper-plan-") as folder:
        strategy = Path(folder) / "strategy.json"
        strategy.write_text(json.dumps(directives_json(prepared.strategy)))
        spec = Spec(
            str(Path(job_file).resolve()),
            tuple(resolved),
            str(strategy),
            prepared.schedule,
            digest,
            steps,
            None if dump is None else str(dump.resolve()),
        )
        results = launch(train_rank, ranks, asdict(spec), out=out, watchdog_s=watchdog_s)
    return _object(prepared, digest, results, steps), _trace(results, prepared.schedule)


def _object(prepared: Prepared, digest: str, results: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    losses = []
    for step in range(steps):
        parts = sorted((mb, loss) for r in results for mb, loss in r["losses"][step])
        total = 0.0
        for _, loss in parts:
            total += loss
        losses.append(total)
    return {
        "schema_version": 1,
        "losses": losses,
        "grad_norms": results[0]["grad_norms"],
        "iteration_s": median(_durations(results, steps)),
        "memory": {"peak_allocated_bytes": None},
        "ranks": prepared.ranks,
        "plan_digest": digest,
        "trace": None,
    }


def _durations(results: list[dict[str, Any]], steps: int) -> list[float]:
    """Seconds of each step, from the first op anywhere to the last."""
    out = []
    for step in range(steps):
        rows = [row for r in results for row in r["rows"] if row[0] == step]
        out.append(max(row[5] for row in rows) - min(row[4] for row in rows))
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
