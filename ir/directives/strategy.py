"""A strategy: directives in order, applied as a fold and checked after each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ir.graph.graph import Graph, check


class Directive(Protocol):
    """A checked rewrite of the graph that prints."""

    def __call__(self, graph: Graph) -> Graph:
        """The graph after the rewrite."""
        ...

    def json(self) -> dict[str, object] | list[dict[str, object]]:
        """As in a strategy file."""
        ...


def apply(graph: Graph, strategy: Iterable[Directive]) -> Graph:
    """Fold the directives over the graph, checking the rules that are always true after each."""
    before: Graph | None = None
    for directive in strategy:
        graph = directive(graph)
        check(graph, before)
        before = graph
    return graph
