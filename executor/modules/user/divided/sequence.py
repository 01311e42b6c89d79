"""Sequence parallelism of a user's module: between the linears that tp divides, each of its ranks has some tokens.

Forward is exported for as many tokens as a rank has there, too. A value that depends on token ids is one of three:
*apart*, of all tokens, a part of it on each rank, as tp divides it; of a rank's *own* tokens, where each op is known to
treat tokens by themselves; or *full*, of all tokens, the same on every rank, where it is not, and behind features that
were gathered. What is own takes its sizes from the second graph, and its stretches of what is there for all tokens.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, fx

from executor.modules.parallel import Moved, across, gather_tokens, own, whole
from executor.modules.user.annotate import At, chunk_of
from executor.modules.user.divided.linears import ENDS, FEATURES, LEAVE
from executor.modules.user.divided.regions import Between, along, apart_from, floating, of_parameters_alone, of_region
from executor.modules.user.divided.tokens import (
    CHECKS,
    MADE,
    TYPED,
    of_tokens,
    refused,
    stretch_constants,
    with_sizes,
)
from executor.modules.user.routed import MARK
from executor.modules.user.writes import storages, times_written, written, written_otherwise
from executor.parallel.divided_reads import ShardMismatch, shape_of
from executor.parallel.inline import RankRegion
from executor.parallel.token_reads import ATTENTION, OTHERWISE, TokenDims
from ir.core.errors import job_error

KEY, FIX = "parallel.sequence_parallel", "sequence_parallel = false"
AWAY = "is written where ranks have other tokens than what writes it"
EXPERTS = "are sent rows of other tokens than a rank's own"


def tokens_between(length: int, region: RankRegion) -> int:
    """How many tokens of sequences a rank has between regions, that has `length` in them. Raises PiperError (job)."""
    if length % region.tp.size:
        message = f"tp = {region.tp.size} ranks share the {length} tokens of a sequence between what it divides"
        raise job_error("parallel.tp", message, FIX, f"divisors of {length}")
    return length // region.tp.size


def pairs_of(root: fx.GraphModule, few: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Of what depends on token ids, nodes for all tokens and the same for a rank's between regions.

    Raises PiperError (model): the module goes another way for fewer.
    """
    nodes, others = of_tokens(root.graph), of_tokens(few)
    for node, other in zip(nodes, others, strict=False):
        if node.op != other.op or (node.op == "call_function" and node.target != other.target):
            raise refused(ShardMismatch(node, OTHERWISE), KEY, FIX)
    if len(nodes) != len(others):
        raise refused(ShardMismatch(nodes[-1], OTHERWISE), KEY, FIX)
    return dict(zip(nodes, others, strict=True))


@dataclass
class SharedTokens:
    """Which tokens each node's value is of, found node by node, in their order.

    pairs: of what depends on token ids, nodes for all tokens and for a rank's own. apart: as tp divides them. again:
    what depends on no parameter and no activation. dims: where tokens lie, also in what is of all tokens.
    """

    pairs: Mapping[fx.Node, fx.Node]
    apart: Collection[fx.Node]
    again: Collection[fx.Node]
    dims: TokenDims
    own: dict[fx.Node, None] = field(default_factory=dict)
    full: dict[fx.Node, None] = field(default_factory=dict)

    def go(self, node: fx.Node) -> None:
        """One node."""
        if node.op == "output" or node in self.again or not (node in self.pairs or self._reads_tokens(node)):
            return
        if node not in self.apart:
            (self.own if self._is_own(node) else self.full)[node] = None
        if node not in self.own:
            self._place(node)

    def _reads_tokens(self, node: fx.Node) -> bool:
        return node.target not in MADE | TYPED and any(self.kind(x) for x in node.all_input_nodes)

    def kind(self, node: fx.Node) -> str:
        """Own, full or apart; "" of what is of no token."""
        kinds = {"own": self.own, "full": self.full, "apart": self.apart}
        return next((name for name, nodes in kinds.items() if node in nodes), "")

    def _is_own(self, node: fx.Node) -> bool:
        short, reads = self.pairs.get(node), [x for x in node.all_input_nodes if x in self.own or x in self.full]
        if short is None or node.target in (FEATURES, ATTENTION) or (reads and all(x in self.full for x in reads)):
            return False
        if node.target is LEAVE:
            self._place(node)
            return self.dims.found.get(node, (-1,))[0] == len(shape_of(node) or ()) - 2
        placed = all(x in self.dims.found for x in reads if x in self.full)
        if placed and not self.dims.follow(node, short):
            return True
        for x in node.all_input_nodes:
            self.dims.entered.pop((node, x), None)
        return False

    def _place(self, node: fx.Node) -> None:
        """Where tokens lie in what is computed of all of them, as far as that can be told."""
        short, dims = self.pairs.get(node), self.dims
        if short is None:
            return
        reads = {x: at for x in node.all_input_nodes if (at := dims.found.get(x)) is not None}
        split = [dims.several[x] for x in node.all_input_nodes if x in dims.several]
        if not dims.place(node, short, reads, split):
            return
        there, here = shape_of(node) or (), shape_of(short) or ()
        differ = [i for i, (a, b) in enumerate(zip(there, here, strict=False)) if a != b]
        if len(there) == len(here) and len(differ) == 1 and there[differ[0]] == dims.length:
            dims.found[node] = differ[0], 1  # as behind scores, which lie along tokens twice

    def wrong(self, graph: fx.Graph) -> ShardMismatch | None:
        """What no rank could do of the tokens it has."""
        base = storages(graph.nodes)
        for n in graph.nodes:
            if n.target is MARK and n not in self.own:
                return ShardMismatch(n, EXPERTS)
            if n not in self.own and any(x in self.own and x in self.dims.several for x in n.all_input_nodes):
                return ShardMismatch(n, OTHERWISE)  # another of several values, for fewer tokens
            for t in written(n):
                if self.kind(n) != self.kind(base[t]):
                    return ShardMismatch(n, AWAY)
        away = written_otherwise(graph.nodes, self.kind)
        return None if away is None else ShardMismatch(away, AWAY)


def share_between(
    root: fx.GraphModule,
    at: At,
    pairs: Mapping[fx.Node, fx.Node],
    again: Collection[fx.Node],
    cut: Collection[int],
    region: RankRegion,
    length: int,
) -> Between:
    """Make what stands between regions that of a rank's tokens, as far as it may be. at: the scopes of nodes, added to.
    again: what depends on no parameter and no activation. cut: parameters that tp divides, by id. length: of the tokens
    in regions. Returns where tokens lie, in what is a rank's own.

    Raises PiperError (model): something is written that is of other tokens; experts are given all of them.
    """
    apart = {n for n in apart_from(root, cut) if n in pairs or any(x in pairs for x in n.all_input_nodes)}
    shared = SharedTokens(pairs, apart, again, TokenDims(region.tp.size, length, CHECKS, 1))
    for node in root.graph.nodes:
        shared.go(node)
    if (wrong := shared.wrong(root.graph)) is not None:
        raise refused(wrong, KEY, FIX)
    found = {n: (*shared.dims.found[n], n.meta["val"]) for n in shared.own if n in shared.dims.found}
    edges = list(_crossed(root, shared, again))
    _resize(root.graph, at, shared, region)
    _cross(root.graph, at, edges, found, shared, region)
    return found


def _crossed(
    root: fx.GraphModule, shared: SharedTokens, again: Collection[fx.Node]
) -> Iterator[tuple[fx.Node, fx.Node, Callable[..., Tensor]]]:
    """(reader, what it reads, what is to stand between): where a value is read that is of other tokens."""
    alone = of_parameters_alone(root, again)
    for node in root.graph.nodes:
        for read in node.all_input_nodes:
            value = read.meta.get("val")
            counted = isinstance(value, Tensor) and not floating(value)
            all_tokens = node in shared.full or node.op == "output" or (node in shared.apart and counted)
            if read in shared.own and all_tokens:
                yield node, read, gathered if counted else whole
            elif read in shared.full and node in shared.own:
                yield node, read, stretched if counted else own
            elif read in alone and node in shared.full:
                yield node, read, of_every_rank


def _resize(graph: fx.Graph, at: At, shared: SharedTokens, region: RankRegion) -> None:
    """Give what is a rank's own the sizes and the constants of its tokens."""
    for node in shared.own:
        short = shared.pairs[node]
        node.meta["val"] = short.meta.get("val")
        if node.op == "call_function" and node.target not in ENDS:
            node.args, node.kwargs = with_sizes(node, short)
    for node in shared.own:
        for part in stretch_constants(graph, node, shared.dims, partial(_own_tokens, region)):
            at[part] = at[node]


def _cross(
    graph: fx.Graph,
    at: At,
    edges: Collection[tuple[fx.Node, fx.Node, Callable[..., Tensor]]],
    found: Between,
    shared: SharedTokens,
    region: RankRegion,
) -> None:
    """Put what has been found to stand between a value and its reader there, once for the readers of a chunk."""
    chunks, made, times = chunk_of(graph, at), dict[tuple[object, ...], fx.Node](), times_written(graph.nodes)
    for node, read, move in edges:
        chunk = chunks.get(node) or chunks[read]
        key = (read, chunk, move.__name__, times[node, read])
        if key not in made:
            dim, repeats = (-2, 1) if move is of_every_rank else shared.dims.found[read]
            with graph.inserting_before(node):
                made[key] = graph.call_function(along(of_region(move, region), dim, repeats), (read,))
            at[made[key]] = at[node if node.op != "output" else read]
            value = found[read][2] if read in found else read.meta["val"]
            if move in (own, stretched):
                value = value.narrow(dim, 0, value.shape[dim] // region.tp.size)
            made[key].meta = {**read.meta, "val": value}
        node.replace_input_with(read, made[key])


def gathered(x: Tensor, region: RankRegion) -> Tensor:
    """Numbers and flags of every rank's tokens, which have no gradient."""
    y = gather_tokens(region.tp, x.to(torch.int32) if x.dtype is torch.bool else x)
    return y.to(x.dtype)


def stretched(x: Tensor, region: RankRegion, dim: int = -2) -> Tensor:
    """This rank's of what lies along a dim, and has no gradient, or one that is added up anyhow."""
    return x.chunk(region.tp.size, dim)[region.tp.index]


def of_every_rank(x: Tensor, region: RankRegion) -> Tensor:
    """What is made of parameters, and read by all ranks for the same: of its gradient each has a part, as of others."""
    return across(x, Tensor.detach, lambda dy: dy / region.tp.size)


def _own_tokens(region: RankRegion, dim: int) -> Moved:
    """What takes this rank's tokens, which lie along a dim."""

    def own_tokens(x: Tensor) -> Tensor:
        return stretched(x, region, dim)

    return own_tokens
