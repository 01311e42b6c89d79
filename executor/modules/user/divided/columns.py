"""Column-parallel linears of a user's graph that read the same gathered tokens, as one function of several weights.

With sequence parallelism what enters a region is gathered. A linear by itself would keep that until its weights'
gradient is found; the function keeps this rank's tokens, and gathers them again, as the plan of a config has it.
"""

import operator
from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import Tensor, fx

from executor.modules.parallel import columns
from executor.modules.user.annotate import At
from executor.parallel.divided_reads import aten
from executor.parallel.inline import RankRegion

Weights = list[Tensor]


def gather_again(
    root: fx.GraphModule, at: At, entries: Iterable[fx.Node], cut: Collection[int], region: RankRegion
) -> None:
    """Put the function in the place of each of these entries that cut linears alone read. at: the scopes of nodes,
    added to. cut: parameters that tp divides, by id.
    """
    graph = root.graph
    for entry in entries:
        linears = list(entry.users)  # in the order in which they are called
        if not linears or not all(_is_cut(root, n, entry, cut) for n in linears):
            continue
        first = linears[0]
        with graph.inserting_before(first):
            given = [[_again(graph, n, place) for n in linears] for place in (1, 2)]
            made = graph.call_function(_columns_of(region), (entry.args[0], *given))
            parts = [graph.call_function(operator.getitem, (made, k)) for k in range(len(linears))]
        at[made] = at[first]
        for linear, part in zip(linears, parts, strict=True):
            at[part], part.meta = at[linear], dict(linear.meta)
            linear.replace_all_uses_with(part)
            graph.erase_node(linear)
        made.meta = {**entry.meta, "val": [part.meta.get("val") for part in parts]}
        graph.erase_node(entry)


def _is_cut(root: fx.GraphModule, node: fx.Node, entry: fx.Node, cut: Collection[int]) -> bool:
    """Whether it is a linear of this value, of trained weights that tp divides by their rows."""
    if node.target is not aten.linear.default or node.args[0] is not entry:
        return False
    read = node.all_input_nodes[1:]
    return all(x.op == "get_attr" and (p := held(root, x)).requires_grad and id(p) in cut for x in read)


def held(root: fx.GraphModule, node: fx.Node) -> Any:
    """The parameter or buffer that a get_attr node reads."""
    path, _, name = str(node.target).rpartition(".")
    return getattr(root.get_submodule(path), name)


def _again(graph: fx.Graph, linear: fx.Node, place: int) -> fx.Node | None:
    """Its weight, or bias, read where the first of the linears stands."""
    read = linear.args[place] if len(linear.args) > place else None
    if not isinstance(read, fx.Node):
        return None
    node = graph.get_attr(str(read.target))
    node.meta = dict(read.meta)
    return node


def _columns_of(region: RankRegion) -> Callable[[Tensor, Weights, list[Tensor | None]], Weights]:
    def columns_of(x: Tensor, weights: Weights, biases: list[Tensor | None]) -> Weights:
        return columns(x, weights, biases, region)

    return columns_of
