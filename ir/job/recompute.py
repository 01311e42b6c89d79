"""`[schedule] recompute` and `recompute_layers` as the model graph has them."""

import re
from collections.abc import Sequence

from ir.core.errors import job_error
from ir.graph.recompute import RecomputedLayers
from ir.job.schema import Job
from ir.workload.part import Chunk

_KEY = "schedule.recompute_layers"
_LAYER = frozenset({"mlp", "attention"})
_SLICE = re.compile(r"(\d{0,6}):(\d{0,6})(?::([1-9]\d{0,5}))?")
_ALLOWED = "how many of each stage, from its first on; a list of layers; a slice of them, as Python's: '1::2'"


def recompute_options(job: Job) -> frozenset[str]:
    """`[schedule] recompute` as options of the model graph. All parts of a layer are the layer.

    >>> from ir.job.load import job_from
    >>> sorted(recompute_options(job_from({"model": {"config": "x"}, "schedule": {"recompute": "selective"}})))
    ['scores']
    """
    match job.schedule.recompute:
        case "none":
            return frozenset()
        case "selective":
            return frozenset({"scores"})
        case str() as one:
            return frozenset({one})
        case parts:
            options = frozenset(parts)
            return (options - _LAYER) | {"full"} if options >= _LAYER else options


def recomputed_layers(job: Job, stages: Sequence[Sequence[Chunk]]) -> RecomputedLayers:
    """Which layers those options are true of, once it is known which stand on which stage.

    Raises PiperError (job): layers that the model does not have; layers of which nothing is recomputed.
    """
    options, given = recompute_options(job), job.schedule.recompute_layers
    if given is None:
        return RecomputedLayers(options)
    if not options:
        raise job_error(_KEY, "recompute = 'none': nothing of these layers is", "recompute = 'full'", "with recompute")
    each = [[c.tags["L"] for c in chunks if "L" in c.tags] for chunks in stages]
    count = sum(map(len, each))
    match given:
        case int():
            chosen = {n for layers in each for n in layers[:given]}
        case str():
            chosen = set(range(count)[_slice(given)])
        case _:
            chosen = set(given)
            if wrong := sorted(chosen - set(range(count))):
                raise job_error(_KEY, f"no layer {wrong[0]}", None, f"layers 0 to {count - 1}")
    if not chosen:
        return RecomputedLayers()
    every = len(chosen) == count and not any("MTP" in c.tags for chunks in stages for c in chunks)
    return RecomputedLayers(options, None if every else frozenset(chosen))


def _slice(text: str) -> slice:
    if (found := _SLICE.fullmatch(text)) is None:
        fix = text if text.isdigit() else "'1::2' for every second layer"
        raise job_error(_KEY, f"not layers: {text!r}", fix, _ALLOWED)
    return slice(*(int(n) if n else None for n in found.groups()))
