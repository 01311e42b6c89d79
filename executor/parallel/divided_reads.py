"""Along which dim a value of an exported graph is divided over ranks, where that is known, and what reads along it.

Ranks hold equal, contiguous stretches of one dim. An op that reads along that dim (softmax, a norm, a slice, cat, a
mean) sees this rank's stretch for the whole, and gives other numbers without any sign of it.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten
Dims = dict[fx.Node, int]

# Ops that read along dims: where the dims stand among their arguments, or which they are.
ALONG: dict[Any, int | tuple[int, ...]] = {
    aten.softmax.int: 1, aten._softmax.default: 1, aten.log_softmax.int: 1, aten.cumsum.default: 1,
    aten.slice.Tensor: 1, aten.select.int: 1, aten.narrow.default: 1, aten.index_select.default: 1,
    aten.split.Tensor: 2, aten.split_with_sizes.default: 2, aten.chunk.default: 2, aten.cat.default: 1,
    aten.sum.dim_IntList: 1, aten.mean.dim: 1, aten.var.correction: 1, aten.amax.default: 1, aten.topk.default: 2,
    aten.amin.default: 1, aten.max.dim: 1, aten.min.dim: 1, aten.argmax.default: 1, aten.logsumexp.default: 1,
    aten.std.correction: 1, aten.linalg_vector_norm.default: 2, aten.prod.dim_int: 1, aten.cumprod.default: 1,
    aten.sort.default: 1, aten.roll.default: 2, aten.glu.default: 1, aten.unbind.int: 1, aten.gather.default: 1,
    aten.flip.default: 1, aten.layer_norm.default: (-1,), aten.rms_norm.default: (-1,),
    aten.sum.default: (), aten.mean.default: (),
}  # fmt: skip
USUAL = {aten.split.Tensor: 0, aten.split_with_sizes.default: 0, aten.chunk.default: 0, aten.cat.default: 0}
USUAL |= {aten.slice.Tensor: 0, aten.unbind.int: 0, aten.topk.default: -1, aten.sort.default: -1, aten.glu.default: -1}


def reads_along(graph: fx.Graph, cut: Mapping[fx.Node, int]) -> fx.Node | None:
    """The first node that reads along a divided dim. cut: nodes of parameters, and along which dim each is cut."""
    dims: Dims = dict(cut)
    nodes: list[fx.Node] = list(graph.nodes)
    for node in nodes:
        if node.op != "call_function" or not any(x in dims for x in node.all_input_nodes):
            continue
        if _reads_along(node, dims):
            return node
        if (dim := _of(node, dims)) is not None:
            dims[node] = dim
    return None


def _shape(node: Any) -> tuple[int, ...] | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(map(int, value.shape)) if isinstance(value, Tensor) else None


def _reads_along(node: fx.Node, dims: Dims) -> bool:
    target: Any = node.target
    where = ALONG.get(target)
    if where is None:
        return False
    first = node.args[0]
    inputs = [x for x in (first if isinstance(first, list | tuple) else [first]) if isinstance(x, fx.Node)]
    known = [(dims[x], shape) for x in inputs if x in dims and (shape := _shape(x)) is not None]
    if not known or (node.target is aten.slice.Tensor and _shape(node) == known[0][1]):
        return False
    along: Any = where
    if isinstance(where, int):
        along = node.args[where] if len(node.args) > where else node.kwargs.get("dim", USUAL.get(target, ()))
    along = (along,) if isinstance(along, int) else tuple(along or range(len(known[0][1])))
    return any(dim in {a % len(shape) for a in along} for dim, shape in known)


def _of(node: fx.Node, dims: Dims) -> int | None:
    """The divided dim of what a node gives; None where nothing is known, as of a sum over it."""
    out = _shape(node)
    if out is None:
        return None
    if node.target is aten.linear.default:
        x, weight = node.args[0], node.args[1]
        wide = isinstance(weight, fx.Node) and dims.get(weight) == 0
        return len(out) - 1 if wide and not (isinstance(x, fx.Node) and x in dims) else None
    if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags:
        return _alike(node, dims, out)
    target: Any = node.target
    if (moved := MOVED.get(target)) is None or not isinstance(x := node.args[0], fx.Node) or x not in dims:
        return None
    return moved(node, dims[x], _shape(x) or (), out)


def _alike(node: fx.Node, dims: Dims, out: tuple[int, ...]) -> int | None:
    """Dims of broadcast inputs, counted from the last."""
    found = {dims[x] + len(out) - len(_shape(x) or out) for x in node.all_input_nodes if x in dims}
    return found.pop() if len(found) == 1 else None


def _viewed(node: fx.Node, dim: int, before: tuple[int, ...], out: tuple[int, ...]) -> int | None:
    """Where a dim begins in the new shape, if one does there: of its factors the outermost is divided. Beside a dim of
    size 1 that may be either.
    """
    begin = [e for e in range(len(out)) if prod(out[:e]) == prod(before[:dim])]
    return begin[0] if len(begin) == 1 and before[dim] > 1 else None


def _transposed(node: fx.Node, dim: int, before: tuple[int, ...], out: tuple[int, ...]) -> int:
    ends: Any = node.args[1:3]
    one, other = (int(a) % len(out) for a in ends)
    return {one: other, other: one}.get(dim, dim)


def _permuted(node: fx.Node, dim: int, before: tuple[int, ...], out: tuple[int, ...]) -> int:
    order: Any = node.args[1]
    return [int(a) % len(out) for a in order].index(dim)


def _unsqueezed(node: fx.Node, dim: int, before: tuple[int, ...], out: tuple[int, ...]) -> int:
    given: Any = node.args[1]
    at = int(given) % len(out)
    return dim + (at <= dim)


def _attended(node: fx.Node, dim: int, before: tuple[int, ...], out: tuple[int, ...]) -> int | None:
    return dim if dim < len(out) - 2 else None


def _kept(node: fx.Node, dim: int, before: tuple[int, ...], out: tuple[int, ...]) -> int | None:
    return dim if len(before) == len(out) and before[dim] == out[dim] else None


MOVED: dict[Any, Callable[[fx.Node, int, tuple[int, ...], tuple[int, ...]], int | None]] = {
    aten.view.default: _viewed, aten.reshape.default: _viewed, aten._unsafe_view.default: _viewed,
    aten.flatten.using_ints: _viewed, aten.unflatten.int: _viewed,
    aten.transpose.int: _transposed, aten.permute.default: _permuted, aten.unsqueeze.default: _unsqueezed,
    aten.contiguous.default: _kept, aten.clone.default: _kept, aten.slice.Tensor: _kept, aten.dropout.default: _kept,
    aten.to.dtype: _kept, aten._to_copy.default: _kept, aten.softmax.int: _kept, aten.expand.default: _kept,
    aten.layer_norm.default: _kept, aten.rms_norm.default: _kept, aten.scaled_dot_product_attention.default: _attended,
}  # fmt: skip
