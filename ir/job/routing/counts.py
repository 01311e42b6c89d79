"""Tokens by layer, microbatch, source and expert: balanced, zipf and hot made up, others read from a file.

A source is a position: a rank's index among the ranks that run its program, in the order of ranks. All of them hold
different tokens: tp ranks too, since experts want sequence parallelism. With the default order of axes that is
`tp_rank + tp * (cp_rank + cp * dp_rank)`.
"""

from dataclasses import dataclass

import numpy as np

from ir.core.order import IntArray
from ir.graph.graph import Graph
from ir.workload.part import PlacedPart
from ir.workload.setting import PartSetting
from ir.workload.work import ConfigModelWork


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """A layer with experts. number: decoder layer; MTP modules count on behind the last. tokens: of one source."""

    number: int
    entry: PlacedPart
    tokens: int


@dataclass(frozen=True, eq=False)
class ExpertCounts:
    """Tokens that sources send to experts; equal rows are kept once.

    layers: decoder layers with experts, ascending. rows: [distinct row, expert]. at: [layer, microbatch, source] row;
    one microbatch stands for all where they are equal.
    """

    layers: tuple[int, ...]
    rows: IntArray
    at: IntArray

    @property
    def cases(self) -> int:
        """Microbatches that are told apart: 1 where all are equal."""
        return int(self.at.shape[1])

    def case(self, mb: IntArray) -> IntArray:
        """Index of microbatches in `at`; one for all where they are equal."""
        return mb if self.cases > 1 else np.zeros(1, dtype=np.int64)

    def tokens(self, layer: int, mb: int = 0) -> IntArray:
        """[source, expert] tokens of a decoder layer."""
        return np.asarray(self.rows[self.at[self.layers.index(layer), mb if self.cases > 1 else 0]])


def moe_layers(graph: Graph, source: ConfigModelWork) -> tuple[ExpertLayer, ...]:
    """The layers with experts, ascending, under the layouts that the graph's directives gave them."""
    config, out = source.config, []
    for e in graph.entries:
        if e.part.name == "experts":
            tags = e.chunk.tags
            number = tags["L"] if "L" in tags else config.layers + tags["MTP"]
            tokens = PartSetting(config, e.layout, source.shape, source.precision).stream
            out.append(ExpertLayer(number, e, tokens))
    return tuple(sorted(out, key=lambda x: x.number))


def distinct(rows: IntArray) -> tuple[IntArray, IntArray]:
    """(the different rows in the order of their first, [row] which one it is).

    >>> values, which = distinct(np.array([[2, 1], [0, 5], [2, 1]]))
    >>> values.tolist(), which.tolist()
    ([[2, 1], [0, 5]], [0, 1, 0])
    """
    rows = np.ascontiguousarray(rows)
    seen: dict[bytes, int] = {}
    which = np.array([seen.setdefault(r.tobytes(), len(seen)) for r in rows], dtype=np.int64)
    first = np.empty(len(seen), dtype=np.int64)
    first[which[::-1]] = np.arange(len(rows))[::-1]
    return rows[first], which
