"""Who runs what: `ir.plan.places`, under the name that ranks know it by; and how parts must be divided to be run."""

from __future__ import annotations

from ir.core.errors import ErrorKind, PiperError
from ir.graph.graph import Graph
from ir.plan.places import RankPlacement

__all__ = ["RankPlacement", "check_divided"]


def check_divided(graph: Graph) -> None:
    """Raise PiperError where parts are divided over tp or cp otherwise than all alike, over all of the mesh."""
    sizes = (1, 1) if graph.mesh is None else tuple(graph.mesh.sizes[a] for a in ("tp", "cp"))
    found = {(e.layout.tp, e.layout.cp, e.layout.sequence_parallel) for e in graph.entries}
    if len(found) > 1 or any(layout[:2] != sizes for layout in found):
        divided = ", ".join(f"{tp}·{cp}" for tp, cp, _ in sorted(found))
        raise PiperError(
            ErrorKind.DIRECTIVE,
            f"parts divided over {divided} ranks of tp·cp = {sizes[0]}·{sizes[1]} are simulated, but not executed",
            allowed="all parts divided alike",
            suggestion="shard with the filter {}, which matches everything",
        )
