"""Attention of the reference modules, fused or with its scores stored, and the rotary embedding in front of it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from executor.modules.functions import apply, wide


class _Attend(torch.autograd.Function):
    """q (batch, heads, length, qk), k (batch, kv heads, length, qk), v (…, v): causal attention, in plain products."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, store: bool, window: int) -> Tensor:
        probs, lse = _probabilities(q, k, window)
        probs = probs.to(q.dtype)
        b, h, n, _ = q.shape
        out = q.new_empty(b, n, h, v.shape[-1]).transpose(1, 2)  # tokens outermost: what the next linear reads
        out.copy_(probs @ _per_query(v, h))
        ctx.store, ctx.window = store, window
        ctx.save_for_backward(q, k, v, *((probs,) if store else (out, lse)))
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *rest = ctx.saved_tensors
        heads, scale = q.shape[1], q.shape[-1] ** -0.5
        if ctx.store:
            probs = rest[0]
        else:
            scores = _scores(q, k, ctx.window)
            probs = (scores - rest[1].unsqueeze(-1)).exp().to(q.dtype)
        dv = _per_key(probs.transpose(-1, -2) @ dy, v.shape[1])
        d_probs = dy @ _per_query(v, heads).transpose(-1, -2)
        fp = wide(q.dtype)
        inner = (d_probs * probs).to(fp).sum(-1, keepdim=True) if ctx.store else (dy * rest[0]).to(fp).sum(-1, True)
        d_scores = (probs.to(fp) * (d_probs.to(fp) - inner) * scale).to(q.dtype)
        dq = d_scores @ _per_query(k, heads)
        dk = _per_key(d_scores.transpose(-1, -2) @ q, k.shape[1])
        return dq, dk, dv, None, None


def attend(q: Tensor, k: Tensor, v: Tensor, *, fused: bool, window: int = 0) -> Tensor:
    """Causal attention (batch, heads, length, v). fused: nothing of length² is kept for backward."""
    length, grouped = q.shape[2], k.shape[1] != q.shape[1]
    window = window if 0 < window < length else 0
    if not fused or v.shape[-1] != q.shape[-1]:  # torch's fused kernels want one width; else they store the scores
        return apply(_Attend, q, k, v, not fused, window)
    mask = ~_hidden(q, window) if window else None
    found: Tensor = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    return found


def _scores(q: Tensor, k: Tensor, window: int) -> Tensor:
    scores: Tensor = (q @ _per_query(k, q.shape[1]).transpose(-1, -2)).to(wide(q.dtype)) * q.shape[-1] ** -0.5
    return scores.masked_fill(_hidden(q, window), float("-inf"))


def _probabilities(q: Tensor, k: Tensor, window: int) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, window)
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp(), lse


def _per_query(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _per_key(dx: Tensor, heads: int) -> Tensor:
    b, h, n, d = dx.shape
    return dx if h == heads else dx.view(b, heads, h // heads, n, d).sum(2)


def rotary(length: int, dim: int, theta: float, x: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, (length, 1, dim) each, in x's format and place."""
    if is_fake(x):  # one fake mode's tensors are of no use to another
        return _rotary.__wrapped__(length, dim, theta, x.dtype, str(x.device))
    return _rotary(length, dim, theta, x.dtype, str(x.device))


@lru_cache(maxsize=8)
def _rotary(length: int, dim: int, theta: float, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    fp = wide(dtype)
    rates = theta ** -(torch.arange(0, dim, 2, dtype=fp, device=device) / dim)
    angles = torch.outer(torch.arange(length, dtype=fp, device=device), rates)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype).unsqueeze(1), angles.sin().to(dtype).unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to the first features of (batch, length, heads, dim), as many as cos has."""
    turned = x[..., : cos.shape[-1]]
    a, b = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-b, a), dim=-1) * sin
    return turned if cos.shape[-1] == x.shape[-1] else torch.cat((turned, x[..., cos.shape[-1] :]), dim=-1)


def _hidden(x: Tensor, window: int) -> Tensor:
    """True where a query (row) may not see a key."""
    length = x.shape[2]
    return (_mask.__wrapped__ if is_fake(x) else _mask)(length, window, str(x.device))


@lru_cache(maxsize=4)
def _mask(length: int, window: int, device: str) -> Tensor:
    i = torch.arange(length, device=device)
    gap = i[:, None] - i[None, :]
    return (gap < 0) | (gap >= window) if window else gap < 0
