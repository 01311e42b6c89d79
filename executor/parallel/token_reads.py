"""What a rank computes of some tokens of each sequence, held against whole sequences, value by value.

Forward is there twice, for whole sequences and for as many tokens as a rank has. Of each value that depends on the
token ids it is followed along which dim the ranks' tokens lie. An op is let pass where it is known to treat that dim
element by element; attention alone sees across it. What is not known here is refused: a convolution gives shapes that
look divided, too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from executor.parallel.divided_reads import (
    ALONG,
    VIEWS,
    Shape,
    Stretches,
    arguments,
    called,
    reads_along,
    repeats_of,
    shape_of,
    sums_divided,
)

aten = torch.ops.aten
ATTENTION = aten.scaled_dot_product_attention.default
Followed = Mapping[fx.Node, Stretches]
TokenCheck = Callable[[fx.Node, Followed], bool]

# Besides what torch tags as pointwise: ops that move or make elements, and leave each dim's as they are.
EACH = frozenset({
    aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten.type_as.default, aten.contiguous.default,
    aten.detach.default, aten.alias.default, aten.copy_.default, aten.copy.default, aten.lift_fresh_copy.default,
    aten.masked_fill.Tensor, aten.masked_fill_.Scalar, aten.masked_fill_.Tensor, aten.zeros_like.default,
    aten.ones_like.default, aten.empty_like.default, aten.full_like.default, aten.new_zeros.default,
    aten.new_ones.default, aten.new_empty.default, aten.new_full.default, aten.fill_.Scalar, aten.zero_.default,
    aten.expand.default, aten.expand_as.default, aten.unsqueeze.default, aten.squeeze.dim, aten.transpose.int,
    aten.__or__.Tensor, aten.__and__.Tensor, aten.__xor__.Tensor,
    aten.permute.default, aten.t.default, aten.mT.default, aten.movedim.int, aten.swapaxes.default,
    aten.swapdims.default, aten.stack.default, aten.one_hot.default, aten.dropout.default, aten.embedding.default,
    aten.fill_.Tensor, aten.squeeze.default, aten.squeeze.dims, aten.view_as_complex.default, aten.view_as_real.default,
})  # fmt: skip
# Ops that go along a dim to where an index says; all they are given must have the same tokens in the same places.
CHOOSES = frozenset({
    aten.gather.default, aten.scatter.src, aten.scatter.value, aten.scatter_.src, aten.scatter_.value,
    aten.scatter_add.default, aten.scatter_add_.default,
})  # fmt: skip
PRODUCTS = frozenset({
    aten.matmul.default, aten.mm.default, aten.bmm.default, aten.linear.default, aten.addmm.default,
    aten.baddbmm.default,
})  # fmt: skip
NORMS = frozenset({aten.layer_norm.default, aten.rms_norm.default})
KNOWN = ALONG.keys() - PRODUCTS - NORMS - {ATTENTION, aten.group_norm.default}

MIXED = "reads along the tokens of a sequence, of which a rank has some"
UNKNOWN = "is not known to treat each token by itself"
COUNTED = "is made of the number of tokens, of which a rank has some"
OTHERWISE = "is called otherwise for sequences of another length"


@dataclass
class TokenDims:
    """Along which dim of each value the tokens lie. ranks: that share them; length: of a whole sequence; checks: of
    ops beside those known here, whether they read along it; each: how many stretches of a sequence a rank has.
    """

    ranks: int
    length: int
    checks: Mapping[Any, TokenCheck]
    each: int = 2
    found: dict[fx.Node, Stretches] = field(default_factory=dict)
    several: dict[fx.Node, int] = field(default_factory=dict)  # nodes that give several values, with their repeats
    entered: dict[tuple[fx.Node, fx.Node], int] = field(default_factory=dict)  # (reader, what is read) → its dim

    def follow(self, node: fx.Node, short: fx.Node) -> str:
        """A node of the graph of whole sequences, and the same of a rank's tokens. Returns what is wrong, if any is."""
        if wrong := self._enter(node, short):
            return wrong
        reads = {x: self.at(node, x) for x in node.all_input_nodes}
        dims = {x: at for x, at in reads.items() if at is not None}
        split = [self.several[x] for x in node.all_input_nodes if x in self.several]
        if wrong := "" if split else self._mixes(node, dims):
            return wrong
        if called(node) != called(short):
            return OTHERWISE
        return self.place(node, short, dims, split)

    def _enter(self, node: fx.Node, short: fx.Node) -> str:
        """What depends on no token is read whole, or in stretches: of one dim, that is as long as a sequence."""
        pairs = zip(leaves(node), leaves(short), strict=False)
        for x, y in pairs:
            if not isinstance(x, fx.Node) or x in self.found or x in self.several or x is mask_of(node):
                continue
            there, here = shape_of(x), shape_of(y)
            if there is None or here is None or there == here:
                continue
            differ = [i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b]
            whole = len(here) == len(there) and len(differ) == 1 and there[differ[0]] == self.length
            if not whole or here[differ[0]] * self.ranks != self.length:
                return COUNTED
            self.entered[node, x] = differ[0]
        return ""

    def at(self, reader: fx.Node, read: fx.Node) -> Stretches | None:
        dim = self.entered.get((reader, read))
        return self.found.get(read) if dim is None else (dim, 1)

    def _mixes(self, node: fx.Node, dims: Followed) -> str:
        target: Any = node.target
        if torch.Tag.pointwise in getattr(target, "tags", ()) or target in EACH or target in VIEWS:
            return MIXED if target is aten.embedding.default and _counts_words(node, dims) else ""
        check = self.checks.get(target) or CHECKS.get(target) or (reads_along if target in KNOWN else None)
        return UNKNOWN if check is None else MIXED if check(node, dims) else ""

    def place(self, node: fx.Node, short: fx.Node, dims: Followed, split: list[int]) -> str:
        """Note where the tokens of a node lie, by those of what it reads. Returns what is wrong, if any is."""
        there, here = shape_of(node), shape_of(short)
        if there is None or here is None:
            repeats = {r for _, r in dims.values()}
            if len(repeats) != 1:
                return MIXED
            self.several[node] = repeats.pop()
            return ""
        differ = [i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b]
        if len(here) != len(there) or len(differ) != 1 or here[differ[0]] * self.ranks != there[differ[0]]:
            return MIXED
        known: Mapping[fx.Node, Shape] = {x: s for x in (node, *dims) if (s := shape_of(x)) is not None}
        # A rank's tokens are stretches of a sequence: a view that cuts each of these is none of them.
        at = split[0] if split else repeats_of(node, differ[0], dims, known, self.each * self.ranks)
        if at is None or there[differ[0]] % (at * self.each * self.ranks):
            return MIXED
        self.found[node] = differ[0], at
        return ""


def leaves(node: fx.Node) -> list[Any]:
    """Arguments one by one, in an order that two calls of an op share."""
    return tree_leaves((node.args, node.kwargs))


def mask_of(node: fx.Node) -> Any:
    """An attention's mask; None without one, and of any other node."""
    return arguments(node).get("attn_mask") if node.target is ATTENTION else None


def _counts_words(node: fx.Node, dims: Followed) -> bool:
    """Whether a table is looked up that is made of tokens; or its backward divides by how often a word comes."""
    given = arguments(node)
    return given["weight"] in dims or (bool(given.get("scale_grad_by_freq")) and given["indices"] in dims)


def _chooses(node: fx.Node, dims: Followed) -> bool:
    """Whether an index chooses among tokens, or lies beside others than its own. An op reads as much of each dim as its
    index is long, so that what is longer, and no token, would be read from its beginning.
    """
    given = arguments(node)
    dim: int = given["dim"]
    read = [x for name, x in given.items() if isinstance(x, fx.Node) and name in ("self", "index", "src")]
    over = dim % max(1, len(shape_of(read[0]) or ()))
    if node.target is aten.gather.default and read[0] not in dims:
        return dims[read[1]][0] != over
    found = {dims.get(x) for x in read}
    return len(found) != 1 or None in found or over in {at for at, _ in dims.values()}


def _adds_at(node: fx.Node, dims: Followed) -> bool:
    """The same of index_add, whose source is as long as what it is added to."""
    given = arguments(node)
    dim: Any = given["dim"]
    return given["index"] in dims or any(dims[x][0] == dim % len(shape) for x in dims if (shape := shape_of(x)))


def _pads(node: fx.Node, dims: Followed) -> bool:
    """Whether anything is put beside tokens."""
    given: Any = node.args[1]
    return any(len(shape_of(x) or ()) - dims[x][0] <= len(given) // 2 for x in dims)


def _contracts(node: fx.Node, dims: Followed) -> bool:
    """Whether a product adds up what tokens have."""
    a: Any
    b: Any
    a, b = node.args[-2:] if node.target in (aten.addmm.default, aten.baddbmm.default) else node.args[:2]
    over = [(a, 1), (b, 1 if node.target is aten.linear.default else 2)]
    return any(dims[x][0] == max(0, len(shape_of(x) or ()) - back) for x, back in over if x in dims)


def _repeats(node: fx.Node, dims: Followed) -> bool:
    """Whether tokens come again behind one another."""
    times: Any = node.args[1]
    back = [len(shape) - dims[x][0] for x in dims if (shape := shape_of(x))]
    return any(at <= len(times) and times[-at] != 1 for at in back)


def _norms(node: fx.Node, dims: Followed) -> bool:
    given: Any = node.args[1]
    return any(dims[x][0] >= len(shape) - len(given) for x in dims if (shape := shape_of(x)))


def _attends(node: fx.Node, dims: Followed) -> bool:
    """All are (batch, heads, tokens, features); or keys and values are no tokens, and there is no mask."""
    read: list[Any] = list(node.args[:3])
    where, shapes = [dims.get(x) for x in read], [shape_of(x) or () for x in read]
    if mask_of(node) in dims or any(len(shape) != 4 for shape in shapes):
        return True
    if where == [(2, 1)] * 3:
        q, k, v = shapes
        uneven = k[:2] != v[:2] or q[1] % k[1] > 0  # which torch makes alike
        return uneven or (sees_past_only(node) and q[2] != k[2])
    alone = where[1:] == [None, None] and mask_of(node) is None and not sees_past_only(node)
    return not (alone and where[0] == (2, 1))


def sees_past_only(node: fx.Node) -> bool:
    """Whether an attention's flag is set."""
    return bool(arguments(node).get("is_causal"))


CHECKS: Mapping[Any, TokenCheck] = {
    **dict.fromkeys(PRODUCTS, _contracts),
    **dict.fromkeys(NORMS, _norms),
    aten.einsum.default: sums_divided,
    aten.repeat.default: _repeats,
    aten.tile.default: _repeats,
    **dict.fromkeys(CHOOSES, _chooses),
    aten.index_add.default: _adds_at,
    aten.pad.default: _pads,
    aten.constant_pad_nd.default: _pads,
    aten.index.Tensor: lambda node, dims: node.args[0] in dims,
    aten.repeat_interleave.self_int: lambda node, _: len(node.args) < 3,  # a token's copies lie side by side
    ATTENTION: _attends,
}
