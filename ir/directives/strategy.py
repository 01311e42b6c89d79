"""A strategy: directives in order, applied as a fold and checked after each."""

from collections.abc import Iterable
from functools import partial
from itertools import groupby
from typing import Protocol

from ir.directives.place import PlaceDirective, placed
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
    """Fold the directives over the graph, checking the rules that are always true after each; places of whole stages,
    which break none, count as one."""
    before: Graph | None = None

    def whole_stages(d: Directive) -> bool:
        return isinstance(d, PlaceDirective) and d.whole(graph)

    for whole, some in groupby(strategy, whole_stages):
        places = partial(placed, directives=[d for d in some if isinstance(d, PlaceDirective)]) if whole else None
        for rewrite in some if places is None else (places,):
            graph = rewrite(graph)
            check(graph, before)
            before = graph
    return graph
