"""A layer whose experts are spread over ranks, as the executor cuts it: what its units give and read, by name.

The plan's exchanges stand between units: they take a unit's outputs, and what arrives is read under their own names.
"""

from collections.abc import Mapping

from ir.graph.graph import COUNTS, Graph
from ir.workload.parts.moe import spread

# Which outputs of a router are read as what: rows with their weights; their order; how many; tokens as they were.
PORTS: Mapping[str, tuple[int, ...]] = {
    "router.rows": (0, 1),
    "router.order": (2,),
    f"router.{COUNTS}": (3,),
    "router.tokens": (4,),
}
# What an exchange carries in forward.
CARRIES = {COUNTS: f"router.{COUNTS}", "dispatch": "router.rows", "combine": "experts"}
READS = {"experts": ("dispatch",), "shared": ("router.tokens",), "add": ("combine", "router.order")}


def ports(chunk: str, *, shared: bool) -> dict[str, tuple[int, ...]]:
    """Of a chunk's router. shared: whether there are experts that read tokens.

    >>> ports("l3", shared=False)
    {'l3.router.rows': (0, 1), 'l3.router.order': (2,), 'l3.router.counts': (3,)}
    """
    return {f"{chunk}.{name}": at for name, at in PORTS.items() if shared or name != "router.tokens"}


def reads(part: str, before: tuple[str, ...]) -> tuple[str, ...]:
    """What a part of such a layer reads, which reads `before` where nothing is spread; names without their chunk.

    >>> reads("add", ("experts", "shared", "attn")), reads("attn", ("",))
    (('combine', 'router.order', 'shared', 'attn'), ('',))
    """
    return (*READS[part], *before[1:]) if part in READS else before


def spread_chunks(graph: Graph) -> tuple[str, ...]:
    """The chunks whose experts are on several ranks, so that rows travel."""
    return tuple(e.chunk.name for e in graph.entries if e.part.name == "experts" and spread(e.layout))
