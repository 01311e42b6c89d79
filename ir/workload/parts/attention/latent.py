"""Multi-head latent attention's projections: to every head's keys and values, or with these absorbed."""

from ir.core.ops import Pass
from ir.core.work import Work
from ir.workload.part import SavedBuffer
from ir.workload.parts import kernels as k
from ir.workload.parts.attention.core import AttentionCore
from ir.workload.parts.attention.indexer import AttentionIndexerWork
from ir.workload.parts.attention.projection import AttentionProjection
from ir.workload.parts.kernels import LinearKernel
from ir.workload.parts.residual import normed, stats
from ir.workload.setting import PartSetting


def latent(s: PartSetting, core: AttentionCore) -> AttentionProjection:
    """Multi-head latent attention: queries and keys/values through low-rank projections, each with a norm inside.

    The down-projections run on the residual stream's tokens, uncut; their narrow outputs enter the parallel region.
    """
    mla, h = s.config.mla, s.config.hidden
    assert mla is not None
    both = core.heads * (mla.nope_dim + mla.v_dim)
    downs: tuple[LinearKernel, ...] = (LinearKernel("kv_a_proj", s.stream, mla.latent_dim, h),)
    ups = (LinearKernel("q_proj", s.tokens, core.q_features, h), LinearKernel("kv_b_proj", s.tokens, both, mla.kv_rank))
    if mla.q_rank:
        downs = (LinearKernel("q_a_proj", s.stream, mla.q_rank, h), *downs)
        ups = (LinearKernel("q_b_proj", s.tokens, core.q_features, mla.q_rank), ups[1])
    weighed = (LinearKernel("gate_proj", s.tokens, core.heads, h),) if s.config.form.head_gate else ()
    ranks = s.stream * (mla.q_rank + mla.kv_rank)
    up = (*k.forward(s, *ups), *_rope(s, core))
    # "operators" makes every second product again: the up-projections, or where queries have one product alone, the
    # keys' and values' way down.
    second = ("up_projection", "operators") if mla.q_rank else ("up_projection",)
    down = () if mla.q_rank else (("operators",), k.forward(s, *downs))
    return AttentionProjection(
        forward=(
            *k.forward(s, *downs),
            k.norm_forward(s, "latent_norm", ranks),
            *k.cast(s, "latent", ranks),
            *up,
            *k.forward(s, *weighed),
        ),
        backward=(
            *k.input_grad(s, *weighed),
            *_rope(s, core),
            *k.input_grad(s, *ups),
            k.norm_backward(s, "latent_norm_backward", ranks),
            *k.input_grad(s, *downs),
        ),
        linears=(*ups, *weighed, *downs),
        saved=(
            SavedBuffer("latent", (ranks + s.stream * mla.rope_dim) * s.wide, Pass.I, *down),
            normed(s, "latent_normed", ranks),
            stats(s, "latent_norm_stats", 2 if mla.q_rank else 1),
            SavedBuffer("qkv", s.tokens * (core.q_features + core.kv_features) * s.wide, Pass.I, second, up),
        ),
        enters=(mla.q_rank or h, mla.kv_rank, *((h,) if weighed and mla.q_rank else ())),
        readers=2 + len(weighed),
        widest=both,
        model_flops=_projections(s),
        passes=mla.rope_dim,
        indexer=AttentionIndexerWork.of(s),
    )


def absorbed(s: PartSetting, core: AttentionCore) -> AttentionProjection:
    """The same for kernels that read compressed keys, which all heads share: each head's queries are taken to their
    space, and what attention gives back from it, by the halves of the weight that would make keys and values.
    """
    mla, h = s.config.mla, s.config.hidden
    assert mla is not None
    heads, wide, n = core.heads, s.precision.activations, s.tokens
    downs = (LinearKernel("q_a_proj", s.stream, mla.q_rank, h), LinearKernel("kv_a_proj", s.stream, mla.latent_dim, h))
    query = LinearKernel("q_b_proj", n, heads * mla.qk_dim, mla.q_rank)
    there = LinearKernel("absorbed_keys", n, mla.kv_rank, mla.nope_dim, heads, wide, batched=True)
    back = LinearKernel("absorbed_values", n, mla.v_dim, mla.kv_rank, heads, wide, batched=True)
    ranks, turned = s.stream * (mla.q_rank + mla.kv_rank), k.copies(s, "rope", n * (heads + 1) * mla.rope_dim)
    keys = k.copies(s, "join_keys", n * mla.latent_dim)
    second = ("up_projection", "operators")
    compressed = (there.forward(s), turned, keys)
    made = SavedBuffer("qk", n * (core.q_features + core.kv_features) * s.wide, Pass.I, second, compressed)
    return AttentionProjection(
        forward=(
            *k.forward(s, *downs),
            k.norm_forward(s, "latent_norm", ranks),
            *k.cast(s, "latent", ranks),
            query.forward(s),
            *compressed,
        ),
        backward=(
            turned,
            keys,
            *k.input_grad(s, there, query),
            k.norm_backward(s, "latent_norm_backward", ranks),
            *k.input_grad(s, *downs),
        ),
        linears=(query, there, back, *downs),
        saved=(
            SavedBuffer("latent", (ranks + s.stream * mla.rope_dim) * s.wide, Pass.I),
            normed(s, "latent_normed", ranks),
            stats(s, "latent_norm_stats", 2),
            SavedBuffer("q_nope", n * heads * mla.nope_dim * s.wide, Pass.W, second, (query.forward(s),)),
            made,
            SavedBuffer("attended", n * core.out_features * s.wide),
        ),
        enters=(mla.q_rank, mla.kv_rank),
        readers=2,
        widest=heads * mla.qk_dim,
        model_flops=_projections(s),
        passes=mla.rope_dim,
        behind=(back.forward(s),),
        behind_backward=k.input_grad(s, back),
        indexer=AttentionIndexerWork.of(s),
    )


def _rope(s: PartSetting, core: AttentionCore) -> Work:
    """Rope on the queries' last features (but Kimi Linear's), and the keys put together from their two pieces."""
    mla = s.config.mla
    assert mla is not None
    rope = (k.copies(s, "rope", s.tokens * (core.heads + 1) * mla.rope_dim),) if s.config.rope else ()
    return (*rope, k.copies(s, "join_keys", s.tokens * core.heads * mla.qk_dim))


def _projections(s: PartSetting) -> int:
    c, mla = s.config, s.config.mla
    assert mla is not None
    q = c.heads * mla.qk_dim
    query = mla.q_rank * (c.hidden + q) if mla.q_rank else c.hidden * q
    key_value = c.hidden * mla.latent_dim + mla.kv_rank * c.heads * (mla.nope_dim + mla.v_dim)
    return 2 * s.shape.tokens * (query + key_value + c.form.head_gate * c.hidden * c.heads)
