"""`[routing]` of a job: which keys go together, and the counts they describe, made up from a seed or read."""

import hashlib
from collections.abc import Sequence
from functools import cache

import numpy as np

from ir.core.errors import PiperError, job_error
from ir.core.order import FloatArray, IntArray
from ir.job import Job
from ir.job.routing.counts import ExpertCounts, ExpertLayer
from ir.job.routing.recorded import read_counts
from ir.workload.config.spec import ExpertConfig, ModelConfig

MOST_STRENGTH = 1e6
MOST_EXPERTS = 100_000  # of a layer, each of which is ranked and counted by itself; half a second


def check_routing(job: Job, config: ModelConfig) -> None:
    """Refuse `[routing]` keys that contradict each other or the model.

    Raises PiperError (job): a file without kind = "file" or the other way round, a strength out of range, uneven
    or forced routing of a model without experts, uneven routing of too many or of products that are not grouped.
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
    if config.model_type == "captured" and (r.forced or r.kind != "balanced"):
        raise _bad(job, "kind", "a captured module's routers choose by themselves", "balanced", "leave it out")
    if r.forced and config.moe is None:
        raise _bad(job, "forced", f"nothing to force: no layer of {config.source} has experts", "false", "leave it out")
    if r.kind != "balanced" and config.moe is None:
        raise _bad(job, "kind", f"{r.kind!r}, but no layer of {config.source} has experts", "balanced", "leave it out")
    if r.kind != "balanced" and config.moe is not None and config.moe.experts > MOST_EXPERTS:
        message = f"{config.moe.experts} experts are too many to be counted one by one"
        raise _bad(job, "kind", message, f"balanced, or at most {MOST_EXPERTS} experts", 'routing.kind = "balanced"')
    if r.kind != "balanced" and not job.costs.grouped_gemm:
        message = "experts that run one after the other are priced with equal rows"
        raise _bad(job, "kind", message, "balanced, or costs.grouped_gemm = true", "leave costs.grouped_gemm out")


def _bad(job: Job, key: str, message: str, allowed: str | None, fix: str) -> PiperError:
    return job_error(f"routing.{key}", message, fix, allowed, file=job.file)


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


def zipf(experts: int, strength: float) -> FloatArray:
    """Logarithms of popularities that fall as rank**-strength, most popular first.

    >>> np.exp(zipf(4, 1.0)).round(3).tolist()
    [1.0, 0.5, 0.333, 0.25]
    """
    return np.asarray(-strength * np.log(np.arange(1, experts + 1)))


def hot(experts: int, strength: float) -> FloatArray:
    """Logarithms of popularities: one expert `strength` times as popular as each of the others, which are equal.

    >>> np.exp(hot(4, 3.0)).round(3).tolist()
    [3.0, 1.0, 1.0, 1.0]
    """
    out = np.zeros(experts)
    out[0] = np.log(strength)
    return out


def spread(popularity: FloatArray, tokens: int, top_k: int) -> IntArray:
    """tokens * top_k copies over experts in proportion to exp(popularity), which falls; none gets more than `tokens`.

    A token goes to `top_k` different experts, so that no expert sees more copies than there are tokens. What is too
    much for one is shared by the others in proportion. Whole numbers by largest remainder, the more popular first.

    >>> spread(np.log([6.0, 1.0, 1.0]), 10, 1).tolist(), spread(np.log([6.0, 1.0, 1.0]), 10, 2).tolist()
    ([8, 1, 1], [10, 5, 5])
    """
    exact = np.full(len(popularity), float(tokens))
    for full in range(top_k):
        weight = np.exp(popularity[full:] - popularity[full])
        share = tokens * (top_k - full) / weight.sum()
        if share <= tokens:
            exact[full:] = share * weight
            break
    else:
        exact[top_k:] = 0.0
    out = np.minimum(np.floor(exact), tokens).astype(np.int64)
    order = np.argsort(out - exact, kind="stable")
    open_ = order[out[order] < tokens]
    out[open_[: tokens * top_k - int(out.sum())]] += 1
    return np.asarray(out)


def ranking(experts: int, layer: int, seed: int) -> IntArray:
    """Experts of a layer, most popular first: in the order of SHA-256 of "seed/layer/expert", the same everywhere.

    >>> sorted(ranking(4, 0, 1).tolist()), ranking(8, 0, 1).tolist() == ranking(8, 1, 1).tolist()
    ([0, 1, 2, 3], False)
    """
    keys = [hashlib.sha256(f"{seed}/{layer}/{e}".encode()).digest() for e in range(experts)]
    return np.array(sorted(range(experts), key=keys.__getitem__), dtype=np.int64)
