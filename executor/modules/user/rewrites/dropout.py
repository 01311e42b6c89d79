"""Dropout that is the same under every plan: what falls is a function of place, step and sequence of the global batch.

Each dropout of a captured graph has a key, of the model's seed and its module's path; with the step and the sequence it
seeds SplitMix64 (Steele, Lea, Flood 2014), whose n-th word decides on the n-th element of that sequence. A chunk gets
`draws`: step, number of the microbatch in the global batch, and whether to drop at all (not where one evaluates).
What falls is made of these alone, so that ranks that share a tensor read their part of it, as of a table of positions.
Attention that drops is computed in plain products, with its probabilities stored.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor, fx

from executor.device.memory import named
from executor.parallel.divided_reads import Divided
from ir.core.errors import ErrorKind, PiperError

_ONE, _TWO, _STEP = (c - 2**64 for c in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15))
BITS = 53
ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
DROPOUT = torch.ops.aten.dropout.default


def _mixed(z: Tensor) -> Tensor:
    """SplitMix64's words; shifts of a signed number keep its sign, which the masks take away."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _ONE
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _TWO
    return z ^ ((z >> 31) & (2**33 - 1))


def fallen(
    draws: Tensor,
    key: int,
    p: float,
    size: int,
    whole: tuple[int, ...],
    inner: bool = False,
    own: tuple[int, int, int, int] | None = None,
) -> Tensor:
    """Which elements fall, of the `size` sequences of a microbatch, in a tensor of shape `whole`.

    Sequences are outermost; inner: they are inside of tokens, as torch.nn's layers have it. own: (dim, how many
    stretches of it this rank has, ranks, rank), where ranks have stretches of one dim; what they have is made alone.

    >>> of = lambda own: fallen(torch.tensor([0, 0, 1]), 7, 0.5, 2, (2, 6), False, own)
    >>> torch.equal(of((1, 1, 2, 1)), of(None)[:, 3:]), torch.equal(of((1, 3, 2, 0)), of(None)[:, ::2])
    (True, True)
    """
    step, number, on = draws.unbind()
    device, each = draws.device, prod(whole) // size
    gamma = (on >> 1) + _STEP  # on is 0 or 1, which no compiler knows: by a number it would hold that nothing overflows
    seeds = _mixed(_mixed(key + step * gamma) + (number * size + torch.arange(1, size + 1, device=device)) * gamma)
    order = (1, 0, *range(2, len(whole))) if inner else range(len(whole))
    words, stride = torch.zeros((), dtype=torch.int64, device=device), size * each
    for k, dim in enumerate(order):
        stride //= whole[dim]
        at = _indices(whole[dim], own if own and own[0] == dim else None, device) * stride
        more = at * gamma if k else seeds[at // each] + (at % each + 1) * gamma
        words = words + more.view(-1, *(1,) * (len(whole) - 1 - dim))
    words = _mixed(words)
    gone: Tensor = ((words & (2**BITS - 1)) < int(p * 2**BITS)) & (on != 0)
    return gone


def _indices(size: int, own: tuple[int, int, int, int] | None, device: torch.device) -> Tensor:
    every = torch.arange(size, device=device)
    if own is None:
        return every
    _, stretches, ranks, rank = own
    return every.view(stretches, ranks, -1)[:, rank].flatten()


def drop(x: Tensor, draws: Tensor, gone: Tensor, p: float) -> Tensor:
    """Dropout of x, of which `gone` falls.

    >>> draws = torch.tensor([0, 0, 1])
    >>> y = drop(torch.ones(2, 4), draws, fallen(draws, 7, 0.5, 2, (2, 4)), 0.5); sorted(set(y.flatten().tolist()))
    [0.0, 2.0]
    """
    more = 1 / (1 - p) - 1 if p < 1 else 0.0
    return torch.where(gone, torch.zeros((), dtype=x.dtype, device=x.device), x * (draws[2].to(x.dtype) * more + 1))


def attend(q: Tensor, k: Tensor, v: Tensor, draws: Tensor, gone: Tensor, p: float, **given: Any) -> Tensor:
    """Attention of whose probabilities `gone` falls. given: torch's other arguments."""
    if given.get("enable_gqa"):
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scale = given.get("scale")
    scores = (q * (1 / sqrt(q.shape[-1]) if scale is None else scale)) @ k.transpose(-2, -1)
    mask: Tensor | None = given.get("attn_mask")
    if given.get("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
    return drop(scores.softmax(-1), draws, gone, p) @ v


@dataclass(frozen=True)
class ValuesOfRank:
    """Of which values a rank of tensor parallelism has stretches, and which."""

    parts: Divided = field(default_factory=dict)
    ranks: int = 1
    rank: int = 0

    def dropped(self, node: fx.Node) -> tuple[tuple[int, ...], tuple[int, int, int, int] | None]:
        """The whole shape of what a node drops out of, and which of it is this rank's."""
        shape = _dropped(node)
        if (part := self.parts.get(node)) is None:
            return shape, None
        whole = (*shape[: part.dim], part.whole[part.dim], *shape[part.dim + 1 :])
        return whole, (part.dim, part.stretches, self.ranks, self.rank)


def reseed(graph: fx.Graph, seed: int, values: ValuesOfRank = ValuesOfRank()) -> None:
    """Replace dropout in an exported graph of token ids. It gets a second input, `draws`, if there was any.

    Raises PiperError (model): sequences are not outermost in what is dropped.
    """
    counts: Counter[str] = Counter()
    draws: fx.Node | None = None
    size, length = map(int, next(n for n in graph.nodes if n.op == "placeholder").meta["val"].shape)
    for node in list(graph.nodes):
        given = _given(node)
        p = float(given.get("p", 0.0) if node.target is DROPOUT else given.get("dropout_p", 0.0))
        if node.target is DROPOUT and (not p or not given["train"]):
            node.replace_all_uses_with(given["input"])
            graph.erase_node(node)
        elif p:
            path = next(reversed([str(of) for of, _ in (node.meta.get("nn_module_stack") or {}).values()]), "")
            counts[path] += 1
            if draws is None:
                draws = _placeholder(graph)
            whole, own = values.dropped(node)
            inner = 1 < size != length and whole[:2] == (length, size)
            if not inner:
                _refuse_shape(whole, path, size)
            how = (_key(f"{seed}:{path}:{counts[path]}"), p, size, whole, inner, own)
            _replace(graph, node, given, draws, how)


def _dropped(node: fx.Node) -> tuple[int, ...]:
    """The shape of what it drops out of: its own, or that of attention's probabilities."""
    shape = tuple(map(int, node.meta["val"].shape))
    return shape if node.target is DROPOUT else (*shape[:-1], int(_given(node)["key"].meta["val"].shape[-2]))


def _given(node: fx.Node) -> dict[str, Any]:
    """A dropout's arguments by name; of any other node none."""
    return named(node.target, node.args, node.kwargs) if node.target in (DROPOUT, ATTENTION) else {}


def _key(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def _placeholder(graph: fx.Graph) -> fx.Node:
    with graph.inserting_after([n for n in graph.nodes if n.op == "placeholder"][-1]):
        draws: fx.Node = graph.placeholder("draws")
    draws.meta["val"] = torch.zeros(3, dtype=torch.int64, device="cpu")
    return draws


def _refuse_shape(shape: tuple[int, ...], path: str, size: int) -> None:
    if not shape or shape[0] % size or not prod(shape):
        message = f"{path} drops out of {list(shape)}, where sequences are not outermost"
        fix = "drop out of (sequences, tokens, features), or set its p to 0"
        raise PiperError(ErrorKind.MODEL, message, key="model.module", allowed=f"[{size}, …]", suggestion=fix)


def _replace(graph: fx.Graph, node: fx.Node, given: Mapping[str, Any], draws: fx.Node, how: tuple[Any, ...]) -> None:
    with graph.inserting_before(node):
        gone = graph.call_function(fallen, (draws, *how))
        gone.meta = node.meta | {"val": node.meta["val"].new_empty(_dropped(node), dtype=torch.bool)}
        if node.target is DROPOUT:
            new = graph.call_function(drop, (given["input"], draws, gone, how[1]))
        else:
            rest = {n: x for n, x in given.items() if n not in ("query", "key", "value", "dropout_p")}
            new = graph.call_function(attend, (given["query"], given["key"], given["value"], draws, gone, how[1]), rest)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
