"""Tensor parallelism of a user's module: each rank holds its part of the linears that a plan names.

The plan is the model's own (`tp_plan` of transformers' classes) or the job's. It says which parameters are cut; the
rest is read off the exported graph (`regions`), where marks stand at the ends of what is divided.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from executor.modules.parallel import leave
from executor.parallel.inline import RankRegion
from executor.parallel.shares import ParamShard, ShardCut
from ir.core.errors import ErrorKind, PiperError, job_error, nearest
from ir.workload.setting import uneven

STYLES = ("colwise", "rowwise", "embedding_rowwise", "colwise_gather_output")
READ_OFF = "replicated_with_grad_allreduce"
LOCAL = "local_params"  # of a module that reads its own vectors (sinks of heads), which the plan divides
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
    paths, found = [n for n, _ in module.named_modules() if n], dict[str, str]()
    held = [n for n, _ in module.named_parameters(remove_duplicate=False)]
    bare = [p.split(".") for p, style in own.items() if style == LOCAL]
    paths += held if table else [n for n in held if any(_alike(n.split(".")[:-1], words) for words in bare)]
    for pattern, style in (table or own).items():
        words = pattern.split(".")
        hit = [p for p in paths if _alike(p.split("."), words)]
        if table and not hit:
            message, near = f"no module is called {pattern!r}", nearest(pattern, paths)
            raise job_error("model.tp_plan", message, near, ALLOWED)
        found |= dict.fromkeys(hit, style)
    if not found:
        message = f"{type(module).__name__} has nothing that its own tp_plan names, as where adapters are put in"
        raise job_error("model.tp_plan", message, f'the job\'s own: tp_plan = {{"{paths[-1]}" = "…"}}', ALLOWED)
    return {p: s for p, s in found.items() if s in STYLES}


def _alike(words: list[str], pattern: list[str]) -> bool:
    return len(words) == len(pattern) and all(b in ("*", a) for a, b in zip(words, pattern, strict=True))


def _cut(module: nn.Module, path: str, style: str, region: RankRegion) -> dict[int, int]:
    """Which dims of which parameters (by id) are cut; the module's forward ends in what its style asks for."""
    if path in dict(module.named_parameters(remove_duplicate=False)):
        return {id(module.get_parameter(path)): int(style == "rowwise")}
    part, size = module.get_submodule(path), region.tp.size
    made = "weight" not in part._parameters  # of others, by a parametrization
    plain = type(part).forward is nn.Linear.forward and not made
    match style, part:
        case "embedding_rowwise", nn.Embedding() if not (part.scale_grad_by_freq or made):
            each = part.num_embeddings // size  # others' words look up one here, which must not count
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
    why = " that counts words (scale_grad_by_freq)" if getattr(part, "scale_grad_by_freq", False) else ""
    why = " whose weight is made of others" if made and hasattr(part, "weight") else why
    message = f"{path} is a {type(part).__name__}{why}, which {style} does not divide"
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


def divided_modules(module: nn.Module) -> frozenset[str]:
    """Paths of the divided modules whose forward is another than the whole module's."""
    own = (_row_parallel, _gathered, _words)
    every = module.named_modules(remove_duplicate=False)  # under whichever of its paths it is called
    return frozenset(n for n, part in every if getattr(vars(part).get("forward"), "func", None) in own)
