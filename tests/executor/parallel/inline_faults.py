"""Ranks that note what they send inside compute ops, or do one thing wrong there; each the target of a launch."""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from executor.autograd.stage import Stage
from executor.modules import parallel
from executor.modules.attention import attend, attention
from executor.parallel.inline import RankAxis
from executor.runtime.rank import train_rank
from executor.runtime.worker import RankContext
from executor.transport.base import TransportHandle
from ir.core.ops import Pass
from ir.core.work import MessageKind
from ir.graph import sync
from ir.workload.part import Param, PartLayout


def noted(ctx: RankContext, fault: dict[str, Any], **spec: Any) -> Any:
    """Every message inside a compute op goes to a file: whose pass of which unit and microbatch, kind, axis, bytes."""
    rows: list[tuple[str, str, int, str, str, int]] = []
    at: tuple[str, str, int] = ("", "", 0)
    work, meet = Stage.work, RankAxis._meet

    def passing(self: Stage, mb: int, passes: Iterable[tuple[Pass, str]]) -> None:
        nonlocal at
        for pass_, unit in passes:
            at = (str(pass_), unit, mb)
            work(self, mb, [(pass_, unit)])

    def note(
        self: RankAxis, kind: MessageKind, whole: Tensor, part: Tensor, post: Callable[[], TransportHandle]
    ) -> None:
        rows.append((*at, str(kind), self.axis, whole.nbytes))
        meet(self, kind, whole, part, post)

    Stage.work, RankAxis._meet = passing, note  # type: ignore[method-assign]
    result = train_rank(ctx, **spec)
    (Path(fault["folder"]) / f"inline-{ctx.rank}.json").write_text(json.dumps(rows))
    return result


def unsummed(ctx: RankContext, **spec: Any) -> Any:
    """What row-parallel linears make is not summed over ranks."""
    parallel._left = lambda y, region: y.detach()
    return train_rank(ctx, **spec)


def summed_over_all(param: Param, layout: PartLayout) -> tuple[str, ...]:
    """In place of `ir.graph.sync.summed_over`: what is not cut is summed over tp, though every rank has all of it."""
    if param.expert:
        return ("edp",)
    return ("cp", "dp") if "tp" in param.sharded or layout.tp == 1 else ("tp", "cp", "dp")


def heads_forgotten(param: Param, layout: PartLayout) -> tuple[str, ...]:
    """In its place: as if no rank had heads of its own."""
    return REAL(replace(param, by_heads=False), layout)


REAL = sync.summed_over


def planned(rule: str, ctx: RankContext, spec: dict[str, Any]) -> Any:
    """A rank whose plan is made by another rule."""
    sync.summed_over = globals()[rule]
    return train_rank(ctx, **spec)


def all_summed(ctx: RankContext, **spec: Any) -> Any:
    """By `summed_over_all`."""
    return planned("summed_over_all", ctx, spec)


def unlike_heads(ctx: RankContext, **spec: Any) -> Any:
    """By `heads_forgotten`."""
    return planned("heads_forgotten", ctx, spec)


def in_a_row(ctx: RankContext, **spec: Any) -> Any:
    """Positions and masks are those of stretches that follow each other; tokens are not."""
    attend.stretches = lambda t, size, index: t.chunk(size, -1)[index]  # type: ignore[attr-defined]
    return train_rank(ctx, **spec)


def own_keys(ctx: RankContext, **spec: Any) -> Any:
    """Gradients of keys and values that other ranks' queries gave stay there."""
    attention.scatter_tokens = lambda cp, whole: whole.chunk(cp.size, -2)[cp.index].contiguous()  # type: ignore[attr-defined]
    return train_rank(ctx, **spec)


def heads_of_others(ctx: RankContext, **spec: Any) -> Any:
    """Each rank's stretches of the output come home in the other order."""
    right = attention.to_tokens
    attention.to_tokens = lambda cp, x: right(cp, x).flip(1)
    return train_rank(ctx, **spec)
