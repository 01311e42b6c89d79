"""Context parallelism of a user's module: each rank computes some tokens of each sequence, and attention sees all keys.

What depends on token ids is of a rank's own tokens as far as it may be (`shared`); all else (positions, rotary tables,
masks, parameters) stays as it is for whole sequences, and a rank reads its tokens' stretches of it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from executor.modules.attention.across import attend_across
from executor.modules.parallel import Moved, across
from executor.modules.user.annotate import At, chunk_of
from executor.modules.user.divided.regions import Between, along, floating, laid_out, of_region
from executor.modules.user.divided.shared import CHECKS, SharedTokens, pairs_of, refused, resize, shared_tokens
from executor.modules.user.exports.writes import storages, times_written, written
from executor.parallel.divided_reads import VIEWS, ShardMismatch, aten, module_of
from executor.parallel.inline import RankAxis, RankRegion, stretches
from executor.parallel.token_reads import ATTENTION, MIXED, TokenDims, mask_of, sees_past_only
from ir.core.errors import job_error

KEY, FIX = "parallel.cp", "cp = 1"


def tokens_of_a_rank(length: int, region: RankRegion) -> int:
    """How many tokens of sequences of `length` a rank has. Raises PiperError (job): they do not divide."""
    by = 2 * region.cp.size  # the causal mask's work is even where each has two: the i-th, the i-th to last
    if length % by:
        message = f"cp = {region.cp.size} needs {by} equal stretches of each sequence, and seq_len = {length}"
        raise job_error("parallel.cp", message, f"seq_len = {-(-length // by) * by}", f"a seq_len divisible by {by}")
    return length // region.cp.size


def share_tokens(
    root: fx.GraphModule, at: At, few: fx.Graph, again: Collection[fx.Node], region: RankRegion, length: int
) -> list[fx.Node]:
    """Make the graph of whole sequences that of a rank's tokens, as `few` is for as many; what may look at other tokens
    is done on whole sequences by every rank. at: the scopes of nodes. again: what depends on no parameter and no
    activation. Returns the attentions that are to see keys of all ranks.

    Raises PiperError (model): something is written that is of other tokens.
    """
    graph, pairs = root.graph, pairs_of(root, few)

    def made(full: Collection[fx.Node]) -> SharedTokens:
        return SharedTokens(pairs, (), again, TokenDims(region.cp.size, length, CHECKS), whole=full)

    shared = shared_tokens(graph, made)
    edges = list(_edges(graph, shared, chunk_of(graph, at)))
    if (wrong := _wrong(graph, shared, edges)) is not None:
        raise refused(wrong, KEY, FIX)
    if region.sequence and shared.full:
        raise refused(ShardMismatch(next(iter(shared.full)), MIXED), KEY, "sequence_parallel = false")
    found = {n: (*shared.dims.found[n], n.meta["val"]) for n in (*shared.own, *shared.full) if n in shared.dims.found}
    keys = {n: n.args[1] for n in shared.own if n.target is ATTENTION}
    attends = [n for n, k in keys.items() if isinstance(k, fx.Node) and shared.dims.at(n, k)]
    for _ in resize(graph, shared, partial(_stretched, region=region)):
        pass
    _cross(graph, edges, found, shared, region)
    return attends


@dataclass(frozen=True)
class TokenEdge:
    """A value, and who reads it as being of other tokens: of all, in a chunk; None: of a rank's own. version: how often
    the value has been written before."""

    reader: fx.Node
    read: fx.Node
    chunk: str | None
    version: int
    seam: bool = False  # it comes from another chunk, as a rank's own


def _edges(graph: fx.Graph, shared: SharedTokens, chunks: Mapping[fx.Node, str]) -> Iterator[TokenEdge]:
    """Where values are read that are of other tokens. Between chunks all are a rank's own."""
    times = times_written(graph.nodes)
    for node in graph.nodes:
        for read in (x for x in node.all_input_nodes if x in shared.full or x in shared.own):
            here, seam = chunks.get(node, ""), read in shared.full and chunks.get(node) != chunks.get(read)
            if node in shared.full and (read in shared.own or seam):
                yield TokenEdge(node, read, here, times[node, read], seam)
            elif node not in shared.full and read in shared.full:
                yield TokenEdge(node, read, None, times[node, read], seam)


def _wrong(graph: fx.Graph, shared: SharedTokens, edges: Collection[TokenEdge]) -> ShardMismatch | None:
    result = next(n for n in graph.nodes if n.op == "output").args[0]
    if (wrong := shared.wrong(graph)) is not None:
        return wrong
    if shared.dims.found.get(result) != (1, 1):
        return ShardMismatch(result, "has not this rank's tokens in its second dim")
    odd = (e for e in edges if e.read not in shared.dims.found or (e.seam and e.version))
    return next((ShardMismatch(e.read, MIXED) for e in odd), None)


def _cross(
    graph: fx.Graph, edges: Collection[TokenEdge], found: Between, shared: SharedTokens, region: RankRegion
) -> None:
    """Put what moves tokens between values and their readers, once for the readers of a chunk."""
    made = dict[tuple[fx.Node, str | None, int], fx.Node]()

    def moved(edge: TokenEdge, read: fx.Node) -> fx.Node:
        key = edge.read, edge.chunk, edge.version
        if key not in made:
            dim, repeats, value = found[edge.read]
            if edge.chunk is None:
                move, value = own_tokens, value.narrow(dim, 0, value.shape[dim] // region.cp.size)
            else:
                move = whole_sequences if floating(value) else whole_numbers
            early = edge.chunk is None and edge.seam
            with graph.inserting_after(read) if early else graph.inserting_before(edge.reader):
                like = shared.exported(edge.read) if edge.chunk is None else value
                here = laid_out(along(of_region(move, region), dim, repeats), like)
                made[key] = graph.call_function(here, (read,))
            near = read if early or edge.reader.op == "output" else edge.reader
            made[key].meta = {**near.meta, "val": value}
        return made[key]

    for edge in edges:
        own = moved(replace(edge, chunk=None), edge.read) if edge.seam else edge.read
        edge.reader.replace_input_with(edge.read, moved(edge, own))


def whole_sequences(x: Tensor, region: RankRegion) -> Tensor:
    """(…, this rank's tokens, features) → (…, tokens, features), the same on every rank, which goes on with its part of
    the gradient."""
    return across(x, partial(_gathered, region.cp), partial(_summed, region.cp))


def whole_numbers(x: Tensor, region: RankRegion) -> Tensor:
    """The same of numbers and flags, which have no gradient."""
    return _gathered(region.cp, x.to(torch.int32) if x.dtype is torch.bool else x).to(x.dtype)


def own_tokens(x: Tensor, region: RankRegion) -> Tensor:
    """The way back: of (…, tokens, features) this rank's, whose gradient is its part of the whole's."""
    return stretches(x, region.cp.size, region.cp.index, -2)


def _gathered(cp: RankAxis, x: Tensor) -> Tensor:
    """Ranks' two stretches each, in the order of the sequence."""
    halves = [part.chunk(2, -2) for part in cp.gather(x.detach().contiguous())]
    return torch.cat([*(first for first, _ in halves), *(last for _, last in reversed(halves))], -2)


def _summed(cp: RankAxis, dy: Tensor) -> Tensor:
    return cp.scatter(torch.stack([stretches(dy, cp.size, rank, -2) for rank in range(cp.size)]))


def attend_to_all(root: fx.GraphModule, attentions: Sequence[fx.Node], region: RankRegion) -> None:
    """Have these see the keys of all ranks. Raises PiperError (job): cp is to divide their heads, and does not."""
    for node in attentions:
        size, read = region.cp.size, _with_own_heads(node, region)
        heads = read[1].meta["val"].shape[1]
        if region.heads and heads % size:
            message = f"cp = {size} does not divide the {heads} heads of keys in {module_of(node)}"
            raise job_error("parallel.cp_comm", message, 'cp_comm = "all_gather"', "all_gather")
        given = (mask_of(node), sees_past_only(node), node.kwargs.get("scale"))
        with root.graph.inserting_before(node):
            made = root.graph.call_function(_attention(region), (*read, *given))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        root.graph.erase_node(node)
    root.graph.eliminate_dead_code()


def _with_own_heads(node: fx.Node, region: RankRegion) -> list[Any]:
    """Queries, keys and values; keys and values as they are before their heads are repeated, so that fewer travel."""
    q, k, v = read = list[Any](node.args[:3])
    base = storages(node.graph.nodes)
    touched = {base[t] for n in base for t in written(n)}  # between, perhaps
    few: list[Any] = [None if base[x] in touched else _unrepeated(x) for x in (k, v)]
    if None in few or few[0].meta["val"].shape[1] != few[1].meta["val"].shape[1]:
        return read
    uneven = region.heads and few[0].meta["val"].shape[1] % region.cp.size
    return read if uneven else [q, *few]


def _unrepeated(x: Any) -> fx.Node | None:
    """(batch, heads, tokens, features) of which x has each head several times, side by side."""
    chain: list[Any] = [x]
    for op in (*VIEWS & {x.target}, aten.expand.default, aten.unsqueeze.default):
        if not isinstance(chain[-1], fx.Node) or chain[-1].target is not op:
            return None
        chain.append(chain[-1].args[0])
    if len(chain) < 4 or chain[2].args[1] not in (2, -3):
        return None
    _, spread, _, few = chain
    batch, heads, *rest = few.meta["val"].shape
    times = spread.meta["val"].shape[2]
    same = spread.meta["val"].shape == (batch, heads, times, *rest)
    return few if same and x.meta["val"].shape == (batch, heads * times, *rest) else None


def _stretched(dim: int, region: RankRegion) -> Moved:
    """What takes this rank's tokens, which lie along a dim."""

    def own_tokens(x: Tensor) -> Tensor:
        return stretches(x, region.cp.size, region.cp.index, dim)

    return own_tokens


def _attention(region: RankRegion) -> Callable[..., Tensor]:
    def attention_across(*given: Any) -> Tensor:
        q, k, v, mask, causal, scale = given
        return attend_across(q, k, v, mask, causal, scale, region)

    return attention_across
