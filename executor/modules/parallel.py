"""Tensor parallelism inside parts: where activations enter and leave a region that several ranks share, word by word.

Column-parallel linears read what enters: whole tokens, of which sequence parallelism gathers the others' share. What
row-parallel linears make leaves as a sum over ranks, of which sequence parallelism keeps this rank's tokens. As the
plan has it (`ir.workload.parts.region`): what was gathered is not kept, but gathered again for the weight gradients.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from executor.modules.functions import apply, words_here
from executor.parallel.inline import RankAxis, RankRegion

Moved = Callable[[Tensor], Tensor]


def gather_tokens(wire: RankAxis, x: Tensor) -> Tensor:
    """(…, n, features) of every rank → (…, size · n, features)."""
    every, one = wire.gather(x), x.shape[:-2].numel() == 1
    return (every if one else every.movedim(0, -3)).reshape(*x.shape[:-2], -1, x.shape[-1])


def scatter_tokens(wire: RankAxis, x: Tensor) -> Tensor:
    """(…, size · n, features), added up over ranks → this one's (…, n, features)."""
    return wire.scatter(x.unflatten(-2, (wire.size, -1)).movedim(-3, 0))


def _entered(x: Tensor, region: RankRegion) -> Tensor:
    return gather_tokens(region.tp, x) if region.sequence else x


def _returned(dx: Tensor, region: RankRegion) -> Tensor:
    """The gradient of what entered."""
    return scatter_tokens(region.tp, dx) if region.sequence else region.tp.sum(dx)


class _Across(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Moved, back: Moved) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(dy), None, None


def across(x: Tensor, there: Moved, back: Moved) -> Tensor:
    """What a map between ranks makes of x, whose gradient comes back by another."""
    return apply(_Across, x, there, back)


def enter(x: Tensor, region: RankRegion) -> Tensor:
    """What no linear reads first: this rank's tokens → all tokens."""

    def back(dy: Tensor) -> Tensor:
        return _returned(dy if region.sequence else dy.clone(memory_format=torch.contiguous_format), region)

    return x if region.tp.size == 1 else across(x, lambda x: _entered(x, region).detach(), back)


def leave(y: Tensor, region: RankRegion) -> Tensor:
    """A partial sum of all tokens, which nobody else reads → the sum, of this rank's tokens."""
    return y if region.tp.size == 1 else across(y, lambda y: _left(y, region), lambda dy: _entered(dy, region))


def _left(y: Tensor, region: RankRegion) -> Tensor:
    return scatter_tokens(region.tp, y) if region.sequence else region.tp.sum(y.detach())


def own(x: Tensor, region: RankRegion) -> Tensor:
    """(…, size · n, features) that all ranks have → this rank's (…, n, features), which it alone goes on with."""
    return x if region.tp.size == 1 else across(x, partial(_stretch, region.tp), partial(gather_tokens, region.tp))


def whole(x: Tensor, region: RankRegion) -> Tensor:
    """The way back: (…, n, features) of every rank → (…, size · n, features), with which all do the same."""
    return x if region.tp.size == 1 else across(x, partial(gather_tokens, region.tp), partial(_stretch, region.tp))


def _stretch(wire: RankAxis, x: Tensor) -> Tensor:
    """This rank's of equal stretches of dim -2, as a tensor of its own."""
    return x.chunk(wire.size, -2)[wire.index].clone(memory_format=torch.contiguous_format)


# Rows of experts, of which each rank of a group has its own number


def every_rows(wire: RankAxis, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Rows (counts[index], …) of each rank → (sum of counts, …), rank by rank, whose gradients are added up."""
    back = partial(_own_sums, wire, counts=counts)
    return rows if wire.size == 1 else across(rows, partial(_every_rows, wire, counts=counts), back)


def own_sums(wire: RankAxis, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """The way back: partial sums (sum of counts, …) → sums over ranks of this one's rows (counts[index], …)."""
    back = partial(_every_rows, wire, counts=counts)
    return rows if wire.size == 1 else across(rows, partial(_own_sums, wire, counts=counts), back)


def _every_rows(wire: RankAxis, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Messages are as long as the longest rank's: collectives have one size."""
    longest, rows = max(counts), rows.detach()
    if len(rows) < longest:
        rows = torch.cat((rows, rows.new_zeros(longest - len(rows), *rows.shape[1:])))
    every = wire.gather(rows)
    if len(set(counts)) == 1:
        return every.flatten(0, 1)
    return torch.cat([of[:count] for of, count in zip(every, counts, strict=True)])


def _own_sums(wire: RankAxis, rows: Tensor, counts: Sequence[int]) -> Tensor:
    longest, rows = max(counts), rows.detach()
    if len(set(counts)) == 1:
        return wire.scatter(rows.unflatten(0, (wire.size, longest)))
    every = rows.new_zeros(wire.size, longest, *rows.shape[1:])
    for of, own in zip(every, rows.split(list(counts)), strict=True):
        of[: len(own)] = own
    return wire.scatter(every)[: counts[wire.index]].clone(memory_format=torch.contiguous_format)


# Column-parallel linears: the input's gradient and the weights' are found by two nodes, joined by a third, so that
# the pass that wants one of them runs no more than that.


class _Outputs(torch.autograd.Function):
    """The products, as functions of the input."""

    @staticmethod
    def forward(ctx: Any, region: RankRegion, flipped: bool, x: Tensor, biases: Any, *weights: Tensor) -> Any:
        ctx.region, ctx.flipped = region, flipped
        ctx.save_for_backward(*weights)
        x = _entered(x, region)
        return tuple(_product(x, w, b, flipped) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        weights, dx = ctx.saved_tensors, None
        for dy, w in zip(dys, weights, strict=True):
            flat, w = dy.flatten(0, -2), w.t() if ctx.flipped else w
            dx = flat @ w if dx is None else dx.addmm_(flat, w)
        assert dx is not None
        dx = _returned(dx.view(*dys[0].shape[:-1], -1), ctx.region)
        return (None, None, dx, None, *(None for _ in weights))


class _Weights(torch.autograd.Function):
    """The same products as functions of the weights: tensors of their shapes, without values."""

    @staticmethod
    def forward(ctx: Any, region: RankRegion, flipped: bool, x: Tensor, *params: Tensor | None) -> Any:
        ctx.region, ctx.flipped = region, flipped
        weights = params[: len(params) // 2]
        ctx.formats = [None if p is None else p.dtype for p in params]
        ctx.save_for_backward(x)
        tokens = x.shape[-2] * (region.tp.size if region.sequence else 1)
        blank = x.new_empty(())
        sizes = [w.shape[1 if flipped else 0] for w in weights if w is not None]
        return tuple(blank.expand(*x.shape[:-2], tokens, size) for size in sizes)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        x = _entered(x, ctx.region).flatten(0, -2)
        flat = [dy.flatten(0, -2) for dy in dys]
        dws = [x.t() @ dy if ctx.flipped else dy.t() @ x for dy in flat]
        dbs = [dy.sum(0) if f else None for dy, f in zip(flat, ctx.formats[len(dys) :], strict=True)]
        grads = (None if g is None else g.to(f) for g, f in zip([*dws, *dbs], ctx.formats, strict=True))
        return (None, None, None, *grads)


class _Both(torch.autograd.Function):
    """The first half of its arguments, as what either half is the gradient's way to."""

    @staticmethod
    def forward(ctx: Any, *both: Tensor) -> Any:
        return tuple(y.detach() for y in both[: len(both) // 2])

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor, ...]:
        return (*dys, *dys)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, flipped: bool) -> Tensor:
    return F.linear(x, weight.t() if flipped else weight, bias)


def columns(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], region: RankRegion, *, flipped: bool = False
) -> list[Tensor]:
    """x Wᵀ + b for linears cut by output that read the same x, in its format, which enters the region once.

    x: (…, this rank's tokens, features). One function of several weights: `executor.autograd.split` sees it as such.
    """
    given = (x, *weights)
    if has_torch_function(given):
        found: list[Tensor] = handle_torch_function(columns, given, x, weights, biases, region, flipped=flipped)
        return found
    fixed = [None if b is None else b.detach() for b in biases]
    ys: Any = apply(_Outputs, region, flipped, x, fixed, *(w.detach() for w in weights))
    if not torch.is_grad_enabled():
        return list(ys)
    stand_ins: Any = apply(_Weights, region, flipped, x.detach(), *weights, *biases)
    both: Any = apply(_Both, *ys, *stand_ins)
    return list(both)


# Words


def words(ids: Tensor, weight: Tensor, region: RankRegion, dtype: torch.dtype, *, padding: int | None = None) -> Tensor:
    """Embeddings (…, length, h) of ids (…, length), of whose words each rank holds a stretch; this rank's tokens.

    padding: a word whose embedding has no gradient.
    """
    if has_torch_function((ids, weight)):
        found: Tensor = handle_torch_function(words, (ids, weight), ids, weight, region, dtype, padding=padding)
        return found
    at, elsewhere = words_here(ids, len(weight), region.tp)
    row = -1 if padding is None else padding - region.tp.index * len(weight)
    made = F.embedding(at, weight, row if 0 <= row < len(weight) else None).masked_fill(elsewhere.unsqueeze(-1), 0.0)
    return leave(made.to(dtype), region)
