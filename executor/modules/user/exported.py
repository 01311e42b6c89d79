"""An unmodified module cut by the paths of its modules: torch.export takes its graph, `tags` say where layers are.

Shapes are those of one microbatch. What needs Python's decisions on values is refused by torch.export, and told with
the user's line.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from executor.modules.user.annotate import SEAM, At, ChunkedModel, chunk_of, cut_at, made_again, model_error
from executor.modules.user.divided.linears import divided_modules
from executor.modules.user.divided.regions import NONE, parts_of, regions
from executor.modules.user.divided.sequence import FIX, KEY, share_between, tokens_between
from executor.modules.user.divided.shared import pairs_of
from executor.modules.user.divided.tokens import attend_to_all, share_tokens, tokens_of_a_rank
from executor.modules.user.divided.words import keep_words, tables_of
from executor.modules.user.exports.torch_export import ALLOWED, BRANCHES, export_again, export_whole
from executor.modules.user.exports.watched import (
    count_on,
    refuse_counter,
    refuse_hidden_writes,
    refuse_unseen,
)
from executor.modules.user.exports.writes import made_of, reaching, storages, written
from executor.modules.user.rewrites.attention import flag_causal, widen_values
from executor.modules.user.rewrites.dropout import ValuesOfRank, reseed
from executor.modules.user.rewrites.seams import pack_seams
from executor.parallel.divided_reads import Places, module_of, places
from executor.parallel.inline import RankRegion
from ir.core.errors import PiperError, nearest

EXPERTS = "EP"
NONE_CUT: Mapping[int, int] = {}
ALONE = RankRegion()
ASSERTIONS = ("_assert_tensor_metadata", "_assert_scalar")
TOGETHER = 'divide what reads what is divided, too, or "colwise_gather_output" for the linear before it'


def export_cut(
    module: nn.Module,
    tags: Mapping[str, str],
    size: int,
    length: int,
    region: RankRegion = ALONE,
    cut: Mapping[int, int] = NONE_CUT,
    seed: int = 0,
    whole: Places | None = None,
) -> ChunkedModel:
    """Cut at the modules that tags["PP"] matches, the n-th of them is chunk l<n>; forward takes `size` sequences of
    `length` tokens. Of what it returns, the first floating tensor of sequences, tokens and features is the logits.
    region: the ranks among which parameters are divided, and tokens; cut: these parameters, by id, and the
    dim of each. seed: of dropout. whole: `shapes_of` the module before it was divided.

    Raises PiperError (model): torch cannot export it, a pattern matches nothing, a tag is not known, forward needs more
    than ids; (job): tokens, or heads, do not divide.

    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embed, self.layers = nn.Embedding(4, 2), nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    ...     def forward(self, ids):
    ...         x = self.embed(ids)
    ...         for layer in self.layers:
    ...             x = layer(x)
    ...         return {"logits": x}
    >>> list(export_cut(Net(), {"PP": "layers.*"}, 1, 3).chunks)
    ['embed', 'l0', 'l1']
    """
    _check_tags(module, tags)
    before = copy_of(module) if region.divides > 1 else module  # what the call for all tokens notes is not in it
    with _blaming("as tp divides it", "model.tp_plan", TOGETHER, whole is not None):
        root, graph, loss, unread = _of_all(module, size, length)
    vocabulary, tables = [*graph.nodes][-1].all_input_nodes[0].meta["val"].shape[-1], tables_of(graph)
    some, few = _of_ranks(before, size, length, region, seed)
    parts = {} if whole is None else parts_of(root, whole, divided_modules(module), cut)
    flag_causal(root)
    reseed(graph, seed, ValuesOfRank(parts, region.tp.size, region.tp.index))
    pairs, attentions = {} if few is None else pairs_of(root, few), list[fx.Node]()
    if some is not None:
        again = made_again(module, graph)
        attentions = share_tokens(root, _layers(graph, tags[SEAM], again)[0], some, again, region, length)
    widen_values(root)
    attend_to_all(root, attentions, region)
    at, layers = _layers(graph, tags[SEAM], made_again(module, graph))
    if not layers:
        raise _never_called(module, graph, tags[SEAM])
    _refuse_writes(graph, chunk_of(graph, at), made_again(module, graph))
    partly, between = frozenset[int](), NONE
    if few is not None:
        inside = length // region.cp.size
        between = share_between(root, at, pairs, made_again(module, graph), cut, region, inside)
    words = keep_words(graph, region.tp.size)
    if region.tp.size > 1:
        partly = regions(root, at, made_again(module, graph), cut, region, between, words)
    told: dict[str, Any] = {"partly": partly, "idle": _idle(module, graph), "unread": unread, "loss": loss}
    pack_seams(module, graph, at, (size, length // region.divides))
    told |= {"some_words": words is not None, "vocabulary": vocabulary, "tables": tables}
    return replace(cut_at(module, root, graph, at, layers), **told)


def _of_all(module: nn.Module, size: int, length: int) -> tuple[fx.GraphModule, fx.Graph, str, frozenset[int]]:
    """Forward as a graph, which repeats exactly; the number that it returns beside the logits, if it does; and what it
    makes nothing of that it returns.
    """
    root, assigned = export_whole(module, size, length)
    if assigned:
        count_on(assigned)
        again, assigned = export_again(module, size, length) or (root, [])
        refuse_counter(assigned, root.graph, again.graph)
    refuse_hidden_writes(root)
    refuse_unseen(root)
    unread = _unread(module, root.graph)
    return root, *_tidied(module, root, (size, length)), unread


def _of_ranks(
    module: nn.Module, size: int, length: int, region: RankRegion, seed: int
) -> tuple[fx.Graph | None, fx.Graph | None]:
    """Its graphs for a cp rank's tokens, and for those that it has beside regions of tp; None where it has them all."""
    some, few, inside = None, None, length // region.cp.size
    if region.cp.size > 1:
        some = _of_fewer(module, size, tokens_of_a_rank(length, region), "parallel.cp", "cp = 1")
        reseed(some, seed)
    if region.sequence:
        few = _of_fewer(module, size, tokens_between(inside, region), KEY, FIX)
        reseed(few, seed)
    return some, few


def _of_fewer(module: nn.Module, size: int, length: int, key: str, fix: str) -> fx.Graph:
    """Its graph for as many tokens as a rank has. Raises PiperError (model): forward does not take as few."""
    with _blaming(f"a rank would have sequences of {length} tokens", key, fix):
        return _of_tokens(module, size, length)


@contextmanager
def _blaming(what: str, key: str, fix: str, really: bool = True) -> Iterator[None]:
    """Say of errors raised inside whose fault they are, if they really are."""
    try:
        yield
    except PiperError as error:
        if not really:
            raise
        message = f"{what}: {error.message}"
        raise PiperError(error.kind, message, key=key, allowed=error.allowed, suggestion=fix) from error


def _of_tokens(module: nn.Module, size: int, length: int) -> fx.Graph:
    """Its graph for sequences of so many tokens."""
    root, _ = export_whole(copy_of(module), size, length)
    return _tidied(module, root, (size, length))[0]


def shapes_of(module: nn.Module, size: int, length: int) -> Places:
    """Of all that the module computes of such microbatches, for those who hold a part of it against that. The module
    stays as it is, whatever forward notes in it: a copy is called, which has its tensors.
    """
    return places(_of_tokens(module, size, length))


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Its parameters and buffers, and tensors that are attributes and neither."""
    plain = (t for m in module.modules() for t in vars(m).values() if isinstance(t, Tensor))
    return [*module.parameters(), *module.buffers(), *plain]


def copy_of(module: nn.Module) -> nn.Module:
    """With tensors of the module's own, and what else it holds as it is now."""
    held = {id(t): t for t in tensors_of(module)}
    with suppress(Exception):  # what cannot be copied is called itself
        return deepcopy(module, held)
    return module


def _idle(module: nn.Module, graph: fx.Graph) -> frozenset[int]:
    """Parameters, by id, that no gradient of the logits reaches."""
    *nodes, result = graph.nodes
    found, params = reaching(result.all_input_nodes[0], nodes), dict(module.named_parameters(remove_duplicate=False))
    held = [n for n in nodes if n.op == "get_attr" and n.target in params]
    return frozenset(id(params[n.target]) for n in held) - {id(params[n.target]) for n in held if n in found}


def _unread(module: nn.Module, graph: fx.Graph) -> frozenset[int]:
    """Parameters, by id, of which nothing is made that the whole graph returns: no loss of that could train them."""
    *nodes, result = graph.nodes
    read = {n.target for n in made_of([result], nodes) if n.op == "get_attr"}
    params = dict(module.named_parameters(remove_duplicate=False))
    return frozenset(map(id, params.values())) - {id(p) for name, p in params.items() if name in read}


def _check_tags(module: nn.Module, tags: Mapping[str, str]) -> None:
    paths = [n for n, _ in module.named_modules() if n]
    for tag, pattern in tags.items():
        if tag not in (SEAM, EXPERTS):
            message, allowed = f"{tag} says nothing of a module of your own", f"{SEAM}, {EXPERTS}"
            raise model_error(message, "leave it out", allowed, f"model.tags.{tag}")
        if not any(fnmatchcase(p, pattern) for p in paths):
            message, near = f"no module is called {pattern!r}", nearest(pattern, _patterns(paths))
            allowed = f"a pattern of module paths, as {', '.join(_patterns(paths)[:3])}"
            raise model_error(message, near, allowed, f"model.tags.{tag}")
    if SEAM not in tags:
        raise model_error("no tag says where layers are", None, SEAM, "model.tags")


def _patterns(paths: list[str]) -> list[str]:
    """Lists of modules, as patterns."""
    return list(dict.fromkeys(f"{p.rpartition('.')[0]}.*" for p in paths if p.rpartition(".")[2].isdigit()))


def _tidied(module: nn.Module, root: fx.GraphModule, batch: tuple[int, int]) -> tuple[fx.Graph, str]:
    """The graph with the ids as its only input, the logits as its only output, and no assertions; and which number it
    also returned, a loss of its own."""
    graph, name = root.graph, type(module).__name__
    result = next(n for n in graph.nodes if n.op == "output")
    found = [n for n in tree_leaves(result.args) if isinstance(n, fx.Node) and _is_logits(n.meta.get("val"), batch)]
    if not found:
        raise model_error(f"{name} returns no tensor of sequences, tokens and features", None, ALLOWED, "model.module")
    for inner in (m for m in root.modules() if isinstance(m, fx.GraphModule)):  # code without gradients or autocast too
        for node in reversed(inner.graph.nodes):
            if node.op in ("call_function", "call_module") and any(a in str(node.target) for a in ASSERTIONS):
                inner.graph.erase_node(node)
        if inner is not root:  # whose graph is cut, and never called as a whole
            inner.recompile()
    again = made_again(module, graph)
    own = [n.name for n in tree_leaves(result.args) if isinstance(n, fx.Node) and _is_loss(n, again)]
    result.args = (found[0],)
    graph.eliminate_dead_code()
    _refuse_values(graph)
    for node in [n for n in graph.nodes if n.op == "placeholder"][1:]:
        if not node.users:
            graph.erase_node(node)
    return graph, next(iter(own), "")


def _refuse_values(graph: fx.Graph) -> None:
    """torch.export lets pass what is as large as values say, by a symbol; no rank's part of it could be told."""
    for node in graph.nodes:
        value = node.meta.get("val")
        made = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(v, Tensor) and not all(type(n) is int for n in v.shape) for v in made):
            where = f" in {path}" if (path := module_of(node)) else ""
            raise model_error(f"shapes depend on values ({node.target}{where})", BRANCHES, ALLOWED, "model.module")


def _refuse_writes(graph: fx.Graph, chunks: Mapping[fx.Node, str], again: Collection[fx.Node]) -> None:
    """Refuse writes in place to what is not one chunk's own: pieces of the graph are run apart, and some repeatedly."""
    base, order = storages(graph.nodes), {node: k for k, node in enumerate(graph.nodes)}
    for node, root in [(n, base[t]) for n in graph.nodes for t in written(n)]:
        if root.op in ("get_attr", "placeholder"):
            raise _written(f"writes {root.target} in forward")
        same = [n for n, r in base.items() if r is root]
        if node in again:  # whoever reads its result makes all of it again; nobody else may read behind it
            fine = all(order[u] <= order[node] for n in same if order[n] < order[node] for u in n.users)
        elif root in again:
            fine = {chunks.get(u) for n in same for u in n.users} == {chunks[node]}
        else:
            fine = chunks[root] == chunks[node]
        if not fine:
            raise _written(f"writes in place what another layer makes or reads ({node.target})")


def _written(what: str) -> PiperError:
    message = f"forward {what}, which no plan could repeat exactly"
    return model_error(message, "make a new tensor instead", ALLOWED, "model.module")


def _is_logits(value: object, batch: tuple[int, int]) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3 and value.shape[:2] == batch


def logits_of(found: object, batch: tuple[int, int]) -> Tensor:
    """Of what a forward returns."""
    logits: Tensor = next(x for x in tree_leaves(found) if _is_logits(x, batch))
    return logits


def _is_loss(node: fx.Node, again: Collection[fx.Node]) -> bool:
    """Whether it is one number, computed from parameters."""
    value = node.meta.get("val")
    floating = isinstance(value, Tensor) and value.is_floating_point() and not value.dim()
    return floating and node.op != "get_attr" and node not in again


def _layers(graph: fx.Graph, pattern: str, again: Collection[fx.Node]) -> tuple[At, int]:
    """Of each node the layer it belongs to, the outermost module on its path that the pattern matches; how many there
    are. A module that is called again behind another one is a layer each time."""
    seen: dict[str, int] = {}
    at: At = {}
    worked: set[str] = set()
    layers, here = 0, ""
    for node in graph.nodes:
        stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
        path = next((str(p) for p, _ in stack.values() if p and fnmatchcase(str(p), pattern)), None)
        if path is None:
            at[node] = ()
            continue
        works = node.op != "get_attr" and node not in again
        if path not in seen or (works and path != here and path in worked):
            seen[path], layers = layers, layers + 1
        if works:
            here = path
            worked.add(path)
        at[node] = ((SEAM, seen[path]),)
    return at, layers


def _never_called(module: nn.Module, graph: fx.Graph, pattern: str) -> PiperError:
    message = f"{pattern!r} matches modules of {type(module).__name__} that forward never calls"
    inside = any(fnmatchcase(module_of(node), f"{pattern}.*") for node in graph.nodes)  # of a list those in it
    return model_error(message, f"{pattern}.*" if inside else None, "modules that forward calls", f"model.tags.{SEAM}")
