"""Writes in place in an exported graph: no edge says that who reads a tensor behind a write reads what was written."""

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from executor.device.memory import overwritten


def ancestors(ends: Iterable[fx.Node], known: Collection[fx.Node] = ()) -> set[fx.Node]:
    """These nodes and all that they are made of, as far as it is not known."""
    seen: set[fx.Node] = set()
    stack = list(ends)
    while stack:
        if (node := stack.pop()) not in seen and node not in known:
            seen.add(node)
            stack += node.all_input_nodes
    return seen


def written(node: fx.Node) -> list[fx.Node]:
    """What a node writes in place."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    to = overwritten(node.target, node.args, node.kwargs)
    return [t for t in tree_leaves(to) if isinstance(t, fx.Node)]  # a `_foreach` call writes a list


def storages(nodes: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Whose storage each node's is: its own, or that of what it is a view of, a part of, or writes to."""
    base: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        schema = getattr(node.target, "_schema", None)
        aliases = schema is not None and any(r.alias_info is not None for r in schema.returns)
        first = node.all_input_nodes[:1]
        base[node] = base[first[0]] if first and (aliases or node.target is operator.getitem) else node
    return base


def times_written(nodes: Iterable[fx.Node]) -> dict[tuple[fx.Node, fx.Node], int]:
    """Of each (reader, what it reads), how often that has been written before."""
    nodes = list(nodes)
    base, times = storages(nodes), Counter[fx.Node]()
    out: dict[tuple[fx.Node, fx.Node], int] = {}
    for node in nodes:
        out |= {(node, read): times[base[read]] for read in node.all_input_nodes}
        times.update(base[t] for t in written(node))
    return out


def written_otherwise(nodes: Iterable[fx.Node], kind: Callable[[fx.Node], object]) -> fx.Node | None:
    """A write to what is read behind it as a value of another kind than the write's, who would not see it."""
    nodes = list(nodes)
    base, order = storages(nodes), {node: k for k, node in enumerate(nodes)}
    for node, root in [(n, base[t]) for n in nodes for t in written(n)]:
        unlike = (n for n, r in base.items() if r is root and kind(n) != kind(node))
        if any(order[u] > order[node] for n in unlike for u in n.users):
            return node
    return None


def made_of(ends: Iterable[fx.Node], ahead: Collection[fx.Node]) -> set[fx.Node]:
    """These nodes and all that they are made of: writes to that too, as far as they stand ahead, and parts of tuples.

    >>> import torch
    >>> class Net(torch.nn.Module):
    ...     def forward(self, x):
    ...         y = torch.zeros(2)
    ...         y[0] = x
    ...         return y
    >>> *nodes, _ = torch.export.export(Net(), (torch.ones(()),)).module().graph.nodes
    >>> zeros = next(n for n in nodes if n.name == "zeros")
    >>> sorted(n.name for n in made_of([zeros], nodes))
    ['copy_', 'select', 'x', 'zeros']
    """
    base, out = storages(ahead), ancestors(ends)
    while more := [n for n in ahead if n not in out and (any(base[t] in out for t in written(n)) or _part_of(n, out))]:
        out |= ancestors(more)
    return out


def _part_of(node: fx.Node, known: Collection[fx.Node]) -> bool:
    return node.target is operator.getitem and node.all_input_nodes[0] in known


def unlike(free: Collection[fx.Node], nodes: Collection[fx.Node]) -> set[fx.Node]:
    """Of what could be made again, what is written by what could not; views of that, and all that is made of them."""
    base = storages(nodes)
    return _on(_touched(base, (n for n in nodes if n not in free)), base, free)


def made_once(free: Collection[fx.Node], nodes: Collection[fx.Node]) -> set[fx.Node]:
    """Of what could be made again, what no reader gets so: writes that others' stand between, or that are read behind
    by another name (a table of positions that is written to, and read); views of that, and all that is made of them.
    """
    base, order = storages(nodes), {node: k for k, node in enumerate(nodes)}
    writes = [n for n in nodes if n in free and written(n)]
    roots = _touched(base, writes) & _touched(base, (n for n in nodes if n not in free))
    for node in writes:
        ahead = [n for n, r in base.items() if r in _touched(base, [node]) and order[n] < order[node]]
        if any(order[u] > order[node] for n in ahead for u in n.users):
            roots |= _touched(base, [node])
    return _on(roots, base, free) if roots else set()


def _touched(base: Mapping[fx.Node, fx.Node], nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The storages that these write to."""
    return {base[t] for n in nodes for t in written(n)}


def _on(roots: Collection[fx.Node], base: Mapping[fx.Node, fx.Node], free: Collection[fx.Node]) -> set[fx.Node]:
    out = set[fx.Node]()
    for node, root in base.items():
        if node in free and (root in roots or not out.isdisjoint(node.all_input_nodes)):
            out.add(node)
    return out


def reaching(end: fx.Node, nodes: Collection[fx.Node]) -> set[fx.Node]:
    """Nodes through which a gradient of `end` goes: not behind what is detached, made without gradients, or compared.

    >>> import torch
    >>> class Net(torch.nn.Module):
    ...     def forward(self, x, y):
    ...         return x * y.detach() + (y > 0)
    >>> *nodes, out = torch.export.export(Net(), (torch.ones(2), torch.ones(2))).module().graph.nodes
    >>> found = reaching(out.all_input_nodes[0], nodes); [n.name for n in nodes if n.op == "placeholder" and n in found]
    ['x']
    """
    base = storages(nodes)
    writes: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        for target in written(node):
            writes.setdefault(base[target], []).append(node)
    seen: set[fx.Node] = set()
    stack = [end]
    while stack:
        if (node := stack.pop()) not in seen and not _stops(node):
            seen.add(node)
            stack += [*node.all_input_nodes, *writes.get(base.get(node, node), ())]
    return seen


def _stops(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if any(word in str(node.target) for word in ("aten.detach", "set_grad_enabled")):
        return not (node.args and node.args[0] is True)
    value = node.meta.get("val")
    return isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
