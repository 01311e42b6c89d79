"""The part "attn": input norm, projections, attention, output projection, residual; ordinary heads or MLA."""

from dataclasses import replace

from ir.core.ops import Pass
from ir.core.work import Work
from ir.workload.config.spec import AttentionNormKind, NormLayerKind
from ir.workload.part import PartWork, SavedBuffer
from ir.workload.parts import kernels as k
from ir.workload.parts.attention.compressed import compressed
from ir.workload.parts.attention.context import context
from ir.workload.parts.attention.core import AttentionCore
from ir.workload.parts.attention.latent import absorbed, latent
from ir.workload.parts.attention.projection import AttentionProjection
from ir.workload.parts.kernels import LinearKernel
from ir.workload.parts.residual import added, branch, written
from ir.workload.setting import AttentionKind, PartSetting, shares_kv_heads


def attention(s: PartSetting) -> PartWork:
    """Work of the part, for either kind of attention."""
    c, core = s.config, AttentionCore.of(s)
    p = _projection(s, core)
    h, size, width = c.hidden, s.tokens * s.wide, p.out_features or core.heads * c.v_dim
    out = LinearKernel("o_proj", s.tokens, h, width)
    later = size * width + s.stream * h * s.wide
    inside = PartWork(
        forward=(
            *p.forward,
            *p.indexer.forward,
            *core.forward(s),
            *p.behind,
            *_gated(s, core, 3),
            *k.cast(s, "context", s.tokens * width),
            *_stored(s, "context.store", width),
            out.forward(s),
        ),
        input_grad=(
            *_stored(s, "context.load", width),
            *k.input_grad(s, out),
            *_gated(s, core, 5),
            *p.behind_backward,
            *core.backward(s),
            *p.backward,
        ),
        weight_grad=(
            *k.weight_grad(s, out, biased=c.out_bias),
            *k.weight_grad(s, *p.linears, biased=c.qkv_bias),
        ),
        out_bytes=s.stream * h * s.wide,
        saved=(*p.saved, *p.indexer.saved, *_context_saved(s, width), *_gate_saved(s, core), *core.saved(s)),
        stash_bytes=k.stash(s, out, *p.linears),
        inline=(*p.inline(s), *context(s, core)),
        # The output projection's result, or what is there while context and output are not yet.
        forward_workspace=max(size * h, max(size * p.widest, p.indexer.workspace, core.workspace(s, Pass.F)) - later),
        model_flops=p.model_flops
        + 2 * s.shape.tokens * h * width * s.layout.tp
        + core.model_flops(s)
        + p.indexer.model_flops,
    )
    made = branch(s, "input_norm", inside, core.gradients(s), reads=sum(p.enters), linears=p.readers)
    again = SavedBuffer("stream", 0, Pass.I, ("operators",), (*_second_out(s, out), *added(s)))
    return replace(made, saved=(*made.saved, again))


def _second_out(s: PartSetting, out: LinearKernel) -> Work:
    """The output projection is the fourth product, which "operators" makes again; behind latent queries, the fifth.

    What it gives is kept all the same: as many bytes as the MLP's last product, which that choice keeps in vain.
    """
    return () if s.config.compressed or (s.config.mla and s.config.mla.q_rank) else (out.forward(s),)


def _projection(s: PartSetting, core: AttentionCore) -> AttentionProjection:
    if s.config.compressed is not None:
        return compressed(s, core, s.config.compressed)
    if s.config.mla is None:
        return _heads(s, core)
    return absorbed(s, core) if s.picked else latent(s, core)


def _heads(s: PartSetting, core: AttentionCore) -> AttentionProjection:
    """Multi-head or grouped-query attention: one fused product for q, k and v, of which each rank has a share."""
    c, h = s.config, s.config.hidden
    gate = core.out_features if c.form.attn_gate else core.heads if c.form.head_gate else 0
    whole = s.layout.tp * (core.q_features + gate) + c.kv_heads * (core.qk + core.v)
    roped = core.q_features + core.kv_heads * core.qk
    qkv = LinearKernel("qkv_proj", s.tokens, whole // s.layout.tp, h)
    gathered = whole if shares_kv_heads(c, s.layout.tp) else 0
    # It comes rank by rank, and is read token by token.
    turned: Work = (k.memory(s, "gathered_qkv", 2 * s.tokens * whole * s.wide),) if gathered else ()
    ready: Work = (k.rope(s, s.tokens * roped),) if c.rope else ()
    back: Work = (k.rope(s, s.tokens * roped, back=True),) if c.rope else ()
    if c.qk_norm:
        ready = (k.norm_forward(s, "qk_norm", s.tokens * roped), *ready)
        back = (*back, k.norm_backward(s, "qk_norm_backward", s.tokens * roped))
    return AttentionProjection(
        forward=(qkv.forward(s), *turned, *ready),
        backward=(*back, *turned, *k.input_grad(s, qkv)),
        linears=(qkv,),
        saved=(
            *_queries_keys(s, core, ready),
            SavedBuffer("v", s.tokens * core.kv_heads * core.v * s.wide, Pass.I),
        ),
        enters=(h,),
        readers=1 if c.names.qkv else 3,
        widest=gathered or qkv.out,
        gathered=gathered,
        model_flops=2 * s.shape.tokens * h * whole,
        sums=2 if c.qk_norm and c.form.qk_over is AttentionNormKind.WIDTH and s.layout.tp > 1 else 0,
    )


def _queries_keys(s: PartSetting, core: AttentionCore, ready: Work) -> tuple[SavedBuffer, ...]:
    """Queries and keys as attention reads them, and before their norm, which reads them again. ready: norm and rope.

    Where operations are separate, values are a view of the fused product: it stays beside what rope makes of it. The
    queries' product is one that "operators" keeps, the keys' one that it makes again, unless the model has one for all.
    """
    c, q, key = s.config, s.tokens * core.q_features * s.wide, s.tokens * core.kv_heads * core.qk * s.wide
    second: Work = (LinearKernel("k_proj", s.tokens, core.kv_heads * core.qk, c.hidden).forward(s),)
    again = () if c.names.qkv else ("operators",)
    if not c.qk_norm and not (c.rope and s.style.eager):
        return (SavedBuffer("q", q, Pass.I), SavedBuffer("k", key, Pass.I, again, (*second, *ready)))
    before = (SavedBuffer("q_before", q, Pass.I), SavedBuffer("k_before", key, Pass.I, again, second))
    if not c.qk_norm:
        return (*before, SavedBuffer("qk", q + key, Pass.I, ("operators",), ready))
    # A number or two per norm. Its output, which attention reads, can be made again.
    norms = 2 if c.form.qk_over is AttentionNormKind.WIDTH else core.heads + core.kv_heads
    stats = SavedBuffer("qk_norm_stats", (8 if c.norm is NormLayerKind.LAYER else 4) * s.tokens * norms, Pass.I)
    kept = written(s, s.tokens * (core.q_features + core.kv_heads * core.qk))
    return (*before, *kept, stats, SavedBuffer("qk", q + key, Pass.I, ("norm", "operators"), ready))


def _stored(s: PartSetting, label: str, width: int) -> Work:
    """The way into and out of the 12-bit format that `_context_saved` keeps."""
    return k.store(s, label, s.tokens * width, 1.5) if s.fp8 and s.config.mla else ()


def _context_saved(s: PartSetting, width: int) -> tuple[SavedBuffer, ...]:
    """Attention's output: the output projection's input, and flash's backward reads it too.

    One wide tensor serves both. In fp8 flash still needs it wide, beside the fp8 copy; but DeepSeek-V3 keeps a single
    12-bit (E5M6) one (arXiv:2412.19437, section 3.3.3), so that is what MLA does here.
    """
    n = s.tokens * width
    if not s.fp8:
        return (SavedBuffer("context", n * s.wide),)
    if s.config.mla:
        return (SavedBuffer("context_e5m6", n * 12 // 8 + 4 * -(-n // 128)),)
    read_by_flash = s.attention is AttentionKind.FLASH and not s.config.compressed
    wide = (SavedBuffer("context", n * s.wide, Pass.I),) if read_by_flash else ()
    return (*wide, SavedBuffer("context_fp8", s.cached(n)))


def _gated(s: PartSetting, core: AttentionCore, tensors: int) -> Work:
    """The output times the sigmoid of its gate, or back; one number for each head is next to nothing beside it."""
    form, n = s.config.form, s.tokens * core.out_features * s.wide
    moved = (tensors if form.attn_gate else tensors - 1) * n
    return (k.memory(s, "attention_gate", moved),) if form.attn_gate or form.head_gate else ()


def _gate_saved(s: PartSetting, core: AttentionCore) -> tuple[SavedBuffer, ...]:
    """The gate, and attention's output before it."""
    form, n = s.config.form, s.tokens * core.out_features * s.wide
    if not (form.attn_gate or form.head_gate):
        return ()
    gate = n if form.attn_gate else s.tokens * core.heads * s.wide
    return (SavedBuffer("gate", gate, Pass.I), SavedBuffer("ungated", n, Pass.I))
