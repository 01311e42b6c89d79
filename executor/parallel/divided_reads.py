"""What each rank computes of a divided model, held against the whole model, value by value.

Ranks hold equal stretches of one dim. Where a value's shape differs from the whole model's it is divided,
along the dim that differs. Four things go wrong without any sign of it: an op reads along that dim (softmax, a norm, a
slice, a product) and takes this rank's stretch for the whole; what it gives is divided no more, as of a sum, or along
two dims; a view counts heads by a constant, and cuts every head instead of dealing them out; or a number or a table is
made of the size of that dim.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
Shape = tuple[int, ...]
Stretches = tuple[int, int]  # the dim that is divided, and how many stretches of it each rank has
Numbers = tuple[int | float, ...]
Places = Mapping[
    tuple[str, str], list[tuple[Shape | None, Numbers, object]]
]  # (module's path, op) → of its calls there what shapes they give, and numbers they are given

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
    aten.matmul.default: (-1,), aten.mm.default: (-1,), aten.bmm.default: (-1,), aten.linear.default: (-1,),
    aten.scaled_dot_product_attention.default: (-2, -1),
    aten.var.dim: 1, aten.std.dim: 1, aten.var_mean.dim: 1, aten.var_mean.correction: 1, aten.std_mean.dim: 1,
    aten.std_mean.correction: 1, aten.argmin.default: 1, aten.any.dim: 1, aten.all.dim: 1, aten.argsort.default: 1,
    aten.sum.default: (), aten.mean.default: (), aten.group_norm.default: (1,),
}  # fmt: skip
# What has one number everywhere, however large it is.
FILLED = frozenset({
    aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format, aten.new_zeros.default,
    aten.new_ones.default, aten.new_full.default, aten.new_empty.default, aten.expand.default,
})  # fmt: skip
USUAL = {aten.split.Tensor: 0, aten.split_with_sizes.default: 0, aten.chunk.default: 0, aten.cat.default: 0}
USUAL |= {aten.argsort.default: -1}
USUAL |= {aten.slice.Tensor: 0, aten.unbind.int: 0, aten.topk.default: -1, aten.sort.default: -1, aten.glu.default: -1}


# Arguments that are sizes of what is made, and numbers for its elements, which are right as for whole sequences.
SIZES, NUMBERS = frozenset({"size", "shape", "sizes"}), frozenset({"value", "fill_value", "alpha", "beta"})
VIEWS = frozenset({
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints, aten.unflatten.int,
    aten.view_as.default, aten.reshape_as.default,
})  # fmt: skip


ALONG_IT = "reads along what tp divides: each rank would take its part for the whole"
CUT = "cuts what tp deals out, as where heads are counted by a constant: each rank would take parts of heads for heads"
COUNTED = "is made of a size that tp divides: each rank would count its part for the whole"
OTHERWISE = "is not called as often where tp divides the model as in the whole of it"


@dataclass(frozen=True)
class ShardMismatch:
    """A node that gives other numbers than the whole model's, and why."""

    node: fx.Node
    why: str


def places(graph: fx.Graph) -> Places:
    """The shapes of a graph's values, and the numbers they are made with."""
    out: dict[tuple[str, str], list[tuple[Shape | None, Numbers, object]]] = defaultdict(list)
    for node, place in _placed(graph, ()):
        out[place].append((shape_of(node), numbers_of(node), called(node)))
    return out


@dataclass(frozen=True)
class ValueShard:
    """A value of which each rank has stretches of one dim. whole: the shape that they are of."""

    whole: Shape
    dim: int
    stretches: int


Divided = Mapping[fx.Node, ValueShard]


def divided_values(graph: fx.Graph, whole: Places, apart: Collection[str]) -> Divided | ShardMismatch:
    """Which values of a rank's graph are stretches of the whole model's; or the first that is something else. apart:
    paths of modules that are left out, as they compute otherwise than the whole model's do.
    """
    dims: dict[fx.Node, Stretches] = {}
    several: set[fx.Node] = set()  # nodes that give several values, made of something divided
    before: dict[fx.Node, Shape] = {}
    left = {place: iter(shapes) for place, shapes in whole.items()}
    counts = Counter(place for _, place in _placed(graph, apart))
    for node, place in _placed(graph, apart):
        if counts[place] != len(whole.get(place, ())):
            return ShardMismatch(node, OTHERWISE)
        here, (there, numbers, how) = shape_of(node), next(left[place])
        if numbers_of(node) != numbers:
            return ShardMismatch(node, COUNTED)
        divided = any(x in dims or x in several for x in node.all_input_nodes)
        if reads_along(node, dims):
            return ShardMismatch(node, ALONG_IT)
        if called(node) != how:
            return ShardMismatch(node, COUNTED)
        if here is None or there is None:
            several |= {node} if divided else set()
            continue
        before[node] = there
        found = [i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b]
        if divided and not found:
            return ShardMismatch(node, ALONG_IT)
        if found and not divided and node.op == "call_function" and node.target not in FILLED:
            return ShardMismatch(node, COUNTED)
        if len(here) != len(there) or len(found) > 1:
            return ShardMismatch(node, CUT)
        if found:
            repeats = repeats_of(node, found[0], dims, before, there[found[0]] // here[found[0]])
            if repeats is None:
                return ShardMismatch(node, CUT)
            dims[node] = found[0], repeats
    return {n: ValueShard(before[n], dim, repeats) for n, (dim, repeats) in dims.items()}


def _placed(graph: fx.Graph, apart: Collection[str]) -> Iterator[tuple[fx.Node, tuple[str, str]]]:
    """Nodes that hold or make a value, each with the module that it is called in, and its name or op."""
    for node in graph.nodes:
        if node.op in ("get_attr", "placeholder"):
            yield node, ("", str(node.target))
        elif node.op == "call_function" and (path := module_of(node)) not in apart:
            function = isinstance(node.target, FunctionType)  # whose words say where in memory it lies
            yield node, (path, node.target.__name__ if function else str(node.target))


def module_of(node: fx.Node) -> str:
    """The path of the innermost module that a node is called in; "" for the model's own forward."""
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    return next((str(path) for path, _ in reversed(list(stack.values())) if path), "")


def shape_of(node: Any) -> Shape | None:
    """Of the tensor that a node is; None for several, and for what is no node."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(map(int, value.shape)) if isinstance(value, Tensor) else None


def numbers_of(node: fx.Node) -> Numbers:
    """What a call is given beside values; whole numbers, which may be sizes, only where elements stay by themselves."""
    each = torch.Tag.pointwise in getattr(node.target, "tags", ())
    given = [x for x in tree_leaves((node.args, node.kwargs)) if type(x) is float or (each and type(x) is int)]
    return tuple(given) if node.op == "call_function" else ()


def arguments(node: fx.Node) -> dict[str, Any]:
    """What a call is given, by the names of its op."""
    schema = getattr(node.target, "_schema", None)
    names = map(str, range(len(node.args))) if schema is None else (a.name for a in schema.arguments)
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def sizes_of(node: fx.Node) -> frozenset[str]:
    """Names of a call's arguments that are other numbers for sequences of another length."""
    whole = node.target is aten.slice.Tensor and shape_of(node) == shape_of(node.args[0])
    return SIZES | {"start", "end"} if whole else SIZES


def called(node: fx.Node) -> object:
    """What an op is given beside values, sizes of what it makes, and numbers for its elements."""
    if node.target is aten.scaled_dot_product_attention.default or torch.Tag.pointwise in getattr(
        node.target, "tags", ()
    ):
        return ()
    given = {k: v for k, v in arguments(node).items() if k not in sizes_of(node) | NUMBERS}
    return {k: [_beside_values(x) for x in tree_leaves(v)] for k, v in given.items()}


def _beside_values(x: object) -> object:
    return None if isinstance(x, float | fx.Node) else (type(x), x)


def repeats_of(
    node: fx.Node, dim: int, dims: Mapping[fx.Node, Stretches], whole: Mapping[fx.Node, Shape], ranks: int
) -> int | None:
    """How often each rank has a stretch of the dim that a node's value is divided along; None where that differs.

    A view keeps elements in their order: stretches of all ranks, so many times one behind the other.
    """
    inputs = {x: dims[x] for x in node.all_input_nodes if x in dims}
    if node.target in VIEWS:
        x = node.args[0]
        if not isinstance(x, fx.Node) or x not in inputs:
            return None
        times, within = prod(whole[x][: inputs[x][0]]) * inputs[x][1], prod(whole[node][:dim])
        repeats = times // within
        return repeats if times % within == 0 and whole[node][dim] % (repeats * ranks) == 0 else None
    found = {repeats for _, repeats in inputs.values()}
    return found.pop() if len(found) == 1 else None if found else 1


def reads_along(node: fx.Node, dims: Mapping[fx.Node, Stretches]) -> bool:
    """Whether an op reads along the dim that one of its inputs is divided along, as far as `ALONG` knows it."""
    target: Any = node.target
    if target is aten.einsum.default:
        return sums_divided(node, dims)
    where = ALONG.get(target)
    if where is None:
        return False
    first = node.args[0]
    inputs = [x for x in (first if isinstance(first, list | tuple) else [first]) if isinstance(x, fx.Node)]
    known = [(dims[x][0], shape) for x in inputs if x in dims and (shape := shape_of(x)) is not None]
    if not known or (node.target is aten.slice.Tensor and shape_of(node) == known[0][1]):
        return False
    along: Any = where
    if isinstance(where, int):
        along = node.args[where] if len(node.args) > where else node.kwargs.get("dim", USUAL.get(target, ()))
    along = (along,) if isinstance(along, int) else tuple(along or range(len(known[0][1])))
    return any(dim in {a % len(shape) for a in along} for dim, shape in known)


def sums_divided(node: fx.Node, dims: Mapping[fx.Node, Stretches]) -> bool:
    """Whether an einsum adds up what is divided.

    >>> graph = fx.Graph(); x = graph.placeholder("x")
    >>> of = lambda how: sums_divided(graph.call_function(aten.einsum.default, (how, [x])), {x: (1, 1)})
    >>> of("ab->b"), of("ab -> a"), of("a...->a")
    (False, True, True)
    """
    terms, _, result = str(node.args[0]).replace(" ", "").partition("->")
    operands: Any = node.args[1]
    named = zip(terms.split(","), operands, strict=False)
    return any(x in dims and _letter(term, dims[x][0], shape_of(x) or ()) not in result for term, x in named)


def _letter(term: str, dim: int, shape: Shape) -> str:
    """What an einsum calls a dim.

    >>> [_letter("a...b", dim, (2, 3, 4, 5)) for dim in range(4)]
    ['a', '...', '...', 'b']
    """
    ahead, dots, behind = term.partition("...")
    if dim < len(ahead):
        return ahead[dim]
    return behind[dim - len(shape)] if len(shape) - len(behind) <= dim < len(shape) else dots
