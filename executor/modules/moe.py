"""Parts of a mixture of experts: router, experts on the rows they receive, shared experts, the sum; dropless.

    router: x → tokens (normed), weights, indices of each token's experts
    experts: dispatch (tokens → rows sorted by expert) · products on the rows · combine (rows → sums by token)
    shared: tokens → an MLP of them          add: x + experts' + shared

`LocalExperts` is `ExpertDispatch`, `Experts` and the sum of each token's copies on one rank. Where experts are spread
over ranks, exchanges of rows (`executor.parallel.expert_all_to_all`) stand behind dispatch and before combine:

    router: x → tokens (for shared experts), rows sorted by expert with their weights, their order, counts by expert
    experts: rows from all ranks, sorted by source → regrouped by expert · products · as they came; where etp cuts
        experts, of all rows that any rank of the group got, and sums over it go back
    add: x + the sums of each token's rows + shared

Who reads what is in `ir.graph.expert_rows`.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from executor.device.device import upload
from executor.modules.functions import (
    Counts,
    balanced,
    formatted,
    grouped_linear,
    permute,
    swiglu,
    unpermute,
    unread,
    wide,
)
from executor.modules.hub_weights import BIAS
from executor.modules.layers import FeedForwardLayer, NormLayer, Params
from executor.modules.parallel import every_rows, own_sums
from executor.modules.remade import remade
from executor.parallel.expert_all_to_all import Table
from executor.parallel.inline import RankAxis
from executor.parallel.router_guide import ExpertRouterGuide, rows_of_each
from ir.workload.config.spec import ExpertConfig, ModelConfig


def moe_of(c: ModelConfig) -> ExpertConfig:
    """The config's experts; only where it has them."""
    assert c.moe is not None, c.source
    return c.moe


class ExpertRouter(nn.Module):
    """Part `router`: norm, scores, top-k. It passes on the normed tokens.

    bias: DeepSeek-V3's correction, added where experts are chosen and not where they are weighed; never trained by
    gradients, a checkpoint's or zero. guide: what it is told, and told of.
    """

    bias: Tensor | None

    def __init__(
        self, c: ModelConfig, make: Params, prefix: str, layer: int = 0, guide: ExpertRouterGuide | None = None
    ) -> None:
        super().__init__()
        self.moe, self.layer, self.guide = moe_of(c), layer, guide or ExpertRouterGuide()
        self.norm = NormLayer(c, make, f"{prefix}post_attention_layernorm", c.hidden)
        self.weight = make(f"{prefix}mlp.gate.weight", self.moe.experts, c.hidden)
        self.by_two = self.moe.scoring == "sigmoid"  # a group of experts counts by its best two
        bias = make.buffer(f"{prefix}mlp.gate.{BIAS}", self.moe.experts) if self.by_two else None
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor, number: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """x (batch, length, h) → tokens (tokens, h), weights (tokens, top_k), indices (tokens, top_k).

        number: of the microbatch in the global batch.
        """
        moe, forced = self.moe, self.guide.forced
        tokens = remade("norm", self.norm, x).flatten(0, 1)
        logits = F.linear(tokens, self.weight.to(tokens.dtype)).to(wide(tokens.dtype))
        scores = logits.sigmoid() if moe.scoring == "sigmoid" else logits.softmax(-1)
        indices = self.choose(scores.detach()) if forced is None else forced(self.layer, number)
        self.guide.chosen(self.layer, number, moe.experts, indices)
        weights = scores.gather(-1, indices)
        if moe.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        if moe.scale != 1.0:
            weights = weights * moe.scale
        if self.guide.balance:
            shares = scores / scores.sum(-1, keepdim=True) if moe.scoring == "sigmoid" else scores
            weights, loss = balanced(weights, shares, indices, len(x), self.guide.balance)
            self.guide.weighed(self.layer, number, loss.detach())
        return tokens, weights, indices

    @torch.no_grad()
    def choose(self, scores: Tensor) -> Tensor:
        """The experts of each token: (tokens, top_k), out of its best groups where routing is limited."""
        moe = self.moe
        if self.bias is not None:
            scores = scores + self.bias.to(scores.dtype)
        if moe.groups:
            groups = scores.view(len(scores), moe.groups, -1)
            best = groups.topk(2, -1).values.sum(-1) if self.by_two else groups.amax(-1)
            near = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(moe.top_groups, -1).indices, True)
            scores = groups.masked_fill(~near.unsqueeze(-1), float("-inf")).flatten(-2)
        return scores.topk(moe.top_k, -1).indices


class ExpertDispatch(nn.Module):
    """Tokens to rows, sorted by expert, and how many rows each expert has."""

    def __init__(self, top_k: int, experts: int) -> None:
        super().__init__()
        self.top_k, self.experts = top_k, experts

    def rows(self, tokens: Tensor, weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows (rows, h), their weights (rows, 1), order (rows). Stable: an expert sees tokens in order."""
        order = torch.argsort(indices.flatten(), stable=True).int()
        rows = permute(tokens, order, self.top_k)
        return rows, weights.flatten().index_select(0, order).unsqueeze(-1), order

    def counts(self, indices: Tensor) -> Tensor:
        """(experts,) rows of each, left on the device."""
        return rows_of_each(indices, self.experts)

    def read(self, indices: Tensor) -> list[int]:
        """The same, for the host."""
        if is_fake(indices):  # no values to count: balanced, as the model graph has it
            return [len(p) for p in torch.arange(indices.numel(), device="meta").tensor_split(self.experts)]
        return self.counts(indices).tolist()


class Experts(nn.Module):
    """The routed experts, on rows sorted by expert. The router's weight is applied inside, before the last product."""

    def __init__(self, c: ModelConfig, make: Params, prefix: str) -> None:
        super().__init__()
        moe = moe_of(c)
        self.up = make(f"{prefix}mlp.experts.gate_up_proj", moe.experts, 2 * moe.ffn, c.hidden)
        self.down = make(f"{prefix}mlp.experts.down_proj", moe.experts, c.hidden, moe.ffn)

    def forward(self, rows: Tensor, weights: Tensor, counts: Counts) -> Tensor:
        widen, narrow = (formatted(w, rows) for w in (self.up, self.down))
        gate, up = remade("operators", lambda rows: grouped_linear(rows, widen, counts), rows).chunk(2, -1)
        return grouped_linear(remade("activation", swiglu, gate, up, weights), narrow, counts)


class LocalExperts(nn.Module):
    """Part `experts` where all experts are on one rank. ahead: the host need not know how many rows each has."""

    def __init__(self, c: ModelConfig, make: Params, prefix: str, *, ahead: bool = False) -> None:
        super().__init__()
        moe, self.ahead = moe_of(c), ahead
        self.dispatch = ExpertDispatch(moe.top_k, moe.experts)
        self.experts = Experts(c, make, prefix)

    def forward(self, tokens: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        rows, row_weights, order = self.dispatch.rows(tokens, weights, indices)
        beside = self.ahead and all(unread(rows, w) for w in self.experts.parameters())
        counts = self.dispatch.counts(indices) if beside else self.dispatch.read(indices)
        return unpermute(self.experts(rows, row_weights, counts), order, self.dispatch.top_k)


class SharedExperts(nn.Module):
    """Part `shared`: the experts that every token goes to. It reads the router's output."""

    def __init__(self, c: ModelConfig, make: Params, prefix: str) -> None:
        super().__init__()
        self.inner = FeedForwardLayer(c, make, f"{prefix}mlp.shared_experts.", moe_of(c).shared_ffn)

    def forward(self, tokens: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        found: Tensor = self.inner(tokens)
        return found


class ExpertAdd(nn.Module):
    """Part `add`: the routed, then the shared experts' output onto the residual stream."""

    def forward(self, routed: Tensor, *rest: Tensor) -> Tensor:
        """The residual stream comes last."""
        *shared, x = rest
        for more in shared:
            routed = routed + more
        return x + routed.view_as(x)


class ExpertParallelRouter(nn.Module):
    """Part `router`: what is to leave the rank, ready to leave."""

    def __init__(self, c: ModelConfig, make: Params, prefix: str, layer: int, guide: ExpertRouterGuide) -> None:
        super().__init__()
        moe = moe_of(c)
        self.router, self.dispatch = ExpertRouter(c, make, prefix, layer, guide), ExpertDispatch(moe.top_k, moe.experts)
        self.shared = bool(moe.shared_ffn)

    def forward(self, x: Tensor, number: int = 0) -> tuple[Tensor, ...]:
        """x (batch, length, h) → rows (rows, h), weights (rows, 1), order (rows), counts (experts), and with shared
        experts tokens (tokens, h)."""
        tokens, weights, indices = self.router(x, number)
        rows, row_weights, order = self.dispatch.rows(tokens, weights, indices)
        return rows, row_weights, order, self.dispatch.counts(indices), *((tokens,) if self.shared else ())


class ExpertParallelExperts(nn.Module):
    """Part `experts`: this rank's experts, on rows from all ranks. etp: to ranks with other columns of the same."""

    def __init__(self, experts: nn.Module, etp: RankAxis | None = None) -> None:
        super().__init__()
        self.experts, self.etp = experts, etp or RankAxis()

    def forward(self, rows: Tensor, weights: Tensor, got: Sequence[Table]) -> Tensor:
        """Rows (rows, h) and weights (rows, 1) of each source, sorted by expert; got: [etp, source, expert] rows."""
        each = [sum(map(sum, table)) for table in got]
        rows, weights = (every_rows(self.etp, t, each) for t in (rows, weights))
        every = [source for table in got for source in table]
        order = by_expert(every, rows.device)
        counts = [sum(column) for column in zip(*every, strict=True)]
        found = unpermute(self.experts(permute(rows, order, 1), permute(weights, order, 1), counts), order, 1)
        return own_sums(self.etp, found, each)


def by_expert(got: Table, to: torch.device = torch.device("cpu")) -> Tensor:
    """Where each row comes from once rows sorted by source are sorted by expert. to: where the answer is wanted.

    >>> by_expert([[1, 2], [2, 0]]).tolist()
    [0, 3, 4, 1, 2]
    """
    sizes = upload(torch.tensor(got, dtype=torch.int64, device="cpu"), to)
    ends = sizes.flatten().cumsum(0).view_as(sizes)
    total, lengths = sum(map(sum, got)), sizes.t().flatten()
    starts = (ends - sizes).t().flatten()
    first = lengths.cumsum(0) - lengths
    return (torch.arange(total, device=to) + (starts - first).repeat_interleave(lengths, output_size=total)).int()


class ExpertParallelAdd(nn.Module):
    """Part `add`: the sums of each token's rows, then the shared experts' output, onto the residual stream."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.top_k, self.add = moe_of(c).top_k, ExpertAdd()

    def forward(self, rows: Tensor, order: Tensor, *rest: Tensor) -> Tensor:
        found: Tensor = self.add(unpermute(rows, order, self.top_k), *rest)
        return found
