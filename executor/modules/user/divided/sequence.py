"""Sequence parallelism of a user's module: between the linears that tp divides, each of its ranks has some tokens.

A value that depends on token ids is one of three: *apart*, of all tokens, a part of it on each rank, as tp divides it;
of a rank's *own* tokens; or *full*, the same on every rank, also behind features that were gathered (`shared`).
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, fx

from executor.modules.parallel import Moved, across, gather_tokens, own, whole
from executor.modules.user.annotate import At, chunk_of
from executor.modules.user.divided.regions import (
    Between,
    along,
    apart_from,
    floating,
    laid_out,
    of_parameters_alone,
    of_region,
)
from executor.modules.user.divided.shared import CHECKS, SharedTokens, refused, resize, shared_tokens
from executor.modules.user.exports.writes import times_written
from executor.parallel.inline import RankRegion
from executor.parallel.token_reads import TokenDims
from ir.core.errors import job_error

KEY, FIX = "parallel.sequence_parallel", "sequence_parallel = false"


def tokens_between(length: int, region: RankRegion) -> int:
    """How many tokens of sequences a rank has between regions, that has `length` in them. Raises PiperError (job)."""
    if length % region.tp.size:
        message = f"tp = {region.tp.size} ranks share the {length} tokens of a sequence between what it divides"
        raise job_error("parallel.tp", message, FIX, f"divisors of {length}")
    return length // region.tp.size


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

    def made(full: Collection[fx.Node]) -> SharedTokens:
        return SharedTokens(pairs, apart, again, TokenDims(region.tp.size, length, CHECKS, 1), True, full)

    shared = shared_tokens(root.graph, made)
    if (wrong := shared.wrong(root.graph)) is not None:
        raise refused(wrong, KEY, FIX)
    found = {n: (*shared.dims.found[n], n.meta["val"]) for n in shared.own if n in shared.dims.found}
    edges = list(_crossed(root, shared, again))
    at |= {part: at[reader] for part, reader in resize(root.graph, shared, partial(_own_tokens, region))}
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
            value = like = found[read][2] if read in found else read.meta["val"]
            if move in (own, stretched):
                value, like = value.narrow(dim, 0, value.shape[dim] // region.tp.size), shared.exported(read)
            with graph.inserting_before(node):
                here = laid_out(along(of_region(move, region), dim, repeats), like)
                made[key] = graph.call_function(here, (read,))
            at[made[key]] = at[node if node.op != "output" else read]
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
