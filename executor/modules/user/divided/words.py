"""Logits of which each rank keeps the words that it has: the loss needs no more, where nothing but it reads them."""

import torch
from torch import Tensor, fx

from executor.modules.user.divided.linears import FEATURES
from executor.parallel.divided_reads import aten

FORMATS = (aten.to.dtype, aten._to_copy.default)


def keep_words(graph: fx.Graph, ranks: int) -> fx.Node | None:
    """Leave out the gathering of logits behind which each is treated by itself; returns them, or None where there is
    none.
    """
    *_, output = graph.nodes
    logits: fx.Node = output.all_input_nodes[0]
    node, behind = logits, list[fx.Node]()
    while _by_itself(node):
        behind.append(node)
        node = node.all_input_nodes[0]
    if node.target is not FEATURES or len(node.users) > 1:
        return None
    words: fx.Node = node.all_input_nodes[0]
    node.replace_all_uses_with(words)
    graph.erase_node(node)
    for each in behind:
        value: Tensor = each.meta["val"]
        each.meta = {**each.meta, "val": value.narrow(-1, 0, value.shape[-1] // ranks)}
    return logits if behind else words


def _by_itself(node: fx.Node) -> bool:
    """Whether nobody else reads it, and it is made of one value, element by element: a cap, a scale, a format."""
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in FORMATS
    return pointwise and len(node.users) == 1 and len(node.all_input_nodes) == 1
