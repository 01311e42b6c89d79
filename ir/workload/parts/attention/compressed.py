"""DeepSeek-V4's attention: one key, its own value, for all heads; a window of them, and compressed ones behind it."""

from ir.core.ops import Pass
from ir.core.work import Kernel, KernelKind, Work
from ir.workload.config.compressed import CompressedAttention
from ir.workload.part import SavedBuffer
from ir.workload.parts import kernels as k
from ir.workload.parts.attention.core import AttentionCore
from ir.workload.parts.attention.indexer import AT_ONCE, EXACT, ID_BYTES, NO_INDEXER, AttentionIndexerWork, gathered
from ir.workload.parts.attention.projection import AttentionProjection
from ir.workload.parts.kernels import LinearKernel
from ir.workload.parts.residual import normed, stats
from ir.workload.setting import AttentionKind, PartSetting


def compressed(s: PartSetting, core: AttentionCore, x: CompressedAttention) -> AttentionProjection:
    """Queries through a low rank, each head's normed; keys by one narrow product; what of them is compressed by two
    more; the output turned back, and taken through a low rank group by group.

    The narrow products run on the residual stream's tokens, uncut.
    """
    h, dim, keys = s.config.hidden, core.qk, x.keys
    made, features = s.shape.microbatch_size * keys.entries(s.shape.seq_len), keys.series * dim if keys.rate else 0
    groups = x.out_groups // s.layout.tp
    downs: tuple[LinearKernel, ...] = (
        LinearKernel("q_a_proj", s.stream, x.q_rank, h),
        LinearKernel("kv_proj", s.stream, dim, h),
    )
    if keys.rate:
        downs += (LinearKernel("compressor", s.stream, 2 * features, h),)
    query = LinearKernel("q_b_proj", s.tokens, core.q_features, x.q_rank)
    back = LinearKernel("o_a_proj", s.tokens, x.out_rank, core.out_features // groups, groups, batched=True)
    narrow = h * (x.q_rank + dim + 2 * features) + s.config.heads * dim * (x.q_rank + x.out_rank)
    few, q = s.stream * (x.q_rank + dim), s.tokens * core.q_features
    turned = k.copies(s, "rope", s.tokens * (core.heads + 1) * x.rope_dim)
    undone = k.copies(s, "rope_back", s.tokens * core.heads * x.rope_dim)
    again = (k.norm_forward(s, "q_norm.again", q), turned)
    joined = _taken_together(s, 2 * features, made // s.layout.cp * dim)
    return AttentionProjection(
        forward=(
            *k.forward(s, *downs),
            k.norm_forward(s, "latent_norm", few),
            *k.cast(s, "latent", s.stream * x.q_rank),
            query.forward(s),
            k.norm_forward(s, "q_norm", q),
            turned,
            *joined,
        ),
        backward=(
            *joined,
            turned,
            k.norm_backward(s, "q_norm_backward", q),
            *k.input_grad(s, query),
            k.norm_backward(s, "latent_norm_backward", few),
            *k.input_grad(s, *downs),
        ),
        linears=(query, back, *downs),
        saved=_saved(s, core, x, made, features, (query.forward(s), *again)),
        enters=(x.q_rank,),
        readers=len(downs) + (keys.rate > 0),
        widest=core.q_features,
        model_flops=2 * s.shape.tokens * narrow,
        passes=dim + (dim // keys.rate if keys.rate else 0),
        behind=(undone, *k.cast(s, "turned_back", q), back.forward(s)),
        behind_backward=(*k.input_grad(s, back), undone),
        indexer=_picks(s, x),
        out_features=groups * x.out_rank,
    )


def _saved(
    s: PartSetting, core: AttentionCore, x: CompressedAttention, made: int, features: int, again: Work
) -> tuple[SavedBuffer, ...]:
    """What backward reads. made: compressed keys; features: of a token that are compressed, each beside its weight.
    again: the queries' product, their norm and rope.
    """
    product, *ready = again
    few, q = s.stream * (x.q_rank + core.qk), s.tokens * core.q_features
    return (
        SavedBuffer("latent", (few + 2 * s.stream * features) * s.wide, Pass.I),
        normed(s, "latent_normed", s.stream * x.q_rank),
        stats(s, "latent_norm_stats", 2),
        SavedBuffer("q_before", q * s.wide, Pass.I, ("up_projection", "operators"), (product,)),
        SavedBuffer("q_norm_stats", EXACT * s.tokens * core.heads, Pass.I),
        SavedBuffer("q", q * s.wide, Pass.I, ("norm", "operators"), tuple(ready)),
        SavedBuffer("keys", (s.tokens + made) * core.qk * s.wide, Pass.I),
        SavedBuffer("attended", q * s.wide, Pass.I),
        SavedBuffer("turned_back", s.cached(q)),
    )


def _taken_together(s: PartSetting, features: int, made: int) -> Work:
    """Tokens of a stretch weighed by a softmax over them, feature by feature, summed, normed, turned: one kernel."""
    return (k.memory(s, "compress", (s.stream * features + made) * s.wide),) if features else ()


def _picks(s: PartSetting, x: CompressedAttention) -> AttentionIndexerWork:
    """Which compressed keys each query attends to: those of the highest scores. Its keys are compressed likewise."""
    keys, h = x.keys, s.config.hidden
    if not keys.top_k:
        return NO_INDEXER
    heads, dim, entries = x.index_heads, x.index_dim, keys.entries(s.shape.seq_len)
    features, made = 2 * keys.series * dim, s.shape.microbatch_size * entries
    query = LinearKernel("index_query", s.tokens, heads * dim, x.q_rank)
    key = LinearKernel("index_compressor", s.stream, features, h)
    weights = LinearKernel("index_weights", s.stream, heads, h, dtype=s.precision.activations)
    picks = ID_BYTES * s.tokens * min(keys.top_k, entries)
    stored = s.attention is AttentionKind.UNFUSED  # as transformers' class scores all pairs; else those behind a query
    pairs = s.tokens * s.layout.cp * entries // (1 if stored else 2)
    shape = (s.shape.microbatch_size, s.tokens // s.shape.microbatch_size * heads, entries, dim)
    read = (s.tokens * heads + made) * dim * s.precision.compute.bytes
    written = EXACT * s.tokens * entries
    flops = 2 * pairs * heads * dim // s.layout.cp
    return AttentionIndexerWork(
        forward=(
            *k.forward(s, query, key, weights),
            *_taken_together(s, features, made // s.layout.cp * dim),
            k.copies(s, "index_rope", s.tokens * heads * x.rope_dim),
            Kernel(KernelKind.GROUPED_GEMM, flops, read + written, s.precision.compute, shape, "index_scores"),
            k.memory(s, "index_top_k", 2 * written + picks),
        ),
        inline=gathered(s, heads, made // s.layout.cp * dim, made * dim),
        saved=(SavedBuffer("picked", picks, Pass.I),),
        workspace=EXACT * entries * (s.tokens * heads if stored else min(s.tokens, AT_ONCE)),
        model_flops=2 * s.shape.tokens * (heads * dim * x.q_rank + (features + heads) * h) + 2 * pairs * heads * dim,
    )
