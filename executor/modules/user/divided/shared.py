"""Which tokens a value of a user's graph is of, where ranks share those of each sequence: a rank's own, or all.

Forward is exported for all tokens, and for as many as a rank has. A value that depends on token ids is of a rank's
*own* tokens, where each op is known to treat tokens by themselves; or *full*, of all tokens, where it is not. What is
own takes its sizes from the second graph, and its stretches of what is there for all tokens.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

from torch import Tensor, fx

from executor.modules.parallel import Moved
from executor.modules.user.divided.linears import ENDS, FEATURES, LEAVE
from executor.modules.user.exports.writes import ancestors, storages, written, written_otherwise
from executor.modules.user.rewrites.dropout import attend, drop
from executor.modules.user.rewrites.own_functions import is_own
from executor.modules.user.routed import MARK
from executor.parallel.divided_reads import ShardMismatch, arguments, aten, module_of, shape_of, sizes_of
from executor.parallel.token_reads import ATTENTION, Followed, TokenDims, mask_of
from ir.core.errors import ErrorKind, PiperError

# What takes its dtype and device from the first value it is given, or from the second, and nothing else.
MADE = frozenset({aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default, aten.new_full.default})
TYPED = frozenset({aten.type_as.default, aten.to.other})
ALLOWED = "ops of each token, and torch's scaled_dot_product_attention"
AWAY = "is written where ranks have other tokens than what writes it"
STRIDED = frozenset({aten.as_strided.default, aten.as_strided_.default, aten.as_strided_copy.default})
MEMORY = "reads memory as it lies where one rank has all tokens"
OURS: Mapping[Any, str] = {drop: "dropout", attend: "attention that drops"}
EXPERTS = "are sent rows of other tokens than a rank's own"


def pairs_of(root: fx.GraphModule, few: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Of what depends on token ids, nodes for all tokens and the same for a rank's own: calls of one op in one module,
    in their order. What is called for all tokens only has none.
    """
    nodes, others = of_tokens(root.graph), of_tokens(few)
    mine, theirs = [_key(n) for n in nodes], [_key(n) for n in others]
    blocks = SequenceMatcher(None, mine, theirs, autojunk=False).get_matching_blocks()
    return {nodes[b.a + k]: others[b.b + k] for b in blocks for k in range(b.size)}


def _reads(node: fx.Node) -> list[fx.Node]:
    """What a node is given, but an attention's mask, for which a flag may stand."""
    return [x for x in node.all_input_nodes if x is not mask_of(node)]


def _key(node: fx.Node) -> tuple[str, str, str]:
    return node.op, "own" if is_own(node) else str(node.target), module_of(node)


@dataclass
class SharedTokens:
    """Which tokens each node's value is of, found node by node, in their order.

    pairs: of what depends on token ids, nodes for all tokens and for a rank's own. apart: as tp divides them. again:
    what depends on no parameter and no activation. dims: where tokens lie, also in what is of all tokens. between: a
    rank's own are those between regions of tp, which their ends give it. whole: what is to be full, whatever it is.
    """

    pairs: Mapping[fx.Node, fx.Node]
    apart: Collection[fx.Node]
    again: Collection[fx.Node]
    dims: TokenDims
    between: bool = False
    whole: Collection[fx.Node] = ()
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

    def exported(self, node: fx.Node) -> Tensor:
        """A value as it was exported for a rank's own tokens, if it was; else for all."""
        value: Tensor = self.pairs.get(node, node).meta["val"]
        return value

    def _is_own(self, node: fx.Node) -> bool:
        short, reads = self.pairs.get(node), [x for x in node.all_input_nodes if x in self.own or x in self.full]
        if short is None or node in self.whole or (reads and all(x in self.full for x in reads)):
            return False
        if self.between and node.target in (FEATURES, ATTENTION):
            return False
        if not self._reads_alike(node, short):
            return False
        if self.between and node.target is LEAVE:
            self._place(node)
            return self.dims.found.get(node, (-1,))[0] == len(shape_of(node) or ()) - 2
        placed = all(x in self.dims.found for x in reads if x in self.full)
        if placed and not self.dims.follow(node, short):
            return True
        for x in node.all_input_nodes:
            self.dims.entered.pop((node, x), None)
        return False

    def _reads_alike(self, node: fx.Node, short: fx.Node) -> bool:
        """Whether each value of tokens is the pair of what the other reads in its place."""
        mine, theirs = _reads(node), _reads(short)
        pairs = zip(mine, theirs, strict=False)
        return len(mine) == len(theirs) and all(self.pairs.get(x) is y for x, y in pairs if self.kind(x))

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
            if n.target in STRIDED and self.kind(n):
                return ShardMismatch(n, MEMORY)
            for t in written(n):
                if self.kind(n) != self.kind(base[t]):
                    return ShardMismatch(n, AWAY)
        away = written_otherwise(graph.nodes, self.kind)
        return None if away is None else ShardMismatch(away, AWAY)


def shared_tokens(graph: fx.Graph, made: Callable[[Collection[fx.Node]], SharedTokens]) -> SharedTokens:
    """Which tokens all values are of. made: of what is to be full, nothing found yet. Where an op gives several values,
    and one of them is read by what is full, all are.
    """
    whole = set[fx.Node]()
    while True:
        shared = made(whole)
        for node in graph.nodes:
            shared.go(node)
        several = {x for n in shared.full for x in n.all_input_nodes if x in shared.own and x in shared.dims.several}
        if not several:
            return shared
        whole |= several


def resize(graph: fx.Graph, shared: SharedTokens, own: Callable[[int], Moved]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Give what is a rank's own the sizes and the constants of its tokens. own: what takes them, along a dim.

    Yields what takes constants, and what reads it.
    """
    for node in shared.own:
        short = shared.pairs[node]
        node.meta["val"] = short.meta.get("val")
        if node.op == "call_function" and node.target not in (*ENDS, ATTENTION):
            node.args, node.kwargs = with_sizes(node, short)
    for node in shared.own:
        yield from ((part, node) for part in stretch_constants(graph, node, shared.dims, own))


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


def _ends_on_tokens(node: fx.Node, dims: Followed) -> bool:
    """Whether what tp's ranks gather is tokens."""
    return any(dims[x][0] == len(shape_of(x) or ()) - 1 for x in dims)


def refused(wrong: ShardMismatch, key: str, fix: str) -> PiperError:
    """The error of what a rank cannot compute of its tokens alone."""
    node = wrong.node
    target: Any = node.target
    message = f"{OURS.get(target, target)} in {module_of(node) or 'forward'} {wrong.why}"
    return PiperError(ErrorKind.MODEL, message, key=key, allowed=ALLOWED, suggestion=fix)


CHECKS: Mapping[Any, Callable[[fx.Node, Followed], bool]] = {
    MARK: lambda _, dims: any(dim for dim, _ in dims.values()),  # rows of tokens, each by itself
    LEAVE: lambda *_: False,
    drop: lambda *_: False,
    FEATURES: _ends_on_tokens,
}
