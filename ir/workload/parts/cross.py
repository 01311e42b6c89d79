"""The part "cross": a decoder's attention to what an encoder beside it gives."""

from ir.core.ops import Pass
from ir.workload.part import PartWork, SavedBuffer
from ir.workload.parts import kernels as k
from ir.workload.parts.attention_core import AttentionCore
from ir.workload.parts.kernels import LinearKernel, beyond
from ir.workload.parts.region import enter, leave
from ir.workload.parts.residual import (
    before_backward,
    branch_saved,
    mask,
    norm_before,
    residual,
    residual_backward,
    residual_grads,
)
from ir.workload.setting import PartSetting


def cross(s: PartSetting) -> PartWork:
    """Queries of the decoder's tokens, keys and values of the encoder's, whose output crosses into the tensor-parallel
    region by itself; gradients go to both, the encoder's onto those of the layers behind.
    """
    c, far = s.config, s.encoder
    core = AttentionCore.of(s, far.shape.seq_len)
    h, n = c.hidden, s.stream * c.hidden
    query = LinearKernel("q_proj", s.tokens, core.q_features, h)
    pair = LinearKernel("kv_proj", far.tokens, core.kv_features, h)
    out = LinearKernel("o_proj", s.tokens, h, core.out_features)
    stash = k.stash(s, out, query, pair)
    return PartWork(
        forward=(
            *norm_before(s, "cross_norm"),
            query.forward(s),
            *k.cast(far, "encoded", far.stream * h),
            pair.forward(s),
            *core.forward(s),
            *k.cast(s, "context", s.tokens * core.out_features),
            out.forward(s),
            residual(s),
        ),
        input_grad=(
            *residual_backward(s),
            *k.input_grad(s, out),
            *core.backward(s),
            *k.input_grad(s, query, pair),
            k.add(s, "sum_encoded", far.stream * h),
            *before_backward(s, "cross_norm"),
        ),
        weight_grad=k.weight_grad(s, out, query, pair),
        out_bytes=n * s.wide,
        saved=(
            *branch_saved(s, h),
            SavedBuffer("q", s.tokens * core.q_features * s.wide, Pass.I),
            SavedBuffer("kv", far.tokens * core.kv_features * s.wide, Pass.I),
            *((SavedBuffer("encoded_fp8", s.cached(far.stream * h)),) if s.fp8 else ()),
            SavedBuffer("context", s.cached(s.tokens * core.out_features)),
            *core.saved(s),
            *mask(s),
        ),
        stash_bytes=stash,
        inline=(*enter(s, h), *enter(far, h), *leave(s, h)),
        forward_workspace=core.workspace(s, Pass.F),
        input_grad_workspace=beyond(
            residual_grads(s, core.gradients(s)) + far.tokens * core.kv_features * s.wide, n * s.wide, stash
        ),
        model_flops=2 * h * c.head_dim * (2 * s.shape.tokens * c.heads + 2 * far.shape.tokens * c.kv_heads)
        + core.model_flops(s),
    )
