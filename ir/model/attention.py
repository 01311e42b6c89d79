"""The part "attn": input norm, projections, attention, output projection, residual; ordinary heads or MLA."""

from __future__ import annotations

from ir.model import kernels as k
from ir.model.core import Core, model_flops
from ir.model.kernels import Linear
from ir.model.part import PartWork, Saved
from ir.model.region import context, enter, leave
from ir.model.setting import Attention, Setting
from ir.model.stream import mask, normed, residual, residual_backward, stats
from ir.ops import Pass
from ir.work import Work


def attention(s: Setting) -> PartWork:
    """Work of the part, for either kind of attention."""
    return _latent(s) if s.config.mla else _heads(s)


def _heads(s: Setting) -> PartWork:
    """Multi-head or grouped-query attention."""
    c, core = s.config, Core.of(s)
    q, kv, h = core.q_features, core.kv_features, c.hidden
    roped = q + core.kv_heads * core.qk
    qkv, out = Linear("qkv_proj", s.tokens, q + kv, h), Linear("o_proj", s.tokens, h, core.out_features)
    ready: Work = ((k.norm_forward(s, "qk_norm", s.tokens * roped),) if c.qk_norm else ()) + _rope(s, roped)
    ready_back = _rope(s, roped) + ((k.norm_backward(s, "qk_norm_backward", s.tokens * roped),) if c.qk_norm else ())
    size = s.tokens * s.wide
    saved = [normed(s, "normed", s.stream * h), stats(s)]
    if c.qk_norm:
        # The norm's input; its output, which attention reads, can be made again from it.
        saved.append(Saved("qk", size * roped, Pass.I))
        saved.append(Saved("qk_normed", size * roped, Pass.I, "norm", ready))
    else:
        saved.append(Saved("qk", size * roped, Pass.I))
    saved.append(Saved("v", size * (q + kv - roped), Pass.I))
    return PartWork(
        forward=(
            k.norm_forward(s, "input_norm", s.stream * h),
            *k.cast(s, "normed", s.stream * h),
            qkv.forward(s),
            *ready,
            *core.forward(s),
            *k.cast(s, "context", s.tokens * core.out_features),
            out.forward(s),
            residual(s),
        ),
        input_grad=(
            *residual_backward(s),
            *k.input_grad(s, out),
            *core.backward(s),
            *ready_back,
            *k.input_grad(s, qkv),
            k.norm_backward(s, "input_norm_backward", s.stream * h),
            k.add(s, "residual_backward", s.stream * h),
        ),
        weight_grad=k.weight_grad(s, out, qkv),
        out_bytes=s.stream * h * s.wide,
        saved=(*saved, *_context_saved(s, core), *core.saved(s), *mask(s)),
        stash_bytes=k.stash(s, out, qkv),
        inline=(*enter(s, h), *context(s, kv), *leave(s, h)),
        forward_workspace=size * max(h + q + kv, core.out_features + h) + core.workspace(s, Pass.F),
        input_grad_workspace=size * (core.out_features + q + kv) + core.workspace(s, Pass.I),
        model_flops=_projections(s, 2 * c.heads * c.head_dim + 2 * c.kv_heads * c.head_dim) + model_flops(s),
    )


def _projections(s: Setting, features: int) -> int:
    return 2 * s.shape.tokens * s.config.hidden * features


def _rope(s: Setting, features: int) -> Work:
    return (k.copies(s, "rope", s.tokens * features),) if s.config.rope else ()


def _context_saved(s: Setting, core: Core) -> tuple[Saved, ...]:
    """Attention's output: the output projection's input, and flash's backward reads it too.

    One wide tensor serves both. In fp8 flash still needs it wide, beside the fp8 copy; but DeepSeek-V3 keeps a single
    12-bit (E5M6) one (arXiv:2412.19437, section 3.3.3), so that is what MLA does here.
    """
    n = s.tokens * core.out_features
    if not s.fp8:
        return (Saved("context", n * s.wide),)
    if s.config.mla:
        return (Saved("context_e5m6", n * 12 // 8 + 4 * -(-n // 128)),)
    wide = (Saved("context", n * s.wide, Pass.I),) if s.attention is Attention.FLASH else ()
    return (*wide, Saved("context_fp8", s.cached(n)))


def _latent(s: Setting) -> PartWork:
    """Multi-head latent attention: queries and keys/values through low-rank projections, each with a norm inside.

    The down-projections run on the residual stream's tokens, uncut; their narrow outputs enter the parallel region.
    """
    c, core, mla = s.config, Core.of(s), s.config.mla
    assert mla is not None
    h, q_rank, kv_rank = c.hidden, mla.q_rank, mla.kv_rank
    kv_down = Linear("kv_a_proj", s.stream, kv_rank + mla.rope_dim, h)
    kv_up = Linear("kv_b_proj", s.tokens, core.heads * (mla.nope_dim + mla.v_dim), kv_rank)
    out = Linear("o_proj", s.tokens, h, core.out_features)
    downs: tuple[Linear, ...]
    if q_rank:
        downs = (Linear("q_a_proj", s.stream, q_rank, h), kv_down)
        ups = (Linear("q_b_proj", s.tokens, core.q_features, q_rank), kv_up)
    else:
        downs, ups = (kv_down,), (Linear("q_proj", s.tokens, core.q_features, h), kv_up)
    ranks = q_rank + kv_rank
    up = (*k.forward(s, *ups), *_latent_rope(s, core))
    narrow = ranks + mla.rope_dim if q_rank else h + kv_rank + mla.rope_dim
    size = s.tokens * s.wide
    qkv = core.q_features + core.kv_features
    return PartWork(
        forward=(
            k.norm_forward(s, "input_norm", s.stream * h),
            *k.cast(s, "normed", s.stream * h),
            *k.forward(s, *downs),
            k.norm_forward(s, "latent_norm", s.stream * ranks),
            *k.cast(s, "latent", s.stream * ranks),
            *up,
            *core.forward(s),
            *k.cast(s, "context", s.tokens * core.out_features),
            out.forward(s),
            residual(s),
        ),
        input_grad=(
            *residual_backward(s),
            *k.input_grad(s, out),
            *core.backward(s),
            *_latent_rope(s, core),
            *k.input_grad(s, *ups),
            k.norm_backward(s, "latent_norm_backward", s.stream * ranks),
            *k.input_grad(s, *downs),
            k.norm_backward(s, "input_norm_backward", s.stream * h),
            k.add(s, "residual_backward", s.stream * h),
        ),
        weight_grad=k.weight_grad(s, out, *ups, *downs),
        out_bytes=s.stream * h * s.wide,
        saved=(
            normed(s, "normed", s.stream * h),
            stats(s),
            Saved("latent", s.stream * (ranks + mla.rope_dim) * s.wide, Pass.I),
            normed(s, "latent_normed", s.stream * ranks),
            Saved("qkv", size * qkv, Pass.I, "up_projection", up),
            *_context_saved(s, core),
            *core.saved(s),
            *mask(s),
        ),
        stash_bytes=k.stash(s, out, *ups, *downs),
        inline=(*enter(s, narrow), *context(s, core.kv_features), *leave(s, h)),
        forward_workspace=size * max(core.heads * (mla.nope_dim + mla.v_dim), core.out_features + h)
        + core.workspace(s, Pass.F),
        input_grad_workspace=size * (core.out_features + qkv) + core.workspace(s, Pass.I),
        model_flops=_latent_projections(s) + model_flops(s),
    )


def _latent_rope(s: Setting, core: Core) -> Work:
    """Rope on the queries' last features, and the keys put together from their two pieces."""
    mla = s.config.mla
    assert mla is not None
    rope = k.copies(s, "rope", s.tokens * (core.heads + 1) * mla.rope_dim)
    return (rope, k.copies(s, "join_keys", s.tokens * core.heads * mla.qk_dim))


def _latent_projections(s: Setting) -> int:
    c, mla = s.config, s.config.mla
    assert mla is not None
    q = c.heads * mla.qk_dim
    query = mla.q_rank * (c.hidden + q) if mla.q_rank else c.hidden * q
    key_value = c.hidden * (mla.kv_rank + mla.rope_dim) + mla.kv_rank * c.heads * (mla.nope_dim + mla.v_dim)
    return 2 * s.shape.tokens * (query + key_value + c.hidden * c.heads * mla.v_dim)
