"""Arithmetic of the reference modules that keeps for backward what a GPU's fused kernels keep, and no more.

Gated activations keep their input, the loss its probabilities; norms: `executor.modules.norms`; attention
(`executor.modules.attention.attend`) q, k, v, output and log-sum-exp, or, unfused, the probabilities.
Everything is deterministic: no atomics, and sums over a token's copies in the order of its experts.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from executor.parallel.inline import RankAxis

STRETCHES = 4  # in which a norm works through its rows
LEAST_ROWS = 16


def wide(dtype: torch.dtype) -> torch.dtype:
    """The format of statistics: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def own(made: Tensor, of: Tensor) -> Tensor:
    """A tensor that may be written to: what was made of part of another, or a copy where it is that part itself."""
    return made.clone() if made.dtype == of.dtype else made


def stretches(rows: int, count: int = STRETCHES, least: int = LEAST_ROWS) -> list[slice]:
    """Rows (as said here, a norm's) worked on at a time, as a fused kernel does: wide copies are none of the whole."""
    size = max(least, -(-rows // count))
    return [slice(i, min(i + size, rows)) for i in range(0, rows, size)]


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        y = F.silu(gate).mul_(up)
        return y if weight is None else y.mul_(weight.to(y.dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        gate, up, weight = ctx.saved_tensors
        dw = None
        d_up = F.silu(gate).mul_(dy)
        if weight is not None:
            dw = (d_up * up).sum(-1, keepdim=True).to(weight.dtype)
            d_up.mul_(weight.to(dy.dtype))
        d_gate = dy * up
        if weight is not None:
            d_gate.mul_(weight.to(dy.dtype))
        torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
        return d_gate, d_up, dw


def swiglu(gate: Tensor, up: Tensor, weight: Tensor | None = None) -> Tensor:
    """silu(gate) · up, and times a number per row where a router weighs rows (rows, 1)."""
    return apply(_Swiglu, gate, up, weight)


def relu2(x: Tensor) -> Tensor:
    """Squared ReLU."""
    return F.relu(x).square()


Counts = Sequence[int] | Tensor  # of rows; a tensor where the host does not know them


def unread(x: Tensor, weight: Tensor) -> bool:
    """Whether torch multiplies groups of rows whose sizes the device alone knows: else the host must read them.

    Its grouped product is one kernel for bfloat16 on Hopper and Blackwell; for other formats, or on other GPUs, torch
    itself has the host read sizes, at every product.
    """
    if x.dtype is not torch.bfloat16 or any(size % 8 for size in weight.shape[1:]):
        return False
    return not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] > 8


def grouped_linear(x: Tensor, weight: Tensor, counts: Counts) -> Tensor:
    """x (rows, into), sorted by expert, counts rows each; weight (experts, out, into) → (rows, out).

    One function of one weight: `executor.autograd.split` sees it as such, so its weight gradient can wait as a whole.
    """
    if has_torch_function((x, weight)):
        found: Tensor = handle_torch_function(grouped_linear, (x, weight), x, weight, counts)
        return found
    if isinstance(counts, Tensor):
        return F.grouped_mm(x, weight.to(x.dtype).transpose(-1, -2), offs=counts.cumsum(0, dtype=torch.int32))
    # One expert after the other: torch's grouped product refuses float64.
    each, rows = weight.to(x.dtype).unbind(0), torch.split(x, list(counts))
    return torch.cat([F.linear(r, w) for r, w in zip(rows, each, strict=True)])


def words_here(ids: Tensor, size: int, wire: RankAxis) -> tuple[Tensor, Tensor]:
    """Where a word stands in this rank's stretch of `size` words, 0 for one elsewhere; and whether it is elsewhere."""
    at = ids - wire.index * size
    elsewhere = (at < 0) | (at >= size)
    return at.masked_fill(elsewhere, 0), elsewhere


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, scale: float, ignore: int, wire: RankAxis) -> Tensor:
        x = logits.to(wide(logits.dtype), copy=True)
        x.sub_(wire.largest(x.amax(-1, keepdim=True)))
        at, elsewhere = _labels_here(labels, x, wire)
        chosen = wire.sum(_zeroed(x.gather(-1, at), elsewhere))
        sums = wire.sum(x.exp_().sum(-1, keepdim=True))
        ctx.save_for_backward(x.div_(sums), labels)
        ctx.scale, ctx.ignore, ctx.dtype, ctx.wire = scale, ignore, logits.dtype, wire
        return (sums.log() - chosen).squeeze(-1).masked_fill(labels == ignore, 0.0).sum() * scale

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, labels = ctx.saved_tensors  # the probabilities become the gradient in place: nobody reads them again
        at, elsewhere = _labels_here(labels, x, ctx.wire)
        x.scatter_add_(-1, at, _zeroed(torch.full_like(at, -1, dtype=x.dtype), elsewhere))
        x.mul_(((labels != ctx.ignore) * (dy * ctx.scale)).unsqueeze(-1).to(x.dtype))
        return x.to(ctx.dtype), None, None, None, None


def _labels_here(labels: Tensor, logits: Tensor, wire: RankAxis) -> tuple[Tensor, Tensor | None]:
    at = labels.clamp_min(0).unsqueeze(-1)
    return (at, None) if wire.size == 1 else words_here(at, logits.shape[-1], wire)


def _zeroed(x: Tensor, where: Tensor | None) -> Tensor:
    return x if where is None else x.masked_fill_(where, 0.0)


def token_loss(logits: Tensor, labels: Tensor, scale: float, ignore: int, wire: RankAxis = RankAxis()) -> Tensor:
    """Σ cross entropy of (tokens, vocabulary), where labels are not `ignore`, times scale; in at least float32.

    wire: to the ranks that have the logits of other words; three small all-reduces make the loss the same on all. Keeps
    the probabilities alone, as Megatron does.
    """
    return apply(_TokenLoss, logits, labels, scale, ignore, wire)


class _Balanced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, shares: Tensor, indices: Tensor, size: int, factor: float) -> Any:
        tokens, experts = shares.shape
        sent = torch.zeros(size, experts, dtype=shares.dtype, device=shares.device)
        chosen = indices.view(size, -1)
        sent.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=shares.dtype))
        sent.mul_(experts / chosen.shape[1])
        ctx.save_for_backward(sent)
        ctx.each, ctx.factor = tokens // size, factor
        loss = (sent * shares.view(size, -1, experts).mean(1)).sum().mul_(factor)
        ctx.mark_non_differentiable(loss)
        return weights, loss

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (sent,) = ctx.saved_tensors
        return dy, (sent * (ctx.factor / ctx.each)).repeat_interleave(ctx.each, 0), None, None, None


def balanced(weights: Tensor, shares: Tensor, indices: Tensor, size: int, factor: float) -> tuple[Tensor, Tensor]:
    """The weights as they are, and a loss whose gradient joins theirs: factor · Σ f · P over experts and sequences.

    f: how often a sequence chose an expert, over the mean of all experts; P: the mean of its tokens' shares
    (tokens, experts), which add up to 1. indices: (tokens, top_k); size: sequences. Keeps f alone (DeepSeek-V2).
    """
    untyped: Any = _Balanced.apply
    kept, loss = untyped(weights, shares, indices, size, factor)
    return kept, loss


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.copies = copies
        return x.index_select(0, _token(order, copies))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _gather(dy, ctx.saved_tensors[0], ctx.copies), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.copies = copies
        return _gather(rows, order, copies)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return dy.index_select(0, _token(ctx.saved_tensors[0], ctx.copies)), None, None


def _token(order: Tensor, copies: int) -> Tensor:
    return order if copies == 1 else order // copies


def _gather(rows: Tensor, order: Tensor, copies: int) -> Tensor:
    back = torch.empty_like(order)
    back[order.long()] = torch.arange(len(order), dtype=order.dtype, device=order.device)
    if copies == 1:
        return rows.index_select(0, back)
    out, back = rows.new_empty(len(rows) // copies, rows.shape[-1]), back.view(-1, copies)
    for at in stretches(len(out)):
        out[at] = rows.index_select(0, back[at].flatten()).view(-1, copies, rows.shape[-1]).sum(1)
    return out


def permute(x: Tensor, order: Tensor, copies: int) -> Tensor:
    """Tokens (tokens, h) → rows sorted by expert; row i is copy order[i] % copies of token order[i] // copies."""
    return apply(_Permute, x, order, copies)


def unpermute(rows: Tensor, order: Tensor, copies: int) -> Tensor:
    """Rows → tokens: each the sum of its copies, in their order."""
    return apply(_Unpermute, rows, order, copies)


def formatted(weight: Tensor, x: Tensor) -> Tensor:
    """A weight in x's format. Where it has it already, whoever watches functions is called for none."""
    with torch._C.DisableTorchFunction():
        same = weight.dtype == x.dtype
    return weight if same else weight.to(x.dtype)


def apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """`function.apply`, typed. What it does inside is no torch function of the model's, whoever watches those."""
    with torch._C.DisableTorchFunction():
        out: Tensor = function.apply(*args)
    return out
