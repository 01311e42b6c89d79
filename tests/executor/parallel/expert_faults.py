"""Ranks that tell what they exchange, or do one thing wrong with spread experts; each the target of a launch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from executor.autograd import stage as chunk
from executor.measure.peak_bytes import DONE
from executor.modules import moe
from executor.optim.optimizer import ParamGradients
from executor.optim.sync import BucketSync, Start
from executor.parallel.collective import Collective
from executor.parallel.expert_all_to_all import ExpertAllToAll, ExpertGroup, ExpertRoute, ExpertTransfer, Table
from executor.runtime.rank import train_rank
from executor.runtime.worker import RankContext
from executor.transport.base import Transport, TransportHandle
from executor.transport.groups import GlooTransport
from ir.core.work import MessageKind


def told(ctx: RankContext, fault: dict[str, Any], **spec: Any) -> Any:
    """Of every all-to-all: its group, bytes sent, rows to each rank, rows from each."""
    rows: list[tuple[str, int, list[int], list[int]]] = []
    post = GlooTransport.all_to_all

    def note(
        self: GlooTransport, group: str, into: Tensor, tensor: Tensor, into_sizes: Sequence[int], sizes: Sequence[int]
    ) -> TransportHandle:
        rows.append((group, tensor.nbytes, list(sizes), list(into_sizes)))
        return post(self, group, into, tensor, into_sizes, sizes)

    GlooTransport.all_to_all = note  # type: ignore[assignment,method-assign]
    result = train_rank(ctx, **spec)
    (Path(fault["folder"]) / f"exchanged-{ctx.rank}.json").write_text(json.dumps(rows))
    return result


def equal_splits(ctx: RankContext, **spec: Any) -> Any:
    """As many rows to each expert, whatever routers chose."""

    def balanced(cls: type[ExpertRoute], sent: Tensor, got: Tensor, group: ExpertGroup) -> ExpertRoute:
        each = [[int(sent.sum()) // len(sent)] * (len(sent) // group.spread)] * group.spread
        return cls(group, each, [each])

    ExpertRoute.read = classmethod(balanced)  # type: ignore[method-assign,assignment]
    return train_rank(ctx, **spec)


def divided_again(ctx: RankContext, **spec: Any) -> Any:
    """Expert gradients are divided by the ranks that their tokens came from."""
    add = ParamGradients.add

    def less(self: ParamGradients, name: str, grad: Tensor, mb: int = 0) -> None:
        add(self, name, grad / 2 if ".experts." in name else grad, mb)

    ParamGradients.add = less  # type: ignore[method-assign]
    return train_rank(ctx, **spec)


def ungathered(ctx: RankContext, **spec: Any) -> Any:
    """Experts that another rank has updated are not fetched."""
    start = BucketSync.start

    def less(self: BucketSync, meeting: Collective, transport: Transport) -> Start:
        if meeting.once and meeting.kind is MessageKind.ALL_GATHER and "experts" in meeting.bucket:
            return lambda: DONE, None
        return start(self, meeting, transport)

    BucketSync.start = less  # type: ignore[method-assign]
    return train_rank(ctx, **spec)


def swapped_sources(ctx: RankContext, **spec: Any) -> Any:
    """What comes back is another rank's."""
    travel = chunk.travel

    def crossed(
        exchange: ExpertAllToAll, route: ExpertRoute, tensors: Sequence[Tensor], *, gradients: bool
    ) -> ExpertTransfer:
        if exchange.back and not gradients:
            tensors = [torch.cat(t.chunk(2)[::-1]) for t in tensors]
        return travel(exchange, route, tensors, gradients=gradients)

    chunk.travel = crossed
    return train_rank(ctx, **spec)


def unsummed_columns(ctx: RankContext, **spec: Any) -> Any:
    """Each rank keeps what its own columns of experts make of its rows."""
    moe.own_sums = lambda wire, rows, counts: rows.split(list(counts))[wire.index]
    return train_rank(ctx, **spec)


def equal_columns(ctx: RankContext, **spec: Any) -> Any:
    """Rows of the others that hold columns of the same experts are taken for as many of each expert as the own."""
    by_columns = ExpertGroup.by_columns

    def alike(self: ExpertGroup, rows: Table) -> list[Table]:
        found = by_columns(self, rows)
        return [[source[::-1] for source in t] if k != self.own else t for k, t in enumerate(found)]

    ExpertGroup.by_columns = alike  # type: ignore[method-assign]
    return train_rank(ctx, **spec)


def alone_in_edp(ctx: RankContext, **spec: Any) -> Any:
    """Expert gradients are not reduced over the ranks that hold the same experts."""
    start = BucketSync.start

    def less(self: BucketSync, meeting: Collective, transport: Transport) -> Start:
        left = meeting.kind is MessageKind.ALL_REDUCE and "experts" in meeting.bucket
        found = start(self, meeting, transport)
        return (lambda: DONE, None) if left else found

    BucketSync.start = less  # type: ignore[method-assign]
    return train_rank(ctx, **spec)
