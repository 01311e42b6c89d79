"""Part `attn` of the reference decoder: ordinary heads, or DeepSeek's latent attention, with Hugging Face's names.

Under context parallelism every rank has some queries of each sequence, and sees all keys and values; or, where heads
are divided, it has all queries, keys and values of some heads.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from executor.modules.attention.attend import AttentionMask, attend
from executor.modules.attention.rope import TokenAngles, rotary, rotate
from executor.modules.layers import LinearLayer, NormLayer, Params, each
from executor.modules.norms import rms_norm
from executor.modules.parallel import across, enter, gather_tokens, scatter_tokens
from executor.modules.remade import RemadeBufferView, following, kept, remade, remade_as, tensor_of
from executor.parallel.inline import RankAxis, RankRegion
from executor.parallel.traced import saved_tensors_hooks_traced, storage_of
from ir.workload.config.spec import ModelConfig


class _Again:
    """Hooks for saved tensors: what lies in `whole` is not kept for backward, but gathered again from `mine`."""

    def __init__(self, mine: Tensor | RemadeBufferView, whole: Tensor, cp: RankAxis) -> None:
        self.mine, self.whole, self.cp = mine, whole, cp
        self.left = 0

    def pack(self, t: Tensor) -> Any:
        """A tensor, or where in `whole` it lies."""
        if storage_of(t) != storage_of(self.whole):
            return kept(t)
        self.left += 1
        return t.shape, t.stride(), t.storage_offset()

    def unpack(self, packed: Any) -> Tensor:
        """The first one gathers, the last one lets go."""
        if isinstance(packed, Tensor | RemadeBufferView):
            return tensor_of(packed)
        if not self.whole.numel():
            self.whole = gather_tokens(self.cp, tensor_of(self.mine))
        found = self.whole.as_strided(*packed)
        self.left -= 1
        if not self.left:
            self.forget()
        return found

    def forget(self) -> None:
        self.whole = self.whole.new_empty(0)


def _side_by_side(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat((k, v), -1).flatten(-2)


@contextmanager
def whole_context(k: Tensor, v: Tensor, cp: RankAxis) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values (batch, this rank's tokens, heads, features) → all ranks' tokens, one rank's behind another's.

    They travel as one message. What is computed with them inside keeps this rank's own for backward, no more.
    """
    if cp.size == 1:
        yield k, v
        return
    sizes = k.shape[-1], v.shape[-1]
    heads = (k.shape[-2], sum(sizes))
    mine = following(_side_by_side, k, v)
    whole = across(mine, partial(gather_tokens, cp), partial(scatter_tokens, cp))
    again = _Again(kept(mine.detach()), whole.detach(), cp)
    del mine
    with saved_tensors_hooks_traced(), torch.autograd.graph.saved_tensors_hooks(again.pack, again.unpack):
        k, v = whole.unflatten(-1, heads).split(sizes, -1)
        del whole
        yield k, v
    again.forget()


def to_heads(cp: RankAxis, x: Tensor) -> Tensor:
    """(batch, this rank's tokens, heads, features) → (batch, all tokens in order, this rank's heads, features)."""
    came = cp.exchange(x.unflatten(2, (cp.size, -1)).movedim(2, 0)).unflatten(2, (2, -1))
    return torch.cat((came[:, :, 0], came[:, :, 1].flip(0))).movedim(0, 1).flatten(1, 2)


def to_tokens(cp: RankAxis, x: Tensor) -> Tensor:
    """The way back."""
    early, late = x.unflatten(1, (2 * cp.size, -1)).movedim(1, 0).chunk(2)
    sent = torch.stack((early, late.flip(0)), 2).flatten(2, 3)
    return cp.exchange(sent).movedim(0, 2).flatten(2, 3)


LATENT_EPS = 1e-6  # of the norms inside latent attention, in DeepSeek's code and transformers', whatever rms_norm_eps


def _attended(q: Tensor, k: Tensor, v: Tensor, region: RankRegion, *, kind: str, c: ModelConfig) -> Tensor:
    """Tokens before heads on both sides, so that what attention reads and gives needs no copy."""
    cp = region.cp

    def attended(q: Tensor, k: Tensor, v: Tensor, sight: AttentionMask) -> Tensor:
        heads_first = [t.transpose(1, 2) for t in (q, k, v)]
        how: Any = {"fused": kind == "flash", "again": kind == "remade", "scaled": c.score_scale}
        return attend(*heads_first, sight=sight, **how).transpose(1, 2)

    with torch._C.DisableTorchFunction():  # no weights are in here: whoever watches for them is called for nothing
        if region.heads:
            there, back = partial(to_heads, cp), partial(to_tokens, cp)
            q, k, v = (across(t, there, back) for t in (q, k, v))
            return across(attended(q, k, v, AttentionMask(c.window)), back, there).flatten(2)
        with whole_context(k, v, cp) as (k, v):
            return attended(q, k, v, AttentionMask(c.window, cp.size, cp.index)).flatten(2)


class AttentionPart(nn.Module):
    """Part `attn` with ordinary heads: x + attention(norm(x))."""

    def __init__(self, c: ModelConfig, make: Params, prefix: str, kind: str) -> None:
        super().__init__()
        self.c, self.kind, names = c, kind, c.names
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        linear = partial(LinearLayer, make, flipped=names.flipped)
        self.region = make.region
        self.sizes = [size // self.region.tp.size for size in (q, kv, kv)]
        self.norm = NormLayer(c, make, prefix + names.attn_norm, c.hidden)
        if names.qkv:
            self.qkv = [linear(prefix + names.qkv, q + 2 * kv, c.hidden, bias=c.qkv_bias)]
        else:
            named = zip("qkv", (q, kv, kv), strict=True)
            at = f"{prefix}self_attn."
            self.qkv = [linear(f"{at}{n}_proj", size, c.hidden, bias=c.qkv_bias) for n, size in named]
        self.linears = nn.ModuleList(self.qkv)
        self.q_norm = make(f"{prefix}self_attn.q_norm.weight", c.head_dim, start=1.0) if c.qk_norm else None
        self.k_norm = make(f"{prefix}self_attn.k_norm.weight", c.head_dim, start=1.0) if c.qk_norm else None
        self.out = linear(prefix + names.out, c.hidden, q, bias=c.out_bias, leaves=True)

    def forward(self, x: Tensor) -> Tensor:
        c, (q, k, v) = self.c, self._projected(remade("norm", self.norm, x))
        angles = self._angles(q.shape[1], q)
        if self.q_norm is not None and self.k_norm is not None:
            turned = partial(self._normed, angles, (self.q_norm, self.k_norm))
            q, k = remade("norm", turned, q, k)
        elif angles is not None:
            turn = partial(rotate, cos=angles[0], sin=angles[1])
            q, k = turn(q), following(turn, k)
        added: Tensor = self.out(_attended(q, k, v, self.region, kind=self.kind, c=c))
        return x + added

    def _angles(self, length: int, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines of this rank's tokens, in x's format."""
        c, cp = self.c, self.region.cp
        width = int(c.head_dim * c.rope_share)
        known = TokenAngles(width, c.rope_theta, c.rope_scaling, cp.size, cp.index)
        return rotary(length, known, x) if c.rope else None

    def _projected(self, h: Tensor) -> Iterator[Tensor]:
        """Queries, keys and values, by heads."""
        made = each(h, self.qkv, self.region)
        parts = made[0].split(self.sizes, -1) if len(made) == 1 else made
        if len(made) == 3:
            remade_as("operators", lambda h: each(h, self.qkv[1:2], self.region), (h,), made[1])
        return (t.unflatten(-1, (-1, self.c.head_dim)) for t in parts)

    def _normed(
        self, angles: tuple[Tensor, Tensor] | None, norms: tuple[Tensor, Tensor], q: Tensor, k: Tensor
    ) -> tuple[Tensor, ...]:
        """Queries and keys, each normed, and turned by their places."""
        normed = (rms_norm(t, norm, self.c.norm_eps) for t, norm in zip((q, k), norms, strict=True))
        return tuple(normed if angles is None else (rotate(t, *angles) for t in normed))


class LatentAttentionPart(nn.Module):
    """Part `attn` with DeepSeek's latent attention: x + MLA(norm(x))."""

    def __init__(self, c: ModelConfig, make: Params, prefix: str, kind: str) -> None:
        super().__init__()
        assert c.mla is not None
        self.c, self.mla, self.kind, self.region = c, c.mla, kind, make.region
        mla, at = c.mla, f"{prefix}self_attn."
        self.norm = NormLayer(c, make, f"{prefix}input_layernorm", c.hidden)
        if mla.q_rank:
            self.q_a: nn.Module = LinearLayer(make, f"{at}q_a_proj", mla.q_rank, c.hidden, bias=c.qkv_bias)
            self.q_norm: nn.Module = NormLayer(c, make, f"{at}q_a_layernorm", mla.q_rank, LATENT_EPS)
            self.q_b = LinearLayer(make, f"{at}q_b_proj", c.heads * mla.qk_dim, mla.q_rank)
        else:
            self.q_a, self.q_norm = nn.Identity(), nn.Identity()
            self.q_b = LinearLayer(make, f"{at}q_proj", c.heads * mla.qk_dim, c.hidden)
        down = mla.kv_rank + mla.rope_dim
        self.kv_a = LinearLayer(make, f"{at}kv_a_proj_with_mqa", down, c.hidden, bias=c.qkv_bias)
        self.kv_norm = NormLayer(c, make, f"{at}kv_a_layernorm", mla.kv_rank, LATENT_EPS)
        self.kv_b = LinearLayer(make, f"{at}kv_b_proj", c.heads * (mla.nope_dim + mla.v_dim), mla.kv_rank)
        self.out = LinearLayer(make, f"{at}o_proj", c.hidden, c.heads * mla.v_dim, bias=c.out_bias, leaves=True)

    def forward(self, x: Tensor) -> Tensor:
        """One rotary key serves all heads. The narrow projections are whole on every rank: each head needs all."""
        mla = self.mla
        h = remade("norm", self.norm, x)
        narrow = remade("norm", self.q_norm, self.q_a(h)) if mla.q_rank else h
        down = self.kv_a(h) if mla.q_rank else remade("operators", self.kv_a, h)
        latent, k_rope = down.split((mla.kv_rank, mla.rope_dim), -1)
        q, k, v = remade("up_projection", self._up, narrow, remade("norm", self.kv_norm, latent), k_rope)
        added: Tensor = self.out(_attended(q, k, v, self.region, kind=self.kind, c=self.c))
        return x + added

    def _up(self, narrow: Tensor, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of this rank's heads, of normed low-rank ones and of the rotary key."""
        c, mla, region = self.c, self.mla, self.region
        heads = c.heads // region.tp.size
        (q,) = each(narrow, [self.q_b], region)
        batch, length, _ = q.shape
        (kv,) = each(latent, [self.kv_b], region)
        q, kv, k_rope = q.view(batch, length, heads, -1), kv.view(batch, length, heads, -1), enter(k_rope, region)
        k_nope, v = kv.split((mla.nope_dim, mla.v_dim), -1)
        q_nope, q_rope = q.split((mla.nope_dim, mla.rope_dim), -1)
        angles = TokenAngles(mla.rope_dim, c.rope_theta, c.rope_scaling, region.cp.size, region.cp.index)
        turn = partial(rotate, pairs=c.rope_pairs)
        cos, sin = rotary(length, angles, q)
        shared = turn(k_rope.unsqueeze(2), cos, sin).expand(-1, -1, heads, -1)
        q, k = torch.cat((q_nope, turn(q_rope, cos, sin)), -1), torch.cat((k_nope, shared), -1)
        # A view of v would keep the keys' first half alive beside k.
        return q, k, v.contiguous()
