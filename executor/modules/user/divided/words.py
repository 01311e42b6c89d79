"""Logits of which each rank keeps the words that it has: the loss needs no more, where nothing but it reads them. And
the tables that words are looked up in.
"""

import torch
from torch import Tensor, fx

from executor.modules.user.divided.linears import FEATURES
from executor.parallel.divided_reads import aten

FORMATS = (aten.to.dtype, aten._to_copy.default)
MOVED = (aten.to, aten._to_copy, aten.view, aten.reshape, aten.unsqueeze, aten.expand, aten.slice, aten.clone, aten.cat)
SHARED = (aten.sub, aten.masked_fill)  # of words that a rank holds


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


def tables_of(graph: fx.Graph) -> frozenset[str]:
    """Names of the tables whose rows the token ids choose, not what is made of them: positions, kinds of tokens."""
    ids = {next(n for n in graph.nodes if n.op == "placeholder")}
    found = set[str]()
    for node in graph.nodes:
        if node.op != "call_function" or ids.isdisjoint(node.all_input_nodes):
            continue
        packet = getattr(node.target, "overloadpacket", None)
        if packet is aten.embedding and node.args[1] in ids:
            found |= {str(n.target) for n in [node.args[0]] if n.op == "get_attr"}
        elif packet in MOVED or (packet in SHARED and node.args[0] in ids):
            ids.add(node)
    return frozenset(found)
