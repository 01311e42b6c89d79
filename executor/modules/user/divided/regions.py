"""Where a user's exported graph is divided over tp, and what crosses into that and out of it.

A value is *apart* where it is made of a cut parameter and nothing has summed or gathered it since. What all ranks have,
and a rank reads into what is apart, enters there: its gradient is a sum over ranks. Of a parameter that does so (a norm
of each head) every rank has a part of the gradient.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from executor.modules.parallel import Moved, enter, whole
from executor.modules.user.annotate import At, chunk_of, model_error
from executor.modules.user.divided.columns import gather_again, held
from executor.modules.user.divided.linears import ALLOWED, ENDS
from executor.modules.user.divided.own_calls import own_mismatch
from executor.modules.user.exports.writes import times_written, written_otherwise
from executor.modules.user.rewrites.own_functions import is_own
from executor.parallel.divided_reads import Divided, Places, ShardMismatch, divided_values, module_of
from executor.parallel.inline import RankRegion
from ir.core.errors import PiperError

# Of values that a rank has of its tokens alone: along which dim these lie, in how many stretches, and the whole value.
Between = Mapping[fx.Node, tuple[int, int, Tensor]]
NONE: Between = {}


def regions(
    root: fx.GraphModule,
    at: At,
    again: Collection[fx.Node],
    cut: Collection[int],
    region: RankRegion,
    between: Between = NONE,
    words: fx.Node | None = None,
) -> frozenset[int]:
    """Put entries where values that all ranks have are read into what is apart, and make its ends this rank's.

    at: the scopes of nodes, added to. again: what depends on no parameter and no activation. cut: parameters, by id.
    between: of what a rank has for its own tokens, with sequence parallelism. words: logits that stay apart. Returns
    the parameters of whose gradient each rank has a part, by id.

    Raises PiperError (model): something apart is left so where a layer or the model ends, or is ended twice.
    """
    graph = root.graph
    apart, alone = apart_from(root, cut), of_parameters_alone(root, again)
    chunks, times = chunk_of(graph, at), times_written(graph.nodes)
    if (away := written_otherwise(graph.nodes, apart.__contains__)) is not None:
        what = "writes in place what is read behind it, inside of what tp divides or outside"
        raise _refusal(away, what, "make a new tensor instead")
    partly, wholly = set[int](), set[int]()
    everywhere = replace(region, sequence=False)  # the same where all ranks have all tokens
    entries: dict[tuple[fx.Node, str, int], fx.Node] = {}
    gathers: list[fx.Node] = []  # those of them that gather a rank's tokens
    for node in list(graph.nodes):
        beyond = [u for u in node.users if u.op == "output" or chunks[u] != chunks.get(node, chunks[u])]
        ends = node.target in ENDS
        if (node in apart and beyond and node is not words) or (ends and node.args[0] not in apart):
            raise _unfinished(node, seam=node in apart and any(u.op != "output" for u in beyond))
        if ends and node in alone:  # what each rank reads of it would be a part of its gradient
            raise _refusal(node, "is divided over tp, and is made of parameters alone: of no tokens", "leave it out")
        if ends:
            continue
        for read in node.all_input_nodes:
            if read in alone:
                (partly if node in apart else wholly if node not in alone else set()).update(alone[read])
            elif node in apart and read not in apart and read not in again and floating(read.meta.get("val")):
                entry = entries.get(key := (read, chunks[node], times[node, read]))
                if entry is None:
                    dim, repeats, value = between.get(read, (-2, 1, read.meta.get("val")))
                    here = region if read in between else everywhere
                    with graph.inserting_before(node):
                        entry = graph.call_function(along(of_region(enter, here), dim, repeats), (read,))
                    entry.meta, at[entry] = {**read.meta, "val": value}, at[node]
                    entries[key] = entry
                    if here.sequence and repeats == 1 and dim in (-2, value.dim() - 2):
                        gathers.append(entry)
                node.replace_input_with(read, entry)
    gather_again(root, at, gathers, cut, region)
    _end(graph, between, region)
    if (both := partly & wholly) and not region.sequence:
        named = next(n for n, p in root.named_parameters() if id(p) in both)
        message = f"{named} is read inside and outside of what tp divides"
        raise model_error(message, allowed="one of them", key="model.tp_plan")
    return frozenset(partly - {*cut})


def _end(graph: fx.Graph, between: Between, region: RankRegion) -> None:
    """Make the marks of a graph this rank's ends of its regions."""
    everywhere = replace(region, sequence=False)
    for node in graph.nodes:
        if node.target in ENDS:
            dim, repeats, _ = between.get(node, (-2, 1, None))
            here = region if node in between else everywhere
            node.target, node.args = along(of_region(ENDS[node.target] or _features, here), dim, repeats), node.args[:1]


def _refuse_wrapped(root: fx.GraphModule, cut: Collection[int]) -> None:
    """Code without gradients, or under autocast, is one call of a graph, in which nobody sees where a region ends.

    Raises PiperError (model): tp divides what such code reads. cut: parameters, by id.
    """
    apart = apart_from(root, cut)
    for node in root.graph.nodes:
        if node in apart and str(node.target).startswith("wrap_with_"):  # set_grad_enabled, autocast
            what, fix = "is code under no_grad or autocast that reads what tp divides", "leave out what it calls"
            raise _refusal(node, what, fix, "linears that are called outside of such code")


def parts_of(root: fx.GraphModule, whole: Places, apart: Collection[str], cut: Collection[int]) -> Divided:
    """Which values are parts of the whole module's. whole: what it computes undivided; cut: parameters, by id. Raises
    PiperError (model): one is something else.
    """
    _refuse_wrapped(root, cut)
    found = divided_values(root.graph, whole, apart)
    wrong = found if isinstance(found, ShardMismatch) else own_mismatch(root.graph, found)
    if wrong is not None:
        fix = '"colwise_gather_output" for the linear before it'
        raise _refusal(wrong.node, wrong.why, fix, "ops of each feature; view(…, -1, head_dim)")
    assert not isinstance(found, ShardMismatch)
    return found


def _features(x: Tensor, region: RankRegion) -> Tensor:
    return whole(x.unsqueeze(-1), region).squeeze(-1)


def of_region(function: Callable[[Tensor, RankRegion], Tensor], region: RankRegion) -> Moved:
    """The same among these ranks, as a graph calls it: by one argument, and by its name."""

    def moved(x: Tensor) -> Tensor:
        return function(x, region)

    moved.__name__ = function.__name__
    return moved


def along(function: Moved, dim: int, repeats: int) -> Moved:
    """The same of tokens that lie along another dim than the last but one, or in several stretches of it.

    >>> along(lambda x: torch.cat((x, -x), -2), 0, 2)(torch.tensor([1, 2])).tolist()
    [1, -1, 2, -2]
    """

    def along(x: Tensor) -> Tensor:
        if x.is_complex():  # which no transport takes; a negative dim is that of what treats elements by themselves
            return torch.view_as_complex(along(torch.view_as_real(x.resolve_conj())).contiguous())
        if repeats == 1 and dim in (-2, x.dim() - 2):
            return function(x)
        tokens = x.movedim(dim, -1).unflatten(-1, (repeats, -1)).unsqueeze(-1)
        return function(tokens).squeeze(-1).flatten(-2).movedim(-1, dim)

    along.__name__ = function.__name__
    return along


def laid_out(move: Moved, like: Tensor) -> Moved:
    """The same, with its dims in memory in the order in which a value has them: behind it, views are what they were.

    >>> laid_out(lambda x: x * 2, torch.zeros(3, 2).mT)(torch.ones(2, 3)).stride()
    (1, 2)
    """
    strides = like.stride()
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    back = [order.index(dim) for dim in range(len(strides))]

    def laid(x: Tensor) -> Tensor:
        return move(x).permute(order).contiguous().permute(back)

    laid.__name__ = move.__name__
    return laid


def apart_from(root: fx.GraphModule, cut: Collection[int]) -> set[fx.Node]:
    """What is made of these parameters, by id, and neither summed nor gathered since."""
    out: set[fx.Node] = set()
    for node in root.graph.nodes:
        is_cut = node.op == "get_attr" and id(held(root, node)) in cut
        if is_cut or (node.op != "output" and node.target not in ENDS and any(i in out for i in node.all_input_nodes)):
            out.add(node)
    return out


def of_parameters_alone(root: fx.GraphModule, again: Collection[fx.Node]) -> dict[fx.Node, frozenset[int]]:
    """Parameters and what is made of them and of constants only, with the parameters each is made of."""
    out: dict[fx.Node, frozenset[int]] = {}
    tokens: set[fx.Node] = set()
    for node in root.graph.nodes:
        if node.op == "placeholder" or any(i in tokens for i in node.all_input_nodes):
            tokens.add(node)
        elif node.op == "get_attr" and node not in again:
            out[node] = frozenset([id(held(root, node))])
        elif any(i in out for i in node.all_input_nodes) and all(i in out or i in again for i in node.all_input_nodes):
            out[node] = frozenset[int]().union(*(out.get(i, frozenset()) for i in node.all_input_nodes))
    return out


def floating(value: object) -> bool:
    """Whether it may have a gradient."""
    return not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex()


def _unfinished(node: fx.Node, *, seam: bool) -> PiperError:
    """seam: what is divided goes on in the next layer."""
    if seam:
        what, fix = "crosses a seam, and is divided over tp", "layers that end where nothing is divided"
        return _refusal(node, what, fix, "modules whole in it", "model.tags.PP")
    what = "is divided over tp where nothing sums it, or not where it is summed"
    return _refusal(node, what, "each colwise linear's output ends in a rowwise one", ALLOWED)


def _refusal(node: fx.Node, what: str, fix: str, allowed: str | None = None, key: str = "model.tp_plan") -> PiperError:
    return model_error(f"{_where(node)}, {what}", fix, allowed, key)


def _where(node: fx.Node) -> str:
    """Where a user finds a node."""
    target: Any = node.target
    return f"{target.__name__ if is_own(node) else node.name}, in {module_of(node) or 'forward'}"
