"""`[routing]` of a job: which keys go together, and the counts they describe, made up from a seed or read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from ir.core.errors import ErrorKind, PiperError
from ir.core.order import IntArray
from ir.job import Job
from ir.job.routing.counts import ExpertCounts, ExpertLayer
from ir.job.routing.recorded import read_counts
from ir.job.routing.skew import hot, ranking, spread, zipf
from ir.workload.config.spec import ExpertConfig, ModelConfig

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


def counts_of(job: Job, config: ModelConfig, layers: Sequence[ExpertLayer], sources: int, mbs: int) -> ExpertCounts:
    """The counts that `[routing]` describes. Raises PiperError for a file that does not fit the job."""
    moe, r = config.moe, job.routing
    assert moe is not None, f"{config.source} has no experts"
    if r.kind == "file":
        return read_counts(job, moe, layers, sources, mbs)
    return made_up(r.kind, r.strength, r.seed, moe, layers, sources)


def made_up(
    kind: str, strength: float, seed: int, moe: ExpertConfig, layers: Sequence[ExpertLayer], sources: int
) -> ExpertCounts:
    """All sources and microbatches alike. Each layer has its own order of experts, drawn from the seed."""

    @cache
    def falling(tokens: int) -> IntArray:
        popularity = {"zipf": zipf, "hot": hot}[kind](moe.experts, strength)
        return spread(popularity, tokens, moe.top_k)

    rows = np.empty((len(layers), moe.experts), dtype=np.int64)
    for i, layer in enumerate(layers):
        if kind == "balanced":
            rows[i] = spread(np.zeros(moe.experts), layer.tokens, moe.top_k)
        else:
            rows[i, ranking(moe.experts, layer.number, seed)] = falling(layer.tokens)
    at = np.broadcast_to(np.arange(len(layers))[:, None, None], (len(layers), 1, sources))
    return ExpertCounts(tuple(x.number for x in layers), rows, at)
