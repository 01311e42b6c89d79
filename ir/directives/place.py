"""`place`: put the nodes that a filter selects on a group of devices."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ir.core.errors import ErrorKind, PiperError
from ir.core.filters import DirectiveFilter
from ir.directives.select import select
from ir.graph.graph import Graph, GraphNode, MicrobatchSpan


@dataclass(frozen=True)
class PlaceDirective:
    """Put chunks on a group; with a microbatch range, only for those microbatches. A second owner, a second copy.

    rewrite:
        1F        1F @ 2               place({"PP": 1}, group=2)
        1B   -->  1B @ 2

        1F        1F @ 2 (mb 0..3)     place({"PP": 1, "MB": "0..3"}, group=2)
                  1F @ 5 (mb 4..7)     place({"PP": 1, "MB": "4..7"}, group=5)      DualPipe is no more than this
    """

    filter: DirectiveFilter
    group: int

    def __str__(self) -> str:
        return f"place({self.filter}, group={self.group})"

    def json(self) -> dict[str, object]:
        """The directive as in a strategy file."""
        return {"op": "place", "filter": self.filter.json(), "group": self.group}

    def __call__(self, graph: Graph) -> Graph:
        mbs = self.filter.microbatches(graph.dim, graph.mbs)
        placed: dict[
            int, tuple[MicrobatchSpan, ...]
        ] = {}  # nodes placed together share their spans, and what becomes of them
        changed = {}
        for i in select(graph, self.filter, str(self)):
            node = graph.nodes[i]
            if id(node.spans) not in placed:
                placed[id(node.spans)] = self._spans(node, mbs)
            changed[i] = replace(node, spans=placed[id(node.spans)])
        return graph.with_nodes(changed)

    def _spans(self, node: GraphNode, mbs: tuple[range, ...]) -> tuple[MicrobatchSpan, ...]:
        for span in node.spans:
            taken = next((m for r in mbs for m in r if span.mbs is not None and m in span.mbs), None)
            if taken is not None:
                raise PiperError(
                    ErrorKind.DIRECTIVE,
                    f"{self}: {node.text(taken)} is already on group {span.group}",
                    suggestion="drop one of the two place directives, or give them disjoint microbatches",
                )
        spans = (*node.spans, *(MicrobatchSpan(r, self.group) for r in mbs))
        return tuple(sorted(spans, key=lambda s: (s.mbs.start if s.mbs else 0, s.group)))
