"""Weights that are kept in another format than products read them in: who casts them, and what the copies weigh."""

from dataclasses import dataclass, replace

import numpy as np

from ir.core.ops import Pass
from ir.core.order import IntArray
from ir.core.work import WEIGHTS_CAST, DType, Kernel, KernelKind
from ir.graph.classes import recomputed
from ir.graph.graph import Graph, GraphNode
from ir.graph.sync import buckets, keep_buckets
from ir.graph.zero import per_microbatch
from ir.workload.params import local_numel
from ir.workload.part import Param, Part

PartKey = tuple[int, str]  # stage, part


@dataclass(frozen=True, slots=True)
class PartCasts:
    """What a part casts on one device. count: weights. bytes: of all copies; largest: of one, in either format. moved:
    by casting all, there or back.
    """

    count: int
    bytes: int
    largest: tuple[int, int]
    moved: int
    dtype: DType

    def kernel(self) -> Kernel:
        """One launch for each weight."""
        return Kernel(KernelKind.MEMORY, 0, self.moved // self.count, self.dtype, (), WEIGHTS_CAST, self.count)


def with_casts(graph: Graph) -> Graph:
    """The graph with casts in front of the forwards that need them, and of gradients behind the products that make
    them: one after the other, as the copies of a forward that keeps nothing.

    A copy stays while any microbatch's backward will read it (`cast_spans`), and serves the forwards that come
    meanwhile; they are priced for it all the same, as autocast's are, whose copies are each forward's own.
    """
    casts = weight_casts(graph)
    if not casts:
        return graph
    again = recomputed(graph)
    works: dict[tuple[int, PartCasts], tuple[Kernel, ...]] = {}  # equal parts go on sharing one

    def casting(n: GraphNode) -> GraphNode:
        key = n.stage, n.part
        found = casts.get(key)
        if found is None or not (n.kind in (Pass.F, Pass.W) or (n.kind is Pass.R and key in again)):
            return n
        back, (copy, gradient) = n.kind is Pass.W, found.largest
        ways = (*n.work, found.kernel()) if back else (found.kernel(), *n.work)
        beside = gradient if back else copy if n.kind is Pass.F and key in again else 0
        return n.doing(works.setdefault((id(n.work), found), ways), n.inline, n.writes, n.workspace + beside)

    full = replace(graph, nodes=tuple(casting(n) for n in graph.nodes))
    keep_buckets(full, buckets(graph), graph)
    return full


def weight_casts(graph: Graph) -> dict[PartKey, PartCasts]:
    """The casts of each part that has any. What ZeRO-3 gathers comes in a format of its own."""
    if graph.source is None:
        return {}
    formats = {far: graph.source.weight_formats(far) for far in (False, True)}
    if all(kept is read for kept, read in formats.values()):
        return {}
    far = {name for b in per_microbatch(buckets(graph)) if b.replica.zero == 3 for name in b.params}
    out: dict[PartKey, PartCasts] = {}
    for e in graph.entries:
        weights = [(local_numel(p, e.layout), *formats[p.name in far]) for p in e.part.params if _read(e.part, p)]
        cast = [(numel, kept.bytes, read) for numel, kept, read in weights if kept is not read]
        if cast:
            copies = [numel * read.bytes for numel, _, read in cast]
            whole = [numel * kept for numel, kept, _ in cast]
            largest, moved = (max(copies), max(whole)), sum(copies) + sum(whole)
            out[e.stage, e.name] = PartCasts(len(cast), sum(copies), largest, moved, cast[0][2])
    return out


def _read(part: Part, param: Param) -> bool:
    """Whether products read a parameter: not what is looked up, nor vectors, which are cast where they are added."""
    return len(param.shape) > 1 and (not param.table or part.name == "head")


def cast_spans(graph: Graph) -> tuple[IntArray, IntArray, IntArray]:
    """When copies are held: ([node] 1 where a microbatch begins to hold its part's, -1 where it ends, [node] the part,
    [part] bytes). Parts are those of `weight_casts`, in its order.
    """
    casts = weight_casts(graph)
    again = recomputed(graph) if casts else frozenset()
    number = {key: i for i, key in enumerate(casts)}
    turns, parts = np.zeros((2, len(graph.nodes)), dtype=np.int64)
    for i, n in enumerate(graph.nodes) if casts else ():
        key = n.stage, n.part
        if key in number and n.kind in (Pass.W, Pass.R if key in again else Pass.F):
            turns[i], parts[i] = -1 if n.kind is Pass.W else 1, number[key]
    return turns, parts, np.array([x.bytes for x in casts.values()], dtype=np.int64)
