"""Parts of a mixture of experts whose experts are spread over ranks; between them stand exchanges of rows.

    router: x → tokens (for shared experts), rows sorted by expert with their weights, their order, counts by expert
    experts: rows from all ranks, sorted by source → regrouped by expert · products · as they came
    add: x + the sums of each token's rows + shared

The exchanges between them (`executor.parallel.expert_all_to_all`): counts and dispatch behind the router, combine
behind the experts. Who reads what is in `ir.graph.expert_rows`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from executor.modules.functions import permute, unpermute
from executor.modules.layers import Params
from executor.modules.moe.experts import ExpertAdd, ExpertCombine, ExpertDispatch, ExpertRouter, moe_of
from executor.parallel.expert_all_to_all import Table
from executor.parallel.router_guide import ExpertRouterGuide
from ir.workload.config.spec import ModelConfig


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
    """Part `experts`: this rank's experts, on rows from all ranks."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, rows: Tensor, weights: Tensor, got: Table) -> Tensor:
        """Rows (rows, h) and weights (rows, 1) of each source, sorted by expert; got: [source, expert] rows."""
        order = by_expert(got).to(rows.device)
        counts = [sum(column) for column in zip(*got, strict=True)]
        return unpermute(self.experts(permute(rows, order, 1), permute(weights, order, 1), counts), order, 1)


def by_expert(got: Table) -> Tensor:
    """Where each row comes from once rows sorted by source are sorted by expert.

    >>> by_expert([[1, 2], [2, 0]]).tolist()
    [0, 3, 4, 1, 2]
    """
    sizes = torch.tensor(got, dtype=torch.int64)
    ends = sizes.flatten().cumsum(0).view_as(sizes)
    total, lengths = sum(map(sum, got)), sizes.t().flatten()
    starts = (ends - sizes).t().flatten()
    first = lengths.cumsum(0) - lengths
    return (torch.arange(total) + (starts - first).repeat_interleave(lengths, output_size=total)).int()


class ExpertParallelAdd(nn.Module):
    """Part `add`: the sums of each token's rows, then the shared experts' output, onto the residual stream."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.combine, self.add = ExpertCombine(moe_of(c).top_k), ExpertAdd()

    def forward(self, rows: Tensor, order: Tensor, *rest: Tensor) -> Tensor:
        found: Tensor = self.add(self.combine(rows, order), *rest)
        return found
