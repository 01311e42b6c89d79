"""All data sets, in the order of the page."""

from __future__ import annotations

from experiments.published import sets_gpt, sets_llama, sets_megatron
from experiments.published.rows import DataSet

SETS: tuple[DataSet, ...] = (*sets_gpt.SETS, *sets_llama.SETS, *sets_megatron.SETS)


def chosen(names: str) -> tuple[DataSet, ...]:
    """Those named, separated by commas; all where none is.

    >>> [s.name for s in chosen("dgxc")]
    ['dgxc']
    """
    known = {s.name: s for s in SETS}
    return tuple(known[n] for n in names.split(",")) if names else SETS
