"""The part "cross": a decoder's attention to what an encoder beside it gives."""

from ir.core.ops import Pass
from ir.workload.part import PartWork, SavedBuffer
from ir.workload.parts import kernels as k
from ir.workload.parts.attention.core import AttentionCore
from ir.workload.parts.kernels import LinearKernel
from ir.workload.parts.region import enter
from ir.workload.parts.residual import branch
from ir.workload.setting import PartSetting


def cross(s: PartSetting) -> PartWork:
    """Queries of the decoder's tokens, keys and values of the encoder's, whose output crosses into the tensor-parallel
    region by itself; gradients go to both, the encoder's onto those of the layers behind.
    """
    c, far = s.config, s.encoder
    core = AttentionCore.of(s, far.shape.seq_len)
    h = c.hidden
    query = LinearKernel("q_proj", s.tokens, core.q_features, h)
    pair = LinearKernel("kv_proj", far.tokens, core.kv_features, h)
    out = LinearKernel("o_proj", s.tokens, h, core.out_features)
    keys = far.tokens * core.kv_features * s.wide
    inside = PartWork(
        forward=(
            query.forward(s),
            *k.cast(far, "encoded", far.stream * h),
            pair.forward(s),
            *core.forward(s),
            *k.cast(s, "context", s.tokens * core.out_features),
            out.forward(s),
        ),
        input_grad=(
            *k.input_grad(s, out),
            *core.backward(s),
            *k.input_grad(s, query, pair),
            k.add(s, "sum_encoded", far.stream * h),
        ),
        weight_grad=k.weight_grad(s, out, query, pair),
        out_bytes=s.stream * h * s.wide,
        saved=(
            SavedBuffer("q", s.tokens * core.q_features * s.wide, Pass.I),
            SavedBuffer("kv", keys, Pass.I),
            *((SavedBuffer("encoded_fp8", s.cached(far.stream * h)),) if s.fp8 else ()),
            SavedBuffer("context", s.cached(s.tokens * core.out_features)),
            *core.saved(s),
        ),
        stash_bytes=k.stash(s, out, query, pair),
        inline=(*enter(s, h), *enter(far, h)),
        forward_workspace=core.workspace(s, Pass.F),
        input_grad_workspace=keys,
        model_flops=2 * h * c.head_dim * (2 * s.shape.tokens * c.heads + 2 * far.shape.tokens * c.kv_heads)
        + core.model_flops(s),
    )
    return branch(s, "cross_norm", inside, core.gradients(s), reads=h)
