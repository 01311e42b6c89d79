"""A unit's forward and backward as three graphs for torch's compiler: F, input gradients I, weight gradients W.

AOTAutograd traces the joint graph and chooses what forward saves. The backward is then cut as a plan has it: I is all
that the input gradients need, W the rest. Sums of which no product is a part (of norms, of biases) go with I, whose
loops read the same values; W reads no weight, as it may run where those are not gathered.
"""

import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from executor.modules.user.exports.writes import ancestors
from executor.parallel.traced import in_order

Kernel = Callable[..., Sequence[Tensor]]
VIEWS = (
    *("alias", "detach", "expand", "permute", "select", "slice", "squeeze"),
    *("t", "transpose", "unsqueeze", "view", "reshape", "_unsafe_view"),
)
PRODUCTS = ("mm", "convolution", "embedding", "index", "scatter", "attention")  # and what else is no mere sum


@cache
def options() -> dict[str, Any]:
    """What Inductor is asked for. How wide the processor's vectors are is said, as a key of its cache, which else hands
    out the loops of another kind of processor: twice as wide, they give other numbers and no error.
    """
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    # One thread: a pool of compiling processes might outlive its rank.
    return {"config_patches": {"compile_threads": 1, "cpp.simdlen": pick_vec_isa().bit_width() or None}}


@dataclass(frozen=True)
class PassGraphs:
    """F, I and W of a unit. Each reads a list of values by name: weights and inputs as "in0", "in1" …, in the order
    that they were traced in; gradients of outputs as "grad0" …; what an earlier graph has kept.

    reads: by pass. keeps: what F, and what I, hand on behind what is asked for: outputs, gradients. outs: outputs
    without values; acts: how many inputs there are. dx, dw: which of the values get their gradient in I, which in W.
    """

    graphs: Mapping[str, fx.GraphModule]
    reads: Mapping[str, tuple[str, ...]]
    keeps: Mapping[str, tuple[str, ...]]
    outs: tuple[Tensor, ...]
    acts: int
    dx: tuple[int, ...]
    dw: tuple[int, ...]

    @property
    def key(self) -> str:
        """Equal graphs compile to the same code: names, shapes, strides and constants."""
        text = hashlib.sha256()
        for name, module in self.graphs.items():
            text.update(f"{name} {module.code} {self.reads[name]} {self.keeps.get(name)}".encode())
            for node in module.graph.nodes:
                if node.op == "placeholder":
                    value = node.meta["val"]
                    text.update(f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}".encode())
                if node.op == "get_attr" and isinstance(value := getattr(module, str(node.target)), Tensor):
                    text.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return text.hexdigest()


def passes(
    function: Callable[..., tuple[Tensor, ...]], values: Sequence[Tensor], weights: int, acts: int
) -> PassGraphs:
    """Trace a function of `values`: so many weights, then so many inputs, then what gets no gradients.

    values: of a fake mode, which may hold constants of the function that are not fake.
    """
    from torch._functorch.aot_autograd import aot_export_joint_simple
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    joint: Any = aot_export_joint_simple(
        function, tuple(values), trace_joint=True, decompositions=select_decomp_table()
    )
    for node in reversed(joint.graph.nodes):
        if "_assert" in _base(node) and not node.users:
            joint.graph.erase_node(node)
    outs = len(results(joint)) - len(values)
    if sum(p.name.startswith("tangents_") for p in placeholders(joint)) != outs:
        raise ValueError("not all it returns has a gradient")
    forward, backward = min_cut_rematerialization_partition(joint, values, num_fwd_outputs=outs)
    return _Cut(forward, backward, len(values), weights, acts, outs).graphs()


class _Cut:
    """From torch's two graphs to three."""

    def __init__(
        self, forward: fx.GraphModule, backward: fx.GraphModule, values: int, weights: int, acts: int, outs: int
    ) -> None:
        self.forward, self.backward, self.outs, self.weights, self.acts = forward, backward, outs, weights, acts
        self.values = [f"primals_{k + 1}" for k in range(values)]
        self.results = results(forward)
        self.saved = dict(zip((p.name for p in placeholders(backward)), self.results[outs:], strict=False))

    def graphs(self) -> PassGraphs:
        self._make_again()
        back = self.backward.graph
        ends = results(self.backward)
        has = [k for k, e in enumerate(ends) if isinstance(e, fx.Node)]
        early = ancestors(e for k, e in enumerate(ends) if k in has and k >= self.weights)
        dx, dw = [k for k in has if k >= self.weights], [k for k in has if k < self.weights]
        for k in list(dw):
            rest = ancestors([ends[k]]) - early
            if early and not any(_is_product(n) for n in rest):
                early |= rest
                dx.append(k)
                dw.remove(k)
        late = {n for n in ancestors(ends[k] for k in dw) if n.op != "placeholder"} - early
        while more := {n for n in late if any(self._of_weight(i) for i in n.all_input_nodes)}:
            early |= ancestors(more)
            late -= early
        early |= {n for n in back.nodes if n.target is operator.getitem and n.all_input_nodes[0] in early}
        late -= early  # passes hand on tensors, no tuples of them
        dx, dw = [*dx, *(k for k in dw if ends[k] in early)], [k for k in dw if ends[k] not in early]
        late |= self._views(late)
        w_in = [n for n in back.nodes if n not in late and any(u in late for u in n.users)]
        i_in = [n for n in placeholders(self.backward) if n in early]
        f_keeps = [n for n in dict.fromkeys([*i_in, *w_in]) if n.op == "placeholder" and self._is_kept(n)]
        names = {n: self._name(n) for n in dict.fromkeys([*i_in, *w_in])}
        f_in = list(placeholders(self.forward))
        made = [n for n in w_in if n.op != "placeholder"]
        return PassGraphs(
            {
                "F": _extract(self.forward, f_in, [*self.results[: self.outs], *(self.saved[n.name] for n in f_keeps)]),
                "I": _extract(self.backward, i_in, [*(ends[k] for k in dx), *made]),
                "W": _extract(self.backward, w_in, [ends[k] for k in dw]),
            },
            {
                "F": tuple(self._value(n.name) for n in f_in),
                "I": tuple(names[n] for n in i_in),
                "W": tuple(names[n] for n in w_in),
            },
            {"F": tuple(names[n] for n in f_keeps), "I": tuple(names[n] for n in made)},
            tuple(n.meta["val"] for n in self.results[: self.outs]),
            self.acts,
            tuple(dx),
            tuple(dw),
        )

    def _make_again(self) -> None:
        """Views of weights are not saved, but made again in backward: their storage may be empty meanwhile."""
        graph = self.backward.graph
        there = {p.name: p for p in placeholders(self.backward)}
        for place in list(placeholders(self.backward)):
            root = self.saved.get(place.name)
            chain: list[fx.Node] = []
            while isinstance(root, fx.Node) and _is_view(root):
                chain.append(root)
                root = root.all_input_nodes[0]
            if not chain or not isinstance(root, fx.Node) or not self._weight(root.name):
                continue
            if root.name not in there:
                with graph.inserting_before(place):
                    there[root.name] = graph.placeholder(root.name)
                there[root.name].meta = dict(root.meta)
                self.saved[root.name] = root
            env, last = {root: there[root.name]}, list(placeholders(self.backward))[-1]
            for node in reversed(chain):
                with graph.inserting_after(last):
                    last = env[node] = graph.node_copy(node, env.__getitem__)
            place.replace_all_uses_with(last)
            graph.erase_node(place)

    def _views(self, late: set[fx.Node]) -> set[fx.Node]:
        """What W can see by itself in what it is given."""
        out: set[fx.Node] = set()
        stack = [i for n in late for i in n.all_input_nodes]
        while stack:
            node = stack.pop()
            if node not in late and node not in out and (_is_view(node) or _is_constant(node)):
                out.add(node)
                stack += node.all_input_nodes
        return out

    def _of_weight(self, node: fx.Node) -> bool:
        while _is_view(node):
            node = node.all_input_nodes[0]
        return node.op == "placeholder" and self._weight(node.name)

    def _weight(self, name: str) -> bool:
        return name in self.values[: self.weights]

    def _is_kept(self, place: fx.Node) -> bool:
        """Whether forward has made a value of backward."""
        return place.name in self.saved and place.name not in self.values

    def _name(self, node: fx.Node) -> str:
        if node.op == "placeholder" and node.name.startswith("tangents_"):
            return f"grad{int(node.name.removeprefix('tangents_')) - 1}"
        return self._value(node.name) if node.name in self.values else node.name

    def _value(self, name: str) -> str:
        return f"in{self.values.index(name)}"


def placeholders(module: fx.GraphModule) -> list[fx.Node]:
    """What a graph is given."""
    return [n for n in module.graph.nodes if n.op == "placeholder"]


def results(module: fx.GraphModule) -> list[Any]:
    """What a graph returns: nodes, or None."""
    return list(next(n for n in module.graph.nodes if n.op == "output").args[0])


def _base(node: fx.Node) -> str:
    """`view` of aten.view.default."""
    return str(node.target).split(".")[-2] if node.op == "call_function" and "." in str(node.target) else ""


def _is_view(node: fx.Node) -> bool:
    return _base(node) in VIEWS and len(node.all_input_nodes) == 1


def _is_constant(node: fx.Node) -> bool:
    return node.op == "get_attr" or (node.op == "call_function" and not node.all_input_nodes)


def _is_product(node: fx.Node) -> bool:
    name = _base(node)
    return name not in VIEWS and any(p in name for p in PRODUCTS)


def _extract(module: fx.GraphModule, given: Sequence[fx.Node], wanted: Sequence[fx.Node]) -> fx.GraphModule:
    """The part of a graph from these values to those."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in given:
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in module.graph.nodes:
        if node in env or node.op in ("placeholder", "output"):
            continue
        if all(i in env for i in node.all_input_nodes):
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[n] for n in wanted))
    graph.eliminate_dead_code()
    in_order(graph)
    return fx.GraphModule(module, graph)
