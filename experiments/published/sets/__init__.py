"""All data sets, in the order of the page."""

from __future__ import annotations

from experiments.published.rows import DataSet
from experiments.published.sets import gpt, llama, megatron

SETS: tuple[DataSet, ...] = (*gpt.SETS, *llama.SETS, *megatron.SETS)


def chosen(names: str) -> tuple[DataSet, ...]:
    """Those named, separated by commas; all where none is.

    >>> [s.name for s in chosen("dgxc")]
    ['dgxc']
    """
    known = {s.name: s for s in SETS}
    return tuple(known[n] for n in names.split(",")) if names else SETS
