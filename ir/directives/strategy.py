"""A strategy: directives in order, applied as a fold and checked after each."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import groupby
from typing import Protocol

from ir.directives.place import PlaceDirective, placed
from ir.directives.shard import ShardDirective, sharded
from ir.graph.graph import Graph, check

Rewrite = Callable[[Graph], Graph]


class Directive(Protocol):
    """A checked rewrite of the graph that prints."""

    def __call__(self, graph: Graph) -> Graph:
        """The graph after the rewrite."""

    def json(self) -> dict[str, object] | list[dict[str, object]]:
        """As in a strategy file."""


def apply(graph: Graph, strategy: Iterable[Directive]) -> Graph:
    """Fold the directives over the graph, checking the rules that are always true after each; places of whole stages,
    which break none, count as one, and so do shards one behind the other."""
    before: Graph | None = None

    def together(d: Directive) -> type | None:
        whole = isinstance(d, PlaceDirective) and d.whole(graph)
        return type(d) if whole or isinstance(d, ShardDirective) else None

    for kind, some in groupby(strategy, together):
        rewrites: Iterable[Rewrite] = some
        if kind is PlaceDirective:
            rewrites = [partial(placed, directives=[d for d in some if isinstance(d, PlaceDirective)])]
        elif kind is ShardDirective:
            rewrites = [partial(sharded, directives=[d for d in some if isinstance(d, ShardDirective)])]
        for rewrite in rewrites:
            graph = rewrite(graph)
            check(graph, before)
            before = graph
    return graph
