"""Experts of a user's module as parts of their own: what stands before them sends rows, what stands behind sums them.

A module is experts where its forward takes (tokens, each token's experts, their weights), all its parameters begin
with the expert, and it says what experts make of rows: by a method `grouped(rows, counts)`, the rows being sorted by
expert and counts saying how many each has; or as transformers' classes do, by the names of its stacked weights.
Around it stand the reference modules' dispatch and combine (`executor.modules.moe`). Tensor-parallel ranks send a
stretch of the tokens each, which they all have, or, with sequence parallelism, those that they have.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from fnmatch import fnmatchcase
from inspect import Signature, signature
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import is_fake

from executor.modules.base import DRAWS
from executor.modules.functions import grouped_linear, unpermute
from executor.modules.moe import ExpertDispatch, ExpertParallelExperts
from executor.modules.parallel import own, whole
from executor.modules.user.annotate import copied, made_again, model_error
from executor.modules.user.exports.writes import ancestors, made_of, storages, unlike, written
from executor.modules.user.purity import refuse_unlike
from executor.parallel.expert_all_to_all import Table
from executor.parallel.inline import RankRegion
from executor.parallel.shares import ParamShard, ShardCut
from ir.core.errors import job_error
from ir.workload.setting import uneven

SENT = 4  # outputs of a router that are about rows: the rows, their weights, their order, how many
FIX = "def grouped(self, rows, counts): return torch.cat([… for r, w in zip(rows.split(counts), self.weight)])"

_experts = torch.library.custom_op(
    "piper_sim::experts",
    lambda x, index, weights, number: x.clone(),
    mutates_args=(),
    schema="(Tensor x, Tensor index, Tensor weights, int number) -> Tensor",
)
_experts.register_fake(lambda x, index, weights, number: torch.empty_like(x))
MARK = torch.ops.piper_sim.experts.default


def mark_experts(module: nn.Module, pattern: str, ranks: int, index: int) -> list[nn.Module]:
    """The modules that are called so, each with the experts that one of several ranks holds; forward marks their place.

    Raises PiperError (model, job): a module is no experts; there are not as many for each rank.
    """
    found = [(path, part) for path, part in module.named_modules() if path and fnmatchcase(path, pattern)]
    made: dict[int, nn.Parameter] = {}  # what two layers share stays one
    for number, (path, part) in enumerate(found):
        count = _check(path, part)
        if count % ranks:
            near = max(d for d in range(1, ranks + 1) if count % d == 0)
            message = f"ep = {ranks} does not divide the {count} experts of {path}"
            raise job_error("parallel.ep", message, f"ep = {near}", f"divisors of {count}")
        for sub in part.modules():
            for name, p in list(sub.named_parameters(recurse=False)):
                if id(p) not in made:
                    share = ParamShard(tuple(p.shape), (ShardCut(0, index, ranks, (count,)),))
                    made[id(p)] = nn.Parameter(share.take(p.detach()), p.requires_grad)
                sub.register_parameter(name, made[id(p)])
        vars(part)["forward"] = _Mark(number, signature(part.forward))
    return [part for _, part in found]


@dataclass(frozen=True)
class _Mark:
    number: int
    takes: Signature

    def __call__(self, *given: Tensor, **named: Tensor) -> Tensor:
        found: Tensor = _experts(*self.takes.bind(*given, **named).arguments.values(), self.number)
        return found


def _check(path: str, part: nn.Module) -> int:
    sizes = {p.shape[0] if p.dim() else 0 for p in part.parameters()}
    stacked = hasattr(part, "down_proj") and hasattr(part, "is_transposed")
    if len(sizes) != 1 or not (stacked or hasattr(part, "grouped")):
        message = f"{path} is a {type(part).__name__}, which does not say what single experts do"
        allowed = "a module whose parameters all begin with the expert, with a method grouped(rows, counts)"
        raise model_error(message, FIX, allowed, "model.tags.EP")
    return sizes.pop()


def grouped(part: Any, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """What a module's experts make of rows sorted by expert."""
    if hasattr(part, "grouped"):
        found: Tensor = part.grouped(rows, list(counts))
        return found
    first = "gate_up_proj" if part.has_gate else "up_proj"
    up = _linear(part, first, rows, counts)
    return _linear(part, "down_proj", part._apply_gate(up) if part.has_gate else part.act_fn(up), counts)


def _linear(part: Any, name: str, rows: Tensor, counts: Sequence[int]) -> Tensor:
    weight = getattr(part, name)
    y = grouped_linear(rows, weight.transpose(-1, -2) if part.is_transposed else weight, counts)
    if not part.has_bias:
        return y
    each = zip(getattr(part, f"{name}_bias").unbind(0), counts, strict=True)
    return y + torch.cat([b.expand(n, -1) for b, n in each])


class UserExperts(nn.Module):
    """A rank's experts on rows sorted by expert, weighed behind."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, rows: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
        return (grouped(self.inner, rows, counts) * weights).to(rows.dtype)


class UserExpertRouter(nn.Module):
    """Part `router`: all of a layer that its experts' input is made of; and what the rest of the layer reads of it.

    given: the token ids, where it reads them; what dropout depends on, where something before the experts drops out.
    """

    def __init__(self, inner: nn.Module, top_k: int, experts: int, region: RankRegion) -> None:
        super().__init__()
        self.inner, self.region, self.dispatch = inner, region, ExpertDispatch(top_k, experts)

    def forward(self, x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        """x (batch, length, h) → rows (rows, h), weights (rows, 1), order (rows), counts (experts), what is carried."""
        tokens, indices, weights, *carried = self.inner(x, *given)
        if (tp := self.region.tp).size > 1 and not self.region.sequence:
            tokens, weights = own(tokens, self.region), own(weights, self.region)
            indices = indices.chunk(tp.size)[tp.index]
        rows, row_weights, order = self.dispatch.rows(tokens, weights, indices)
        return rows, row_weights, order, self.dispatch.counts(indices), *carried


class UserExpertsOfOneRank(ExpertParallelExperts):
    """Part `experts` where no rows travel: their numbers come from the router."""

    def forward(self, rows: Tensor, weights: Tensor, got: Sequence[Table] | Tensor) -> Tensor:
        if isinstance(got, Tensor):
            got = [[balanced(len(rows), len(got)) if is_fake(got) else got.tolist()]]
        return super().forward(rows, weights, got)


class UserExpertAdd(nn.Module):
    """Part `add`: the rest of the layer, which reads the sums of each token's rows, and draws where it drops out."""

    def __init__(self, inner: nn.Module, top_k: int, region: RankRegion) -> None:
        super().__init__()
        self.inner, self.region, self.top_k = inner, region, top_k

    def forward(self, rows: Tensor, order: Tensor, *carried: Tensor) -> Tensor:
        """What was carried comes last."""
        sums = unpermute(rows, order, self.top_k)
        found: Tensor = self.inner(sums if self.region.sequence else whole(sums, self.region), *carried)
        return found


def balanced(rows: int, experts: int) -> list[int]:
    """As even as can be.

    >>> balanced(5, 2)
    [3, 2]
    """
    return [rows // experts + (k < rows % experts) for k in range(experts)]


@dataclass(frozen=True)
class ExpertChunk:
    """A layer cut at its experts. carried: how many values it hands past them. draws: the parts that drop out."""

    router: fx.GraphModule
    add: fx.GraphModule
    number: int  # which of the model's experts
    top_k: int
    width: int  # features of a token
    carried: int
    draws: frozenset[str]


def cut_at_experts(name: str, chunk: nn.Module, region: RankRegion, *, ids: bool = False) -> ExpertChunk | None:
    """A chunk as the three parts that it is, where experts were marked in it. ids: it reads the token ids, too.

    Raises PiperError (model): there are two, or it reads more, or it gives its experts no rows of tokens; (job): ranks
    that all have these would not send equal stretches.
    """
    nodes = list(chunk.graph.nodes) if isinstance(chunk, fx.GraphModule) else []
    marks, inputs = [n for n in nodes if n.target is MARK], [n for n in nodes if n.op == "placeholder"]
    draws = [n for n in inputs if n.target == DRAWS]
    inputs = [n for n in inputs if n not in draws]
    if not marks:
        return None
    values = [n.meta["val"] for n in marks[0].args[:3]]
    if len(inputs) > 1 + ids:
        message = f"{name} reads {len(inputs)} tensors, and its experts are to be spread"
        fix = f"a pattern of modules that leaves {name}'s out"
        raise model_error(message, fix, "experts of layers that read one tensor, and token ids", "model.tags.EP")
    if len(marks) > 1 or any(v.dim() != 2 for v in values):
        shapes = [list(v.shape) for v in values]
        message = f"{name} has {len(marks)} modules of experts, the first of which reads {shapes}"
        allowed = "one a layer, on (tokens, features), (tokens, top_k), (tokens, top_k)"
        raise model_error(message, "flatten tokens", allowed, "model.tags.EP")
    if not region.sequence and values[0].shape[0] % region.tp.size:
        raise uneven("tp", region.tp.size, f"tokens of a microbatch, which {name} shares out", values[0].shape[0])
    ahead, base = nodes[: nodes.index(marks[0])], storages(nodes)
    free = made_again(chunk, marks[0].graph, draws)
    free -= unlike(free, nodes)
    before = made_of(marks[0].all_input_nodes, ahead)
    behind = [n for n in nodes if n not in before and n is not marks[0] and n not in free and n.op != "get_attr"]
    read = {i for n in behind for i in n.all_input_nodes}
    if late := [n for n in behind if any(base[t] in before for t in written(n))]:
        message = f"{name} writes in place, behind its experts, what stands before them ({late[0].target})"
        raise model_error(message, "make a new tensor instead", key="model.module")
    carried = [n for n in nodes if n in read and n in (before | {*inputs}) and n not in free and n.op != "get_attr"]
    drawn = {"router": before, "add": ancestors(behind, before - free)}
    reads = {part: draws if read.intersection(draws) else [] for part, read in drawn.items()}
    router = _graph([*inputs, *reads["router"]], [n for n in nodes if n in before], (*marks[0].args[:3], *carried))
    add = _graph([marks[0], *carried, *reads["add"]], behind[:-1], behind[-1].args[0])
    made = [fx.GraphModule(chunk, g, class_name=f"{n}_{name}") for n, g in (("Router", router), ("Add", add))]
    of_tokens = (values[1].shape[1], values[0].shape[1], len(carried))
    return ExpertChunk(made[0], made[1], marks[0].args[3], *of_tokens, frozenset(p for p in reads if reads[p]))


def _graph(inputs: Sequence[fx.Node], body: Sequence[fx.Node], out: Any) -> fx.Graph:
    """A graph of some nodes, and of the parameters and constants that they read."""
    return copied({n: f"x{k}" for k, n in enumerate(inputs)}, (n for n in body if n.op != "placeholder"), out)


def refuse_unlike_experts(name: str, part: nn.Module, cut: ExpertChunk, ranks: int, most: int) -> int:
    """Hold `grouped` of the last rank's experts against the forward of all, on a token for each, or on the last few
    where that is more than `most` products; returns how many it took.

    Raises PiperError (model): another result, or a row's depends on how many rows there are or on the calls before.
    """
    count, k = next(part.parameters()).shape[0], cut.top_k
    here, each = count // ranks, sum(p.numel() for p in part.parameters()) // count
    first, few = count - here, max(1, min(count, most // (3 * k * each + 1)))
    parts = {id(p): nn.Parameter(p.detach()[first:], p.requires_grad) for p in part.parameters()}  # views: no copies
    local = deepcopy(part, {**parts})
    draw, dtype = torch.Generator("cpu").manual_seed(0), next(part.parameters()).dtype
    like: dict[str, Any] = {"dtype": dtype, "generator": draw, "device": "cpu"}
    tokens, weights = torch.randn(few, cut.width, **like), torch.rand(few, k, **like)
    last = torch.arange(count - few, count, device="cpu").unsqueeze(1)
    index = (last - torch.arange(k, device="cpu")) % count
    weights = weights.masked_fill(index < first, 0.0)
    counts = index.flatten().bincount(minlength=count).tolist()
    order = index.flatten().argsort(stable=True)[sum(counts[:first]) :]
    rows = tokens.repeat_interleave(k, 0)

    def ours() -> Tensor:
        made = torch.zeros_like(rows)
        made[order] = grouped(local, rows[order].clone(), counts[first:])
        return (made.view(few, k, -1) * weights.unsqueeze(-1)).sum(1)

    def of_first(times: int) -> Tensor:
        return grouped(local, rows[order[:1]].repeat(times, 1), [times, *[0] * (here - 1)])[-1:]

    fix = "grouped(rows, counts) of each row and its expert's parameters alone"
    refuse_unlike(lambda: type(part).forward(part, tokens, index, weights), ours, f"grouped of {name}", fix)
    refuse_unlike(lambda: of_first(1), lambda: of_first(9), f"grouped of {name}, of more rows,", fix)
    return (2 * few * k + 10) * each
