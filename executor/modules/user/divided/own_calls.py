"""A user's own `torch.autograd.Function`s where tp divides what they read: whether they go element by element.

A graph has such a function as one call, of which no rule says what it reads. So its forward and its backward are traced
as graphs of torch's ops, for the whole model's shapes and for this rank's, and are held against each other as the
model's own graph is; ops that are not known to treat elements by themselves are refused.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

from executor.modules.user.rewrites.own_functions import is_own
from executor.parallel.divided_reads import (
    ALONG,
    FILLED,
    VIEWS,
    Divided,
    Shape,
    ShardMismatch,
    divided_values,
    places,
)
from executor.parallel.token_reads import EACH

Function = Callable[..., list[Tensor]]

UNKNOWN = "is an autograd.Function that reads what tp divides, and not known to treat each feature by itself"
STRETCHES = "is an autograd.Function that reads several stretches of what tp divides"


def own_mismatch(graph: fx.Graph, parts: Divided) -> ShardMismatch | None:
    """The first call of a function of the user's own that a rank cannot make of its stretches alone."""
    for node in graph.nodes:
        reads = node.all_input_nodes
        if not is_own(node) or not any(x in parts for x in reads):
            continue
        if any(parts[x].stretches != 1 for x in reads if x in parts):
            return ShardMismatch(node, STRETCHES)
        if not _by_themselves(node, [parts[x].whole if x in parts else None for x in reads]):
            return ShardMismatch(node, UNKNOWN)
    return None


def _by_themselves(node: fx.Node, whole: list[Shape | None]) -> bool:
    function: Any = node.target
    here = [x.meta["val"] for x in node.all_input_nodes]
    try:
        there = [
            x if shape is None else torch.empty(shape, dtype=x.dtype) for x, shape in zip(here, whole, strict=True)
        ]
        with _disable_current_modes():
            mine, theirs = _both_ways(function, here), _both_ways(function, there)
    except Exception:  # the user's code, given what no forward gives it; a kernel that takes no shapes
        return False
    ops: list[Any] = [n.target for n in mine.nodes if n.op == "call_function"]
    found = divided_values(mine, places(theirs), ())
    if isinstance(found, ShardMismatch) or not all(map(_is_known, ops)):
        return False
    *_, output = mine.nodes
    return all(found[x].stretches == 1 for x in output.all_input_nodes if x in found)


def _is_known(target: Any) -> bool:
    pointwise = torch.Tag.pointwise in getattr(target, "tags", ())
    return pointwise or target in EACH or target in VIEWS or target in FILLED or target in ALONG


def _both_ways(function: Function, like: list[Tensor]) -> fx.Graph:
    """A function's forward and backward, of tensors like these."""
    xs = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in like]
    grads = [torch.empty_like(y) for y in function(xs) if y.is_floating_point()]

    def both(*values: Tensor) -> list[Tensor | None]:
        given = [v.detach().requires_grad_(v.is_floating_point()) for v in values[: len(xs)]]
        with torch.enable_grad():
            ys = function(given)
        ends = [(y, dy) for y, dy in zip((y for y in ys if y.is_floating_point()), values[len(xs) :], strict=True)]
        reached = [(y, dy) for y, dy in ends if y.requires_grad]
        free = [x for x in given if x.requires_grad]
        if not (reached and free):
            return list(ys)
        back = torch.autograd.grad([y for y, _ in reached], free, [dy for _, dy in reached], allow_unused=True)
        return [*ys, *back]

    return make_fx(both)(*xs, *grads).graph
