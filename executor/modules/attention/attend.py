"""Attention of the reference modules, fused or with its scores stored."""

import weakref
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from threading import get_ident
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, maybe_get_fake_mode

from executor.device.device import on_gpu
from executor.modules.functions import apply, wide
from executor.modules.functions import stretches as row_stretches
from executor.parallel.inline import stretches

LANES = 8  # a GPU's fused kernels want features in multiples of as many
FLASH_FEATURES = 192  # of shared heads at most: some GPUs' flash kernel has no backward of more
STRETCHES = 128  # in which attention in plain products works through its queries
LEAST_QUERIES = 4
_rows = partial(row_stretches, count=STRETCHES, least=LEAST_QUERIES)
_biases: list[weakref.ref[Tensor]] = []


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """Which keys a query sees: none behind it, of a window (0: any) as many. ranks, index: whose queries of a sequence
    they are, where several ranks have some each (`executor.parallel.inline.stretches`); all keys are there, rank by
    rank.
    """

    window: int = 0
    ranks: int = 1
    index: int = 0


class _Stored(torch.autograd.Function):
    """q (batch, heads, length, qk), k (batch, kv heads, length, qk), v (…, v): causal attention, in plain products.

    Its probabilities stay for backward; of wider copies of them there are only stretches, as in a fused softmax.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sight: AttentionMask, scale: float) -> Tensor:
        scores = q @ _per_query(k, q.shape[1]).transpose(-1, -2)
        hidden, probs = _hidden(q, sight), torch.empty_like(scores)
        for at in _rows(q.shape[2]):
            probs[..., at, :] = _softmax(scores[..., at, :], scale, _some(hidden, at))[0]
        del scores
        out = _outermost(q, v)
        out.copy_(probs @ _per_query(v, q.shape[1]))
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, probs)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, probs = ctx.saved_tensors
        heads, fp = q.shape[1], wide(q.dtype)
        dv = _per_key(probs.transpose(-1, -2) @ dy, v.shape[1])
        d_probs = dy @ _per_query(v, heads).transpose(-1, -2)
        d_scores = torch.empty_like(probs)
        for at in _rows(q.shape[2]):
            p, dp = probs[..., at, :], d_probs[..., at, :]
            inner = (dp * p).to(fp).sum(-1, keepdim=True)
            d_scores[..., at, :] = _softmax_backward(ctx.scale, p, dp, inner)
        del d_probs, p, dp
        dq = d_scores @ _per_query(k, heads)
        return dq, _per_key(d_scores.transpose(-1, -2) @ q, k.shape[1]), dv, None, None


class _Made(torch.autograd.Function):
    """The same where probabilities are made again in backward, stretch by stretch: nothing of length² ever exists."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sight: AttentionMask, scale: float) -> Tensor:
        heads, hidden, out = q.shape[1], _hidden(q, sight), _outermost(q, v)
        keys, values = _per_query(k, heads).transpose(-1, -2), _per_query(v, heads)
        lse = q.new_empty(q.shape[:3], dtype=wide(q.dtype))
        for at in _rows(q.shape[2]):
            probs, lse[..., at] = _softmax(q[..., at, :] @ keys, scale, _some(hidden, at))
            out[..., at, :] = probs.to(q.dtype) @ values
        ctx.sight, ctx.scale = sight, scale
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        heads, fp, hidden = q.shape[1], wide(q.dtype), _hidden(q, ctx.sight)
        keys, values = _per_query(k, heads), _per_query(v, heads)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(keys, dtype=fp), torch.zeros_like(values, dtype=fp)
        for at in _rows(q.shape[2]):
            x = _wide_scores(q[..., at, :] @ keys.transpose(-1, -2), ctx.scale, _some(hidden, at))
            probs = x.sub_(lse[..., at].unsqueeze(-1)).exp_().to(q.dtype)
            dv += probs.transpose(-1, -2) @ dy[..., at, :]
            inner = (dy[..., at, :] * out[..., at, :]).to(fp).sum(-1, keepdim=True)
            d_scores = _softmax_backward(ctx.scale, probs, dy[..., at, :] @ values.transpose(-1, -2), inner).to(q.dtype)
            dq[..., at, :] = d_scores @ keys
            dk += d_scores.transpose(-1, -2) @ q[..., at, :]
        return dq, _per_key(dk.to(q.dtype), k.shape[1]), _per_key(dv.to(q.dtype), v.shape[1]), None, None


def _some(hidden: Tensor, at: slice) -> Tensor:
    """A copy: who follows storages must not take a part of a table for something new."""
    return hidden.index_select(0, torch.arange(at.start, at.stop, device=hidden.device))


def _outermost(q: Tensor, v: Tensor) -> Tensor:
    """Room for the output, tokens outermost in memory: what the next linear reads."""
    b, h, n, _ = q.shape
    return q.new_empty(b, n, h, v.shape[-1]).transpose(1, 2)


def _wide_scores(scores: Tensor, scale: float, hidden: Tensor) -> Tensor:
    x = scores.to(wide(scores.dtype), copy=True)
    return x.mul_(scale).masked_fill_(hidden, float("-inf"))


def _softmax(scores: Tensor, scale: float, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities and log-sum-exp of some rows, in at least float32."""
    x = _wide_scores(scores, scale, hidden)
    lse = x.logsumexp(-1)
    return x.sub_(lse.unsqueeze(-1)).exp_(), lse


def _softmax_backward(scale: float, probs: Tensor, d_probs: Tensor, inner: Tensor) -> Tensor:
    d_scores = d_probs.to(inner.dtype, copy=True).sub_(inner)
    return d_scores.mul_(probs).mul_(scale)


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, fused: bool, sight: AttentionMask, again: bool = False, scaled: float = 1.0
) -> Tensor:
    """Causal attention (batch, heads, length, v). fused: nothing of length² is kept for backward. again: nor without
    it, as backward makes the scores again (Megatron's selective recompute). scaled: of scores, beside 1/sqrt(features).
    """
    scale = q.shape[-1] ** -0.5 * scaled
    if not 0 < sight.window < k.shape[2]:
        sight = replace(sight, window=0)
    gpu = fused and on_gpu(q)
    if gpu and q.dtype is not torch.float64:  # which no GPU has a fused kernel for
        return beside_scores(q, k, v, sight, scale)
    if gpu or not fused or v.shape[-1] != q.shape[-1]:  # a CPU's want one width; else they store the scores
        return apply(_Made if fused or again else _Stored, q, k, v, sight, scale)
    mask = _added(q, sight) if sight != AttentionMask() else None
    return _fused(q, k, v, mask, None if scaled == 1.0 else scale)  # torch's own may differ from ours by a rounding


def beside_scores(q: Tensor, k: Tensor, v: Tensor, sight: AttentionMask, scale: float) -> Tensor:
    """Attention as one of a GPU's fused kernels takes it; what none takes, torch computes with all scores stored.

    Both want one width of features. Flash shares heads of keys and takes no mask and no float32; the other one takes
    these, and shares none. So heads are repeated for it, and zeros added to features, where they must be.
    """
    mask, narrow = _added(q, sight) if sight != AttentionMask() else None, v.shape[-1]
    width = -(-max(q.shape[-1], narrow) // LANES) * LANES
    if mask is not None or q.dtype is torch.float32 or width > FLASH_FEATURES or not _flash(q):
        k, v = (_per_query(t, q.shape[1]) for t in (k, v))
    q, k, v = (F.pad(t, (0, width - t.shape[-1])) if t.shape[-1] < width else t for t in (q, k, v))
    return _fused(q, k, v, mask, scale)[..., :narrow]


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    found: Tensor = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=k.shape[1] != q.shape[1], scale=scale
    )
    return found


def _flash(q: Tensor) -> bool:
    """Whether the GPU has such a kernel: from Ampere on."""
    return not q.is_cuda or torch.cuda.get_device_capability(q.device)[0] >= 8


def _per_query(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _per_key(dx: Tensor, heads: int) -> Tensor:
    b, h, n, d = dx.shape
    return dx if h == heads else dx.view(b, heads, h // heads, n, d).sum(2)


def _hidden(q: Tensor, sight: AttentionMask) -> Tensor:
    """True where a query (row) may not see a key."""
    return _mask(q.shape[2], sight, str(q.device), maybe_get_fake_mode(q), get_ident())


# Each thread has its own: what one rank makes on its lane, another may not read without a mark.
@lru_cache(maxsize=64)
def _mask(length: int, sight: AttentionMask, device: str, mode: FakeTensorMode | None, thread: int) -> Tensor:
    at = torch.arange(length * sight.ranks, device=device)
    keys = torch.cat([stretches(at, sight.ranks, rank) for rank in range(sight.ranks)])
    gap = stretches(at, sight.ranks, sight.index)[:, None] - keys[None, :]
    return (gap < 0) | (gap >= sight.window) if sight.window else gap < 0


def forget_masks() -> None:
    """Whoever asks next makes them anew."""
    _mask.cache_clear()
    _bias.cache_clear()
    _biases.clear()


def kept_masks() -> list[Tensor]:
    """Those that fused kernels are given, one for all layers and microbatches."""
    return [t for ref in _biases if (t := ref()) is not None]


def _added(q: Tensor, sight: AttentionMask) -> Tensor:
    """The same as torch's fused kernels take it, which would keep what they made of another format."""
    return _bias(q.shape[2], sight, q.dtype, str(q.device), maybe_get_fake_mode(q), get_ident())


@lru_cache(maxsize=64)
def _bias(
    length: int, sight: AttentionMask, dtype: torch.dtype, device: str, mode: FakeTensorMode | None, thread: int
) -> Tensor:
    hidden = _mask.__wrapped__(length, sight, device, mode, thread)
    made = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
    _biases.append(weakref.ref(made))
    return made
