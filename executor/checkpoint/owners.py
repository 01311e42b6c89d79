"""Which of the ranks that hold the same elements of a parameter writes them: exactly one, known without asking."""

from __future__ import annotations

from ir.core.mesh import DENSE, EXPERT
from ir.graph.graph import Graph
from ir.graph.sync import Bucket, buckets
from ir.plan.places import Places, sharers


def written(graph: Graph, places: Places, rank: int) -> frozenset[str]:
    """The parameters whose piece on this rank is this rank's to write.

    Ranks that hold the same part of a parameter (copies, and ranks that no axis of its cuts tells apart) stand first in
    one place only: index 0 on every axis that neither cuts it nor shards it, in the first program that owns it.
    """
    place, out = places.mesh.coordinates(rank), set()
    entries = {p.name: (p, e.layout) for e in reversed(graph.entries) for p in e.part.params}
    for b in buckets(graph):
        if places.program(rank) not in b.owners or not _first(b, places, rank):
            continue
        for name in b.params:
            param, layout = entries[name]
            cut = {axis for axis in param.sharded if getattr(layout, axis) > 1}
            view = EXPERT if param.expert else DENSE
            if all(place[axis] == 0 for axis in view if axis not in cut and axis not in b.axes):
                out.add(name)
    return frozenset(out)


def _first(b: Bucket, places: Places, rank: int) -> bool:
    """Whether what this rank updates of a bucket is no copy of what a rank before it does."""
    members = sharers(b, places, rank)
    zero = b.replica.zero if len(members) > 1 else 0
    first = b.owners[0] == places.program(rank)
    return zero == 1 or (first and (zero > 1 or members.index(rank) == 0))
