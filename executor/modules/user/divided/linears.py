"""Tensor parallelism of a user's module: each rank holds its part of the linears that a plan names.

The plan is the model's own (`tp_plan` of transformers' classes) or the job's. It says which parameters are cut; the
rest is read off the exported graph. A value is *apart* where it is made of a cut parameter and nothing has summed or
gathered it since. What all ranks have, and a rank reads into what is apart, enters there: its gradient is a sum over
ranks. Of a parameter that does so (a norm of each head) every rank has a part of the gradient.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from executor.modules.parallel import enter, leave, whole
from executor.modules.user.annotate import At, chunk_of
from executor.modules.user.writes import times_written, written_otherwise
from executor.parallel.divided_reads import Places, divided_read, module_of
from executor.parallel.inline import RankRegion
from executor.parallel.shares import ParamShard, ShardCut
from ir.core.errors import ErrorKind, PiperError, job_error, nearest
from ir.workload.setting import uneven

STYLES = ("colwise", "rowwise", "embedding_rowwise", "colwise_gather_output")
READ_OFF = "replicated_with_grad_allreduce"
HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads", "v_proj": "num_key_value_heads"}
ALLOWED = 'patterns of module paths, each "colwise", "rowwise", "embedding_rowwise" or "colwise_gather_output"'

# Marks, which stand in the exported graph until a rank puts its own ends of the region there.
_leaves = torch.library.custom_op("piper_sim::leave", Tensor.clone, mutates_args=(), schema="(Tensor x) -> Tensor")
_leaves.register_fake(torch.empty_like)
_gathers = torch.library.custom_op(
    "piper_sim::whole",
    lambda x, size: torch.cat([x] * size, -1),
    mutates_args=(),
    schema="(Tensor x, int size) -> Tensor",
)
_gathers.register_fake(lambda x, size: x.new_empty(*x.shape[:-1], x.shape[-1] * size))
LEAVE, FEATURES = torch.ops.piper_sim.leave.default, torch.ops.piper_sim.whole.default
ENDS = {LEAVE: leave, FEATURES: None}
# Of values that a rank has of its tokens alone: along which dim these lie, in how many stretches, and the whole value.
Between = Mapping[fx.Node, tuple[int, int, Tensor]]
NONE: Between = {}


@dataclass(frozen=True)
class ModelShard:
    """What a rank has of a model. region: the ranks that share its linears, as `plan` says or, without one, the module
    itself; ep: over how many ranks its experts are, of which this is the `index`-th.
    """

    region: RankRegion = field(default_factory=RankRegion)
    plan: Mapping[str, str] = field(default_factory=dict)
    ep: int = 1
    index: int = 0

    def refuse_annotated(self) -> None:
        """Raise PiperError (job): it is a part of a layer, of which annotated code has no graph."""
        for axis, ranks in (("tp", self.region.tp), ("cp", self.region.cp)):
            if ranks.size > 1:
                message, fix = f"annotated code is not divided over {axis}", 'tags = { PP = "model.layers.*" }'
                raise job_error(f"parallel.{axis}", message, fix, "1 without tags")


def divide(module: nn.Module, table: Mapping[str, str], region: RankRegion) -> dict[str, int]:
    """Cut a module's parameters as this rank of the region holds them; returns the dim that each is cut along, by name.

    table: patterns of module paths and their styles, a star standing for one word; without it the module's own.

    Raises PiperError (job, model): there is no plan, a style or path is not known, a size does not divide.

    >>> from executor.parallel.inline import RankAxis
    >>> net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> divide(net, {"0": "colwise", "2": "rowwise"}, RankRegion(RankAxis(2, 1)))
    {'0.weight': 0, '0.bias': 0, '2.weight': 1}
    >>> net[0].weight.shape, net[2].weight.shape
    (torch.Size([2, 2]), torch.Size([2, 2]))
    """
    tp, names = region.tp, {id(p): n for n, p in module.named_parameters()}
    dims: dict[int, int] = {}
    for path, style in _styles(module, table).items():
        _check_heads(module, path, tp.size)
        dims |= _cut(module, path, style, region)
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for own, p in list(part.named_parameters(recurse=False)):
            if id(p) not in dims:
                continue
            if p.shape[dims[id(p)]] % tp.size:
                raise uneven("tp", tp.size, f"size {dims[id(p)]} of {names[id(p)]}", p.shape[dims[id(p)]])
            if id(p) not in made:
                cut = ShardCut(dims[id(p)], tp.index, tp.size, (p.shape[dims[id(p)]],))
                made[id(p)] = nn.Parameter(ParamShard(tuple(p.shape), (cut,)).take(p.detach()), p.requires_grad)
            part.register_parameter(own, made[id(p)])
    return {n: dims[k] for k, n in names.items() if k in dims}


def _styles(module: nn.Module, table: Mapping[str, str]) -> dict[str, str]:
    """Of each path that the plan names and that is there, its style; of the module's own, those that are known."""
    own: Mapping[str, str] = getattr(module, "tp_plan", None) or {}
    if not (table or own):
        message = f"nothing says how {type(module).__name__} is divided over tp: it has no tp_plan of its own"
        fix = 'tp_plan = {"layers.*.up" = "colwise", "layers.*.down" = "rowwise"}'
        raise job_error("model.tp_plan", message, fix, ALLOWED)
    for pattern, style in table.items():
        if style not in (*STYLES, READ_OFF):
            raise job_error("model.tp_plan", f"{pattern}: no such style, {style!r}", nearest(style, STYLES), ALLOWED)
    paths = [n for n, _ in module.named_modules() if n]
    if table:
        paths += [n for n, _ in module.named_parameters(remove_duplicate=False)]
    found: dict[str, str] = {}
    for pattern, style in (table or own).items():
        words = pattern.split(".")
        hit = [p for p in paths if _alike(p.split("."), words)]
        if table and not hit:
            message, near = f"no module is called {pattern!r}", nearest(pattern, paths)
            raise job_error("model.tp_plan", message, near, ALLOWED)
        found |= dict.fromkeys(hit, style)
    return {p: s for p, s in found.items() if s in STYLES}


def _alike(words: list[str], pattern: list[str]) -> bool:
    return len(words) == len(pattern) and all(b in ("*", a) for a, b in zip(words, pattern, strict=True))


def _cut(module: nn.Module, path: str, style: str, region: RankRegion) -> dict[int, int]:
    """Which dims of which parameters (by id) are cut; the module's forward ends in what its style asks for."""
    if path in dict(module.named_parameters(remove_duplicate=False)):
        return {id(module.get_parameter(path)): int(style == "rowwise")}
    part, size = module.get_submodule(path), region.tp.size
    plain = type(part).forward is nn.Linear.forward
    match style, part:
        case "embedding_rowwise", nn.Embedding() if not part.scale_grad_by_freq:  # others' words look up one here
            each = part.num_embeddings // size
            vars(part)["forward"] = partial(_words, part.forward, region.tp.index * each, each)
            if part.padding_idx is not None:  # whose row has no gradient, where it is
                at = part.padding_idx - region.tp.index * each
                part.padding_idx = at if 0 <= at < each else None
            return {id(part.weight): 0}
        case "rowwise", nn.Linear() if plain:
            vars(part)["forward"] = partial(_row_parallel, part)
            return {id(part.weight): 1}
        case (("colwise" | "colwise_gather_output"), nn.Linear()) if plain:
            if style == "colwise_gather_output":
                vars(part)["forward"] = partial(_gathered, part, size)
            return {id(part.weight): 0} | ({} if part.bias is None else {id(part.bias): 0})
    counts = " that counts words (scale_grad_by_freq)" if getattr(part, "scale_grad_by_freq", False) else ""
    message = f"{path} is a {type(part).__name__}{counts}, which {style} does not divide"
    raise PiperError(ErrorKind.JOB, message, key="model.tp_plan", allowed="nn.Linear, nn.Embedding or a parameter")


def _row_parallel(part: nn.Linear, x: Tensor) -> Tensor:
    y: Tensor = _leaves(F.linear(x, part.weight))
    return y if part.bias is None else y + part.bias


def _gathered(part: nn.Linear, size: int, x: Tensor) -> Tensor:
    found: Tensor = _gathers(F.linear(x, part.weight, part.bias), size)
    return found


def _words(look_up: Callable[[Tensor], Tensor], first: int, size: int, ids: Tensor) -> Tensor:
    """Of whose words this rank holds `size` from the `first` on."""
    at = ids - first
    elsewhere = (at < 0) | (at >= size)
    found: Tensor = _leaves(look_up(at.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0.0))
    return found


def _check_heads(module: nn.Module, path: str, size: int) -> None:
    """A head is not cut: said here by its number, as torch would say it by shapes."""
    key = HEADS.get(path.rpartition(".")[2], "")
    heads = getattr(getattr(module, "config", None), key, None)
    if isinstance(heads, int) and heads % size:
        raise uneven("tp", size, key, heads)


def regions(
    root: fx.GraphModule,
    at: At,
    again: Collection[fx.Node],
    cut: Collection[int],
    region: RankRegion,
    between: Between = NONE,
) -> frozenset[int]:
    """Put entries where values that all ranks have are read into what is apart, and make its ends this rank's.

    at: the scopes of nodes, added to. again: what depends on no parameter and no activation. cut: parameters, by id.
    between: of what a rank has for its own tokens, with sequence parallelism. Returns the parameters of whose gradient
    each rank has a part, by id.

    Raises PiperError (model): something apart is left so where a layer or the model ends, or is ended twice.
    """
    graph = root.graph
    apart, alone = apart_from(root, cut), of_parameters_alone(root, again)
    chunks, times = chunk_of(graph, at), times_written(graph.nodes)
    if (away := written_otherwise(graph.nodes, apart.__contains__)) is not None:
        raise _unseen(away)
    partly, wholly = set[int](), set[int]()
    everywhere = replace(region, sequence=False)  # the same where all ranks have all tokens
    entries: dict[tuple[fx.Node, str, int], fx.Node] = {}
    for node in list(graph.nodes):
        beyond = [u for u in node.users if u.op == "output" or chunks[u] != chunks.get(node, chunks[u])]
        ends = node.target in ENDS
        if (node in apart and beyond) or (ends and node.args[0] not in apart):
            raise _unfinished(node)
        if ends and node in alone:  # what each rank reads of it would be a part of its gradient
            raise _of_no_tokens(node)
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
                        entry = graph.call_function(along(_bound(enter, here), dim, repeats), (read,))
                    entry.meta, at[entry] = {**read.meta, "val": value}, at[node]
                    entries[key] = entry
                node.replace_input_with(read, entry)
    for node in graph.nodes:
        if node.target in ENDS:
            dim, repeats, _ = between.get(node, (-2, 1, None))
            here = region if node in between else everywhere
            node.target, node.args = along(_bound(ENDS[node.target] or _features, here), dim, repeats), node.args[:1]
    if (both := partly & wholly) and not region.sequence:
        named = next(n for n, p in root.named_parameters() if id(p) in both)
        message = f"{named} is read inside and outside of what tp divides"
        raise PiperError(ErrorKind.MODEL, message, key="model.tp_plan", allowed="one of them")
    return frozenset(partly - {*cut})


def divided_modules(module: nn.Module) -> frozenset[str]:
    """Paths of the divided modules whose forward is another than the whole module's."""
    own = (_row_parallel, _gathered, _words)
    every = module.named_modules(remove_duplicate=False)  # under whichever of its paths it is called
    return frozenset(n for n, part in every if getattr(vars(part).get("forward"), "func", None) in own)


def refuse_divided_reads(root: fx.GraphModule, whole: Places, apart: Collection[str]) -> None:
    """whole: what the module computes undivided. Raises PiperError (model): something else than a part of that."""
    wrong = divided_read(root.graph, whole, apart)
    if wrong is not None:
        message, allowed = f"{_where(wrong.node)}, {wrong.why}", "ops of each feature; view(…, -1, head_dim)"
        fix = '"colwise_gather_output" for the linear before it'
        raise PiperError(ErrorKind.MODEL, message, key="model.tp_plan", allowed=allowed, suggestion=fix)


def _features(x: Tensor, region: RankRegion) -> Tensor:
    return whole(x.unsqueeze(-1), region).squeeze(-1)


def _bound(function: Callable[[Tensor, RankRegion], Tensor], region: RankRegion) -> Callable[[Tensor], Tensor]:
    def bound(x: Tensor) -> Tensor:
        return function(x, region)

    bound.__name__ = function.__name__
    return bound


def along(function: Callable[[Tensor], Tensor], dim: int, repeats: int) -> Callable[[Tensor], Tensor]:
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


def apart_from(root: fx.GraphModule, cut: Collection[int]) -> set[fx.Node]:
    """What is made of these parameters, by id, and neither summed nor gathered since."""
    out: set[fx.Node] = set()
    for node in root.graph.nodes:
        held = node.op == "get_attr" and id(_held(root, node)) in cut
        if held or (node.op != "output" and node.target not in ENDS and any(i in out for i in node.all_input_nodes)):
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
            out[node] = frozenset([id(_held(root, node))])
        elif any(i in out for i in node.all_input_nodes) and all(i in out or i in again for i in node.all_input_nodes):
            out[node] = frozenset[int]().union(*(out.get(i, frozenset()) for i in node.all_input_nodes))
    return out


def _held(root: fx.GraphModule, node: fx.Node) -> Any:
    path, _, name = str(node.target).rpartition(".")
    return getattr(root.get_submodule(path), name)


def floating(value: object) -> bool:
    """Whether it may have a gradient."""
    return not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex()


def _unfinished(node: fx.Node) -> PiperError:
    message = f"{_where(node)}, is divided over tp where nothing sums it, or not where it is summed"
    fix = "each colwise linear's output ends in a rowwise one"
    return PiperError(ErrorKind.MODEL, message, key="model.tp_plan", allowed=ALLOWED, suggestion=fix)


def _of_no_tokens(node: fx.Node) -> PiperError:
    message = f"{_where(node)}, is divided over tp, and is made of parameters alone: of no tokens"
    return PiperError(ErrorKind.MODEL, message, key="model.tp_plan", suggestion="leave it out")


def _unseen(node: fx.Node) -> PiperError:
    message = f"{_where(node)}, writes in place what is read behind it, inside of what tp divides or outside"
    return PiperError(ErrorKind.MODEL, message, key="model.tp_plan", suggestion="make a new tensor instead")


def _where(node: fx.Node) -> str:
    """Where a user finds a node."""
    return f"{node.name}, in {module_of(node) or 'forward'}"
