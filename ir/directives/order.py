"""`order`: what each program does in which order; as a table, or as Piper's rows of filters."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ir.core.errors import ErrorKind, PiperError
from ir.core.filters import DirectiveFilter
from ir.core.order import Order
from ir.directives.rows import orders_from_rows
from ir.graph.graph import Graph


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
                raise PiperError(
                    ErrorKind.DIRECTIVE,
                    f"{self}: nothing is placed on group {group}",
                    allowed=f"0..{graph.programs - 1}",
                )
        orders = {**graph.orders, **dict(self.table)}
        if self.rows:
            orders.update(orders_from_rows(graph, self.rows, str(self)))
        return replace(graph, orders=orders)
