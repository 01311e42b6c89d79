"""`split`, `place`, `order`: a dimension of microbatches, the devices of each node, what each program does when."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ir.core.errors import PiperError, directive_error
from ir.core.filters import DirectiveFilter
from ir.core.ops import Pass
from ir.core.order import Order
from ir.directives.rows import orders_from_rows
from ir.directives.select import select
from ir.graph.graph import Graph, GraphNode, MicrobatchSpan


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
        return directive_error(f"{self}: {why}", fix=fix)


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
        return placed(graph, [self])

    def spans(
        self, node: GraphNode, now: tuple[MicrobatchSpan, ...], mbs: tuple[range, ...]
    ) -> tuple[MicrobatchSpan, ...]:
        """A node's spans, from those it has now. Raises PiperError (directive): a microbatch is somewhere already."""
        for span in now:
            taken = next((m for r in mbs for m in r if span.mbs is not None and m in span.mbs), None)
            if taken is not None:
                raise directive_error(
                    f"{self}: {node.text(taken)} is already on group {span.group}",
                    "one group for each pass of a microbatch",
                    "drop one of the two place directives, or give them disjoint microbatches",
                )
        spans = (*now, *(MicrobatchSpan(r, self.group) for r in mbs))
        return tuple(sorted(spans, key=lambda s: (s.mbs.start if s.mbs else 0, s.group)))

    def whole(self, graph: Graph) -> bool:
        """Whether it takes stages as a whole, so that no part can come to stand apart from its stage."""
        return self.filter.passes is None and {*self.filter.tags} <= {"PP", graph.dim}


def placed(graph: Graph, directives: Sequence[PlaceDirective]) -> Graph:
    """The graph after some places, one after the other, each node made once."""
    nodes, spans = graph.nodes, [n.spans for n in graph.nodes]
    stages: dict[tuple[range, ...], list[int]] = {}
    for i, n in enumerate(nodes):
        if not n.once and "PP" in n.tags:
            stages.setdefault((range(n.tags["PP"], n.tags["PP"] + 1),), []).append(i)
    for d in directives:
        mbs = d.filter.microbatches(graph.dim, graph.mbs)
        match = dict(d.filter.matches).get("PP")
        known = stages.get(match.ranges) if match is not None and not match.negated and d.whole(graph) else None
        shared: dict[int, tuple[MicrobatchSpan, ...]] = {}  # of nodes placed together, and what becomes of them
        for i in known if known and mbs else select(graph, d.filter, str(d)):
            now = spans[i]
            if id(now) not in shared:
                shared[id(now)] = d.spans(nodes[i], now, mbs)
            spans[i] = shared[id(now)]
    return replace(graph, nodes=tuple(n if n.spans is s else n.at(s) for n, s in zip(nodes, spans, strict=True)))


@dataclass(frozen=True)
class OrderDirective:
    """Attach an order to programs. It adds no edge: order is a value beside the graph.

    table: complete orders by group (a schedule). rows: Piper's rows, each a sequence of filter groups; what they leave
    open is completed by dataflow. A filter group of two or more is an interleave group.
    """

    table: tuple[tuple[int, Order], ...] = ()
    rows: tuple[tuple[tuple[DirectiveFilter, ...], ...], ...] = ()

    def __str__(self) -> str:
        if self.table:
            return f"order(groups {', '.join(str(g) for g, _ in self.table)})"
        return f"order({' -> '.join('{' + '; '.join(map(str, g)) + '}' for g in self.rows[0][:3])} …)"

    def json(self) -> list[dict[str, object]]:
        """The directive as in a strategy file: one object per group or row."""
        tables: list[dict[str, object]] = [{"op": "order", "group": g, "cells": o.cells()} for g, o in self.table]
        rows: list[dict[str, object]] = [
            {"op": "order", "filters": [[f.json() for f in group] for group in row]} for row in self.rows
        ]
        return [*tables, *rows]

    def __call__(self, graph: Graph) -> Graph:
        for group, _ in self.table:
            if not 0 <= group < graph.programs:
                raise directive_error(f"{self}: nothing is placed on group {group}", f"0..{graph.programs - 1}")
        orders = {**graph.orders, **dict(self.table)}
        if self.rows:
            orders.update(orders_from_rows(graph, self.rows, str(self)))
        return replace(graph, orders=orders)
