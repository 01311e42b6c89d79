"""Where a user's model may be cut: `with annotate("PP"): x = block(x)`, and the cut itself at these seams.

The outermost `forward` is traced once (torch.fx, no values); a module called inside a scope stays whole, so its
Python may do as it likes. The n-th "PP" scope is chunk `l<n>`; what comes before the first is `embed`, what follows
the last is `head`, the names of `ir.workload`. One tensor may cross each seam. What can be made from the input alone
(positions, rotary tables) is made again in every chunk that reads it.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch.autograd import Function
from torch.utils._pytree import tree_leaves

from executor.modules.user.exports.writes import ancestors, made_once
from ir.core.errors import ErrorKind, PiperError

SEAM = "PP"
At = dict[fx.Node, tuple[tuple[str, int], ...]]  # the scopes that a node stands in


def model_error(message: str, fix: str | None = None, allowed: str | None = None, key: str | None = None) -> PiperError:
    """What a user's module cannot be."""
    return PiperError(ErrorKind.MODEL, message, key=key, allowed=allowed, suggestion=fix)


class _Scopes:
    """The annotation scopes open while a model is traced; indices count per tag, in trace order."""

    def __init__(self) -> None:
        self.open: list[tuple[str, int]] = []
        self.seen: Counter[str] = Counter()


_tracing: list[_Scopes] = []


@contextmanager
def annotate(tag: str) -> Iterator[None]:
    """Mark what runs inside as the next piece named `tag`. Outside of a trace it does nothing.

    >>> with annotate("PP"):
    ...     x = 1 + 1
    """
    if not _tracing:
        yield
        return
    scopes = _tracing[-1]
    scopes.open.append((tag, scopes.seen[tag]))
    scopes.seen[tag] += 1
    try:
        yield
    finally:
        scopes.open.pop()


@dataclass(frozen=True)
class ChunkedModel:
    """A model cut at its seams."""

    chunks: dict[str, nn.Module]  # name → module `(x, *ids)`
    wants_ids: frozenset[str]  # the later chunks that read the input too
    shape_only: frozenset[str] = frozenset()  # those among them that read its sizes and no token
    partly: frozenset[int] = frozenset()  # parameters, by id, of whose gradient each tensor-parallel rank has a part
    wants_draws: frozenset[str] = frozenset()  # those that drop out
    idle: frozenset[int] = frozenset()  # parameters, by id, that no gradient reaches
    unread: frozenset[int] = frozenset()  # parameters, by id, that nothing is made of which forward returns
    loss: str = ""  # a number that forward returns beside the logits
    some_words: bool = False  # each tensor-parallel rank has the logits of its own words
    vocabulary: int | None = None  # of how many words there are logits; None where code runs as it stands
    tables: frozenset[str] = frozenset()  # parameters whose rows are chosen by the token ids


class _Tracer(fx.Tracer):
    def __init__(self, scopes: _Scopes) -> None:
        super().__init__()
        self.scopes, self.thread = scopes, get_ident()
        self.at: At = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return bool(self.scopes.open) or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if get_ident() != self.thread:  # a rank that runs already: torch.fx sees every module's call
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            message = "no_grad or autocast outside of the modules that annotated code calls, which no trace has"
            raise model_error(message, "detach(), or a module that does it", key="model.module")
        node: fx.Node = super().create_node(*args, **kwargs)
        self.at[node] = tuple(self.scopes.open)
        return node


@contextmanager
def functions_applied(by: Callable[..., Any]) -> Iterator[None]:
    """Inside, `cls.apply(*args)` of an autograd.Function is `by(plain, cls, *args)`; plain: what applies it as ever.
    In this thread: ranks that are others may run already.
    """
    apply, here = vars(Function)["apply"], get_ident()

    def applied(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        plain = apply.__func__
        return by(plain, cls, *args, **kwargs) if get_ident() == here else plain(cls, *args, **kwargs)

    with patch.object(Function, "apply", classmethod(applied)):
        yield


def _traced(tracer: fx.Tracer, plain: Callable[..., Any], cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    """A user's function is one call of the graph, with its own backward."""
    if any(isinstance(x, fx.Proxy) for x in tree_leaves((args, kwargs))):
        return tracer.create_proxy("call_function", _applied(cls), args, kwargs)
    return plain(cls, *args, **kwargs)


def _applied(cls: type[Function]) -> Callable[..., Any]:
    def applied(*args: Any, **kwargs: Any) -> Any:
        return cls.apply(*args, **kwargs)

    applied.__name__ = cls.__name__
    return applied


def cut(module: nn.Module) -> ChunkedModel:
    """Cut a module whose forward takes one tensor and returns one.

    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    ...     def forward(self, x):
    ...         for layer in self.layers:
    ...             with annotate("PP"):
    ...                 x = layer(x)
    ...         return x
    >>> {name: [p for p, _ in chunk.named_parameters()] for name, chunk in cut(Net()).chunks.items()}
    {'l0': ['layers.0.weight', 'layers.0.bias'], 'l1': ['layers.1.weight', 'layers.1.bias']}
    """
    graph, at, scopes = _trace(module)
    return cut_at(module, module, graph, at, scopes)


def cut_at(module: nn.Module, root: nn.Module, graph: fx.Graph, at: At, scopes: int) -> ChunkedModel:
    """Cut a module's graph. root: has what the graph names; at: the scopes of each node; scopes: how many there are."""
    names = chunk_of(graph, at)
    free = made_again(module, graph)
    order = list(dict.fromkeys(names[n] for n in graph.nodes if n in names and n not in free))
    _refuse_empty(module, order, scopes)
    rank = {name: i for i, name in enumerate(order)}
    placeholder, *further = (n for n in graph.nodes if n.op == "placeholder")
    result = next(n for n in graph.nodes if n.op == "output").args[0]
    crossing = [_crossing(graph, names, rank, free, i) for i in range(len(order) - 1)]
    chunks: dict[str, nn.Module] = {}
    wants: set[str] = set()
    sizes: set[str] = set()
    draws: set[str] = set()
    for i, name in enumerate(order):
        nodes = [n for n in graph.nodes if names.get(n) == name and n not in free]
        value = crossing[i - 1] if i else placeholder
        out = crossing[i] if i < len(crossing) else result
        sub, read = _subgraph(nodes, value, {placeholder: "ids", **{n: str(n.target) for n in further}}, out)
        if "draws" in read:
            draws.add(name)
        if "ids" in read and i:
            wants.add(name)
            if all(_asks_size(u) for n in sub.nodes if n.op == "placeholder" and n.target == "ids" for u in n.users):
                sizes.add(name)
        chunks[name] = fx.GraphModule(root, sub, class_name=f"Chunk_{name}")
    return ChunkedModel(chunks, frozenset(wants), frozenset(sizes), wants_draws=frozenset(draws))


def _asks_size(node: fx.Node) -> bool:
    """Whether a reader of the token ids asks for their shape, device or format only."""
    if node.op == "call_method":
        return node.target in ("size", "dim")
    return node.op == "call_function" and node.target is getattr and node.args[1] in ("shape", "device", "dtype")


def _refuse_empty(module: nn.Module, order: list[str], scopes: int) -> None:
    for i in range(scopes):
        if f"l{i}" not in order:
            message = f"annotated scope {i} of {type(module).__name__} computes nothing from weights or activations"
            fix = 'call the layer inside: with annotate("PP"): x = layer(x)'
            raise model_error(message, fix, "at least one layer in every scope")


def _trace(module: nn.Module) -> tuple[fx.Graph, At, int]:
    """The graph, the scopes of each node, and how many seams there are."""
    scopes = _Scopes()
    tracer = _Tracer(scopes)
    _tracing.append(scopes)
    try:
        with torch.enable_grad(), functions_applied(partial(_traced, tracer)):
            graph = tracer.trace(module)
    except (TypeError, RuntimeError, fx.proxy.TraceError) as error:
        message = f"the forward of {type(module).__name__} cannot be traced outside its annotated scopes: {error}"
        fix = 'move value-dependent Python into a module called inside `with annotate("PP")`'
        raise model_error(message, fix) from error
    finally:
        _tracing.pop()
    if not scopes.seen[SEAM]:
        message, fix = f"{type(module).__name__} has no annotated scope", 'with annotate("PP"): x = layer(x)'
        raise model_error(message, fix, "at least one")
    if sum(n.op == "placeholder" for n in graph.nodes) != 1:
        raise model_error(f"the forward of {type(module).__name__} must take one tensor, the token ids")
    return graph, tracer.at, scopes.seen[SEAM]


def chunk_of(graph: fx.Graph, at: At) -> dict[fx.Node, str]:
    """The chunk that each node belongs to: its own, or that of the node before it."""
    work = [n for n in graph.nodes if n.op not in ("placeholder", "output", "get_attr")]
    seam = [next((i for tag, i in at[n] if tag == SEAM), None) for n in work]
    last = max((k for k, s in enumerate(seam) if s is not None), default=-1)
    names: dict[fx.Node, str] = {}
    here = "embed"
    for k, (node, s) in enumerate(zip(work, seam, strict=True)):
        here = f"l{s}" if s is not None else ("head" if k > last else here)
        names[node] = here
    return names


def made_again(module: nn.Module, graph: fx.Graph, inputs: Collection[fx.Node] | None = None) -> set[fx.Node]:
    """What needs neither weights nor activations: made again wherever it is read, but for what is `made_once`. inputs:
    of what it may be made, too; None: of all.
    """
    params = {n for n, _ in module.named_parameters(remove_duplicate=False)}
    free: set[fx.Node] = set()
    for n in graph.nodes:
        if n.op == "output" or (n.op == "placeholder" and inputs is not None and n not in inputs):
            continue
        owns = (n.op == "get_attr" and n.target in params) or (
            n.op == "call_module" and any(True for _ in module.get_submodule(str(n.target)).parameters())
        )
        if not owns and all(i in free for i in n.all_input_nodes):
            free.add(n)
    return free - made_once(free, list(graph.nodes))


def _crossing(graph: fx.Graph, names: dict[fx.Node, str], rank: dict[str, int], free: set[fx.Node], i: int) -> fx.Node:
    alive = []
    for n in graph.nodes:
        if n in free or n not in names or rank[names[n]] > i:
            continue
        if any(u.op == "output" or (u in names and rank.get(names[u], -1) > i) for u in n.users):
            alive.append(n)
    if len(alive) != 1:
        name = {v: k for k, v in rank.items()}
        at = f"the seam between {name[i]} and {name[i + 1]}"
        message = f"{len(alive)} values cross {at}: {', '.join(map(str, alive))}"
        raise model_error(message, "combine them into one tensor, or move the seam", "one tensor")
    found: fx.Node = alive[0]
    return found


def _subgraph(nodes: list[fx.Node], value: fx.Node, outer: dict[fx.Node, str], out: Any) -> tuple[fx.Graph, set[str]]:
    """The nodes as a graph of their own, and which of the module's inputs it reads beside `value`, by name."""
    seen = ancestors((i for n in nodes for i in n.all_input_nodes), {value})
    read = {node: name for node, name in outer.items() if node in seen}
    return copied({value: "x", **read}, nodes, out), set(read.values())


def copied(inputs: Mapping[fx.Node, str], nodes: Iterable[fx.Node], out: Any) -> fx.Graph:
    """Nodes as a graph of their own, with what they read beside its inputs, which are given their names there."""
    graph = fx.Graph()
    env = {node: graph.placeholder(name) for node, name in inputs.items()}
    for node, made in env.items():
        made.meta = dict(node.meta)

    def get(node: fx.Node) -> fx.Node:
        if node not in env:
            env[node] = graph.node_copy(node, get)
        return env[node]

    for node in nodes:
        get(node)
    graph.output(fx.map_arg(out, get))
    graph.lint()
    return graph
