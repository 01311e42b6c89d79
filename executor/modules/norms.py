"""RMS and layer norms: on a CPU in plain products, stretch by stretch; on a GPU by torch's fused kernels.

They keep their input and the statistics of rows, in at least float32. A norm's weight gradient is a by-product of its
input gradient, as in `ir.workload`.
"""

from typing import Any

import torch
from torch import Tensor

from executor.device.device import on_gpu
from executor.modules.functions import apply, own, stretches, wide

_KERNELS: Any = torch.ops.aten


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, out: torch.dtype) -> Tensor:
        if on_gpu(x):
            made: tuple[Tensor, Tensor] = _KERNELS._fused_rms_norm(x, weight.shape, weight.to(x.dtype), eps)
            ctx.save_for_backward(x, weight, made[1])
            return made[0].to(out)
        rows, y, narrow = x.reshape(-1, x.shape[-1]), x.new_empty(x.shape, dtype=out), weight.to(x.dtype)
        rate = x.new_empty(len(rows), 1, dtype=wide(x.dtype))
        for at in stretches(len(rows)):
            x32 = rows[at].to(rate.dtype)
            rate[at] = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
            y.view_as(rows)[at] = own(x32, rows).mul_(rate[at]).to(x.dtype).mul_(narrow)
        ctx.save_for_backward(x, weight, rate)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, rate = ctx.saved_tensors
        if on_gpu(x):
            given = dy.to(x.dtype).contiguous(), x, weight.shape, rate, weight.to(x.dtype), [True, True]
            dx, dw = _KERNELS._fused_rms_norm_backward(*given)
            return dx, dw.to(weight.dtype), None, None
        rows, dys, dx = x.reshape(-1, x.shape[-1]), dy.reshape(-1, x.shape[-1]), x.new_empty(x.shape)
        weight32, dw = weight.to(x.dtype).to(rate.dtype), rate.new_zeros(x.shape[-1])
        for at in stretches(len(rows)):
            g = dys[at].to(rate.dtype)
            unit = own(rows[at].to(rate.dtype), rows).mul_(rate[at])
            both = g * unit
            dw += both.sum(0)
            along = both.mul_(weight32).mean(-1, keepdim=True)
            del both
            dx.view_as(rows)[at] = own(g, dys).mul_(weight32).sub_(unit.mul_(along)).mul_(rate[at])
        return dx, dw.to(weight.dtype), None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: torch.dtype | None = None) -> Tensor:
    """Hugging Face's, over the last dim, statistics in at least float32. Keeps x and one number per row. out: the
    format of what it gives, where that is not x's.
    """
    return apply(_RmsNorm, x, weight, eps, out or x.dtype)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, plus: float, out: torch.dtype
    ) -> Tensor:
        ctx.plus, ctx.biased, shift = plus, bias is not None, None if bias is None else bias.to(x.dtype)
        if on_gpu(x):
            given = weight.to(x.dtype) + plus, shift
            made: tuple[Tensor, Tensor, Tensor] = _KERNELS.native_layer_norm(x, weight.shape, *given, eps)
            ctx.save_for_backward(x, weight, *made[1:])
            return made[0].to(out)
        rows, y, narrow = x.reshape(-1, x.shape[-1]), x.new_empty(x.shape, dtype=out), weight.to(x.dtype) + plus
        mean, rate = (x.new_empty(len(rows), 1, dtype=wide(x.dtype)) for _ in range(2))
        for at in stretches(len(rows)):
            x32 = rows[at].to(rate.dtype)
            mean[at] = x32.mean(-1, keepdim=True)
            rate[at] = torch.rsqrt((x32 - mean[at]).pow(2).mean(-1, keepdim=True) + eps)
            scaled = own(x32, rows).sub_(mean[at]).mul_(rate[at]).to(x.dtype).mul_(narrow)
            y.view_as(rows)[at] = scaled if shift is None else scaled.add_(shift)
        ctx.save_for_backward(x, weight, mean, rate)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rate = ctx.saved_tensors
        if on_gpu(x):
            scale, wants = weight.to(x.dtype) + ctx.plus, [True, True, ctx.biased]
            dy = dy.to(x.dtype).contiguous()
            given = dy, x, weight.shape, mean, rate, scale, scale if ctx.biased else None, wants
            dx, dw, db = _KERNELS.native_layer_norm_backward(*given)
            return dx, dw.to(weight.dtype), db.to(weight.dtype) if ctx.biased else None, None, None, None
        rows, dys, dx = x.reshape(-1, x.shape[-1]), dy.reshape(-1, x.shape[-1]), x.new_empty(x.shape)
        weight32 = (weight.to(x.dtype) + ctx.plus).to(rate.dtype)
        dw, db = (rate.new_zeros(x.shape[-1]) for _ in range(2))
        for at in stretches(len(rows)):
            g = dys[at].to(rate.dtype)
            unit = own(rows[at].to(rate.dtype), rows).sub_(mean[at]).mul_(rate[at])
            if ctx.biased:
                db += g.sum(0)
            both = g * unit
            dw += both.sum(0)
            along = both.mul_(weight32).mean(-1, keepdim=True)
            del both
            g = own(g, dys).mul_(weight32)
            dx.view_as(rows)[at] = g.sub_(g.mean(-1, keepdim=True)).sub_(unit.mul_(along)).mul_(rate[at])
        return dx, dw.to(weight.dtype), db.to(weight.dtype) if ctx.biased else None, None, None, None


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, plus: float = 0.0, out: torch.dtype | None = None
) -> Tensor:
    """Over the last dim. plus 1: the weight is stored minus one (Nemotron's LayerNorm1P). out: as `rms_norm`'s."""
    return apply(_LayerNorm, x, weight, bias, eps, plus, out or x.dtype)
