"""`split`: give the graph a microbatch dimension."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ir.core.errors import ErrorKind, PiperError
from ir.core.filters import DirectiveFilter
from ir.core.ops import Pass
from ir.directives.select import select
from ir.graph.graph import Graph


@dataclass(frozen=True)
class SplitDirective:
    """Give every node a copy per microbatch, as an index set: the graph does not grow.

    rewrite:
        0F -> 1F   -->   0F{0..2} -> 1F{0..2}      split({}, dim="MB", mbs=3)
    """

    filter: DirectiveFilter
    dim: str
    mbs: int

    def __str__(self) -> str:
        return f"split({self.filter}, {self.dim}={self.mbs})"

    def json(self) -> dict[str, object]:
        """The directive as in a strategy file."""
        return {"op": "split", "filter": self.filter.json(), "dim_name": self.dim, "num_microbatches": self.mbs}

    def __call__(self, graph: Graph) -> Graph:
        if self.mbs < 1:
            raise self._refused(f"{self.mbs} microbatches", "num_microbatches = 1 or more")
        if graph.dim is not None:
            raise self._refused(f"the graph is already split by {graph.dim}", "one split over the whole model")
        if any(n.spans for n in graph.nodes):
            raise self._refused("nodes are already placed", "write split before place")
        hits = len(select(graph, self.filter, str(self)))
        if hits < sum(isinstance(n.kind, Pass) for n in graph.nodes):
            raise self._refused("the filter leaves part of the model out", "split({}, …): the whole model")
        return replace(graph, mbs=self.mbs, dim=self.dim)

    def _refused(self, why: str, fix: str) -> PiperError:
        return PiperError(ErrorKind.DIRECTIVE, f"{self}: {why}", suggestion=fix)
