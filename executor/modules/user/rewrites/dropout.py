"""Dropout that is the same under every plan: what falls is a function of place, step and sequence of the global batch.

Each dropout of a captured graph has a key, of the model's seed and its module's path; with the step and the sequence it
seeds SplitMix64 (Steele, Lea, Flood 2014), whose n-th word decides on the n-th element of that sequence. A chunk gets
`draws`: step, number of the microbatch in the global batch, and whether to drop at all (not where one evaluates).
Attention that drops is computed in plain products, with its probabilities stored.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor, fx

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


def stays(draws: Tensor, key: int, p: float, size: int, each: int) -> Tensor:
    """(size, each): which elements stay, of the sequences of one microbatch."""
    step, number, on = draws.unbind()
    rows = number * size + torch.arange(size, device=draws.device)
    seeds = _mixed(_mixed(key + step * _STEP) + (rows + 1) * _STEP)
    words: Tensor = _mixed(seeds.unsqueeze(1) + torch.arange(1, each + 1, device=draws.device) * _STEP)
    keep: Tensor = ((words & (2**BITS - 1)) >= int(p * 2**BITS)) | (on == 0)
    return keep


def drop(x: Tensor, draws: Tensor, key: int, p: float, size: int) -> Tensor:
    """Dropout of x, whose sequences are outermost.

    >>> y = drop(torch.ones(2, 4), torch.tensor([0, 0, 1]), 7, 0.5, 2); sorted(set(y.flatten().tolist()))
    [0.0, 2.0]
    >>> torch.equal(y[1:], drop(torch.ones(1, 4), torch.tensor([0, 1, 1]), 7, 0.5, 1))
    True
    """
    keep = stays(draws, key, p, size, x.numel() // size).view(x.shape)
    more = 1 / (1 - p) - 1 if p < 1 else 0.0
    return torch.where(keep, x * (draws[2].to(x.dtype) * more + 1), torch.zeros((), dtype=x.dtype, device=x.device))


def attend(q: Tensor, k: Tensor, v: Tensor, draws: Tensor, how: tuple[int, float, int], **given: Any) -> Tensor:
    """Attention with dropout of its probabilities. how: key, p, size; given: torch's other arguments."""
    if given.get("enable_gqa"):
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scale = given.get("scale")
    scores = (q * (1 / sqrt(q.shape[-1]) if scale is None else scale)) @ k.transpose(-2, -1)
    mask: Tensor | None = given.get("attn_mask")
    if given.get("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
    return drop(scores.softmax(-1), draws, *how) @ v


def drop_inner(x: Tensor, draws: Tensor, key: int, p: float, size: int) -> Tensor:
    """Dropout of x, whose tokens are outermost, and then sequences: torch.nn's layers have it so.

    >>> x, draws = torch.ones(3, 2, 4), torch.tensor([0, 0, 1])
    >>> torch.equal(drop_inner(x, draws, 7, 0.5, 2).mT, drop(x.transpose(0, 1), draws, 7, 0.5, 2).transpose(0, 1).mT)
    True
    """
    return drop(x.transpose(0, 1), draws, key, p, size).transpose(0, 1)


def reseed(graph: fx.Graph, seed: int, size: int, length: int) -> bool:
    """Replace dropout in an exported graph, for microbatches of `size` sequences of `length` tokens. It gets a second
    input, `draws`. Returns whether there was any.

    Raises PiperError (model): sequences are not outermost in what is dropped.
    """
    counts: Counter[str] = Counter()
    draws: fx.Node | None = None
    for node in list(graph.nodes):
        given = _given(node)
        p = float(given.get("p", 0.0) if node.target is DROPOUT else given.get("dropout_p", 0.0))
        if node.target is DROPOUT and (not p or not given["train"]):
            node.replace_all_uses_with(given["input"])
            graph.erase_node(node)
        elif p:
            path = next(reversed([str(of) for of, _ in (node.meta.get("nn_module_stack") or {}).values()]), "")
            counts[path] += 1
            key = _key(f"{seed}:{path}:{counts[path]}")
            if draws is None:
                draws = _placeholder(graph)
            inner = 1 < size != length and node.meta["val"].shape[:2] == (length, size)
            if not inner:
                _refuse_shape(node, path, size)
            _replace(graph, node, given, draws, (key, p, size), drop_inner if inner else drop)
    return draws is not None


def _given(node: fx.Node) -> dict[str, Any]:
    """A dropout's arguments by name; of any other node none."""
    if node.target not in (DROPOUT, ATTENTION):
        return {}
    names = [a.name for a in node.target._schema.arguments]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _key(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def _placeholder(graph: fx.Graph) -> fx.Node:
    with graph.inserting_after([n for n in graph.nodes if n.op == "placeholder"][-1]):
        draws: fx.Node = graph.placeholder("draws")
    draws.meta["val"] = torch.zeros(3, dtype=torch.int64, device="cpu")
    return draws


def _refuse_shape(node: fx.Node, path: str, size: int) -> None:
    shape = tuple(node.meta["val"].shape)
    if not shape or shape[0] % size or not prod(shape):
        message = f"{path} drops out of {list(shape)}, where sequences are not outermost"
        fix = "drop out of (sequences, tokens, features), or set its p to 0"
        raise PiperError(ErrorKind.MODEL, message, key="model.module", allowed=f"[{size}, …]", suggestion=fix)


def _replace(
    graph: fx.Graph,
    node: fx.Node,
    given: Mapping[str, Any],
    draws: fx.Node,
    how: tuple[int, float, int],
    dropped: Callable[..., Tensor],
) -> None:
    with graph.inserting_before(node):
        if node.target is DROPOUT:
            new = graph.call_function(dropped, (given["input"], draws, *how))
        else:
            rest = {n: x for n, x in given.items() if n not in ("query", "key", "value", "dropout_p")}
            new = graph.call_function(attend, (given["query"], given["key"], given["value"], draws, how), rest)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
