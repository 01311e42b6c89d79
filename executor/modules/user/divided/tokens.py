"""Context parallelism of a user's module: each rank computes some tokens of each sequence, and attention sees all keys.

Forward is exported for whole sequences, and for as many tokens as a rank has. What depends on token ids takes its sizes
from the second; all else (positions, rotary tables, masks, parameters) stays as it is for whole sequences, and a rank
reads its tokens' stretches of it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, fx

from executor.modules.attention.across import attend_across
from executor.modules.parallel import Moved
from executor.modules.user.annotate import ancestors
from executor.modules.user.divided.linears import FEATURES, LEAVE
from executor.modules.user.routed import MARK
from executor.modules.user.writes import storages, written
from executor.parallel.divided_reads import VIEWS, ShardMismatch, arguments, aten, module_of, shape_of, sizes_of
from executor.parallel.inline import RankRegion, stretches
from executor.parallel.token_reads import (
    ATTENTION,
    OTHERWISE,
    Followed,
    TokenDims,
    follow_tokens,
    mask_of,
    sees_past_only,
)
from ir.core.errors import ErrorKind, PiperError, job_error

# What takes its dtype and device from the first value it is given, or from the second, and nothing else.
MADE = frozenset({aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default, aten.new_full.default})
TYPED = frozenset({aten.type_as.default, aten.to.other})
ALLOWED = "ops of each token, and torch's scaled_dot_product_attention"


def tokens_of_a_rank(length: int, region: RankRegion) -> int:
    """How many tokens of sequences of `length` a rank has. Raises PiperError (job): they do not divide."""
    by = 2 * region.cp.size  # the causal mask's work is even where each has two: the i-th, the i-th to last
    if length % by:
        message = f"cp = {region.cp.size} needs {by} equal stretches of each sequence, and seq_len = {length}"
        raise job_error("parallel.cp", message, f"seq_len = {-(-length // by) * by}", f"a seq_len divisible by {by}")
    return length // region.cp.size


def share_tokens(root: fx.GraphModule, short: fx.Graph, region: RankRegion, length: int) -> list[fx.Node]:
    """Make the graph of whole sequences that of a rank's tokens, as `short` is for as many. Returns the attentions that
    are to see keys of all ranks.

    Raises PiperError (model): something beside attention looks at other tokens, or may.
    """
    graph, whole, some = root.graph, of_tokens(root.graph), of_tokens(short)
    pairs = dict(zip(whole, some, strict=False))
    dims, wrong = follow_tokens(pairs, region.cp.size, length, CHECKS)
    result = next(n for n in graph.nodes if n.op == "output").args[0]
    wrong = _written_apart(graph, pairs) or wrong
    if wrong is None and len(whole) != len(some):
        wrong = ShardMismatch(whole[-1], OTHERWISE)
    if wrong is None and dims.found.get(result) != (1, 1):
        wrong = ShardMismatch(result, "has not this rank's tokens in its second dim")
    if wrong is not None:
        raise refused(wrong, "parallel.cp", "cp = 1")
    for node, of in pairs.items():
        node.meta["val"] = of.meta.get("val")
        if node.op == "call_function" and node.target is not ATTENTION:
            node.args, node.kwargs = with_sizes(node, of)
    attentions = [n for n in pairs if n.target is ATTENTION and isinstance(k := n.args[1], fx.Node) and dims.at(n, k)]
    for node in pairs:
        stretch_constants(graph, node, dims, partial(_stretched, region=region))
    ids = whole[0]
    with graph.inserting_after(ids):
        own = graph.call_function(_stretched(1, region), (ids,))
    own.meta = dict(ids.meta)
    ids.replace_all_uses_with(own, delete_user_cb=lambda user: user is not own)
    return attentions


def attend_to_all(root: fx.GraphModule, attentions: Sequence[fx.Node], region: RankRegion) -> None:
    """Have these see the keys of all ranks. Raises PiperError (job): cp is to divide their heads, and does not; one of
    them drops scores.
    """
    for node in attentions:
        if arguments(node).get("dropout_p"):
            message = f"dropout of scores in {module_of(node)} would fall otherwise on each rank"
            raise job_error("parallel.cp", message, "set its p to 0", "1 with dropout")
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


def of_tokens(graph: fx.Graph) -> list[fx.Node]:
    """The ids, and what depends on them, in order. Not what has their dtype alone, unless tokens are written to it."""
    base, made = storages(graph.nodes), set[fx.Node]()
    ids = next(n for n in graph.nodes if n.op == "placeholder")
    while True:
        out = {ids: None}
        for node in graph.nodes:
            if node.op != "output" and any(x in out for x in _values(node, made)):
                out[node] = None
        apart = {base[t] for n in out for t in written(n)} - out.keys()
        more = {n for n in ancestors(apart) if n.target in MADE} - made
        if not more:
            return list(out)
        made |= more


def _values(node: fx.Node, made: Collection[fx.Node]) -> list[fx.Node]:
    """Of what a node is given, that whose values it has."""
    if node.target in MADE and node not in made:
        return []
    return node.all_input_nodes[:1] if node.target in TYPED else node.all_input_nodes


def _written_apart(graph: fx.Graph, pairs: Mapping[fx.Node, fx.Node]) -> ShardMismatch | None:
    """What is made for whole sequences, and is written with what a rank has of them."""
    base = storages(graph.nodes)
    wrong = (n for n in pairs for t in written(n) if base[t] not in pairs)
    return next((ShardMismatch(n, "writes what was made without tokens") for n in wrong), None)


def with_sizes(node: fx.Node, of: fx.Node) -> tuple[Any, Any]:
    """A node's arguments with the sizes of another call."""
    sizes, theirs = sizes_of(node), arguments(of)
    mine = {name: theirs.get(name, x) if name in sizes else x for name, x in arguments(node).items()}
    return tuple(mine.values())[: len(node.args)], {name: mine[name] for name in node.kwargs}


def stretch_constants(graph: fx.Graph, node: fx.Node, dims: TokenDims, own: Callable[[int], Moved]) -> list[fx.Node]:
    """Have a node read this rank's stretches of what is there for whole sequences. own: what takes them, along a dim.
    Returns what does.
    """
    made = list[fx.Node]()
    for read in list(node.all_input_nodes):
        if (dim := dims.entered.get((node, read))) is None:
            continue
        with graph.inserting_before(node):
            part = graph.call_function(own(dim), (read,))
        value = read.meta["val"]
        part.meta = {**node.meta, "val": value.narrow(dim, 0, value.shape[dim] // dims.ranks)}
        node.replace_input_with(read, part)
        made.append(part)
    return made


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


def _ends_on_tokens(node: fx.Node, dims: Followed) -> bool:
    """Whether what tp's ranks gather is tokens."""
    return any(dims[x][0] == len(shape_of(x) or ()) - 1 for x in dims)


def refused(wrong: ShardMismatch, key: str, fix: str) -> PiperError:
    """The error of what a rank cannot compute of its tokens alone."""
    node = wrong.node
    message = f"{node.target} in {module_of(node) or 'forward'} {wrong.why}"
    return PiperError(ErrorKind.MODEL, message, key=key, allowed=ALLOWED, suggestion=fix)


CHECKS: Mapping[Any, Callable[[fx.Node, Followed], bool]] = {
    MARK: lambda _, dims: any(dim for dim, _ in dims.values()),  # rows of tokens, each by itself
    LEAVE: lambda *_: False,
    FEATURES: _ends_on_tokens,
}
