"""`[routing]` of a job: which keys go together, and with which models."""

from __future__ import annotations

from ir.core.errors import ErrorKind, PiperError
from ir.job import Job
from ir.workload.config.spec import ModelConfig

MOST_STRENGTH = 1e6


def check_routing(job: Job, config: ModelConfig) -> None:
    """Refuse `[routing]` keys that contradict each other or the model.

    Raises PiperError (job): a file without kind = "file" or the other way round, a strength out of range, uneven
    or forced routing of a model without experts.
    """
    r = job.routing
    if r.kind == "file" and r.file is None:
        allowed = "a CSV file: layer,microbatch,source,expert,tokens"
        raise _bad(job, "file", 'kind = "file" names none', allowed, 'routing.file = "tokens.csv"')
    if r.kind != "file" and r.file is not None:
        raise _bad(job, "kind", f"{r.kind!r} reads no file, but one is named", None, 'routing.kind = "file"')
    least = {"zipf": 0.0, "hot": 1.0}.get(r.kind)
    if least is not None and not least <= r.strength <= MOST_STRENGTH:
        near = least if r.strength < least else MOST_STRENGTH
        allowed = f"{least:g} to {MOST_STRENGTH:g}"
        raise _bad(job, "strength", f"{r.strength:g} is no strength of {r.kind!r}", allowed, f"strength = {near:g}")
    if r.forced and config.moe is None:
        raise _bad(job, "forced", f"nothing to force: {config.source} has no experts", "false", "leave it out")
    if r.kind != "balanced" and config.moe is None:
        raise _bad(job, "kind", f"{r.kind!r}, but {config.source} has no experts", "balanced", "leave it out")


def _bad(job: Job, key: str, message: str, allowed: str | None, fix: str) -> PiperError:
    return PiperError(ErrorKind.JOB, message, key=f"routing.{key}", file=job.file, allowed=allowed, suggestion=fix)
