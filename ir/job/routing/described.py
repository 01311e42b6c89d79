"""The counts that a job's `[routing]` describes: made up from a seed, or read from a file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from ir.core.order import IntArray
from ir.job import Job
from ir.job.routing.counts import ExpertCounts, ExpertLayer
from ir.job.routing.recorded import read_counts
from ir.job.routing.skew import hot, ranking, spread, zipf
from ir.workload.config.spec import ExpertConfig, ModelConfig


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
