"""Which buckets ZeRO-2 and ZeRO-3 keep sharded through the step, and which nodes read or write them."""

from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache

from ir.core.ops import Pass
from ir.graph.graph import COMPUTE, Graph
from ir.graph.sync import Bucket


def per_microbatch(found: tuple[Bucket, ...]) -> list[Bucket]:
    """Buckets whose gradients are reduced after each microbatch."""
    return [b for b in found if b.replica.zero >= 2 and b.ranks > 1]


def part_nodes(graph: Graph, b: Bucket, passes: frozenset[Pass] = frozenset(Pass)) -> list[int]:
    """The compute nodes of the parts that hold a bucket's parameters."""
    parts = [(graph.entries[k].stage, graph.entries[k].name) for k in b.members]
    nodes = sorted(i for part in parts for i in compute_nodes(graph).get(part, ()))
    return [i for i in nodes if graph.nodes[i].kind in passes]


@lru_cache(maxsize=2)  # a graph is equal only to itself
def compute_nodes(graph: Graph) -> Mapping[tuple[int, str], list[int]]:
    """The compute nodes of each (stage, part)."""
    out: dict[tuple[int, str], list[int]] = defaultdict(list)
    for i, n in enumerate(graph.nodes):
        if n.stream == COMPUTE:
            out[n.stage, n.part].append(i)
    return out


def readers(graph: Graph, b: Bucket) -> list[int]:
    """The compute nodes that read a bucket's weights: all passes of the parts that hold them, and the backward of
    those that make again what was made with them."""
    more = (i for name in b.params for i in _borrowers(graph).get(name, ()))
    return sorted({*part_nodes(graph, b), *more})


@lru_cache(maxsize=2)
def _borrowers(graph: Graph) -> Mapping[str, list[int]]:
    """The compute nodes whose pass may make a norm's output again with a parameter of another part."""
    out: dict[str, list[int]] = defaultdict(list)
    for e in graph.entries:
        if e.part.borrowed and graph.recompute.makes_norm(e.chunk, e.part.name):
            found = compute_nodes(graph).get((e.stage, e.name), ())
            for name in e.part.borrowed:
                out[name] += [i for i in found if graph.nodes[i].kind is not Pass.F]
    return out


def gathered(graph: Graph, found: tuple[Bucket, ...]) -> dict[int, list[Bucket]]:
    """The ZeRO-3 buckets that each compute node reads its weights from."""
    out: dict[int, list[Bucket]] = defaultdict(list)
    for b in per_microbatch(found):
        if b.replica.zero == 3:
            for i in readers(graph, b):
                out[i].append(b)
    return out


def sharded_of(graph: Graph, found: tuple[Bucket, ...]) -> Mapping[int, frozenset[str]]:
    """The buckets whose gathered weights (ZeRO-3) a compute node reads, or whose gradients (ZeRO-2) it makes, by name.

    An op holds nodes of equal ones only: so that it waits for no gather but its own, and so that a layer's gradients
    leave when they are whole, not with those of a whole stage.
    """
    out: dict[int, frozenset[str]] = defaultdict(frozenset)
    for b in per_microbatch(found):
        for i in readers(graph, b) if b.replica.zero == 3 else part_nodes(graph, b, frozenset({Pass.W})):
            out[i] |= {b.key}
    return out
