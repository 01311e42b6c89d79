"""The part "mixer" where it is a short convolution between two gates (LFM2's).

A norm, a projection in to two gates and values; values times the first gate, a convolution over a few tokens, times the
second; a projection out, the residual. Each gate is a kernel, and so is the convolution (causal-conv1d's, as
transformers' class calls it); nothing was measured. Features are independent of each other: tensor parallelism cuts
them. Under context parallelism tokens of whole sequences come to a share of them for the convolution and go back, as
other mixers' do.
"""

from ir.core.ops import Pass
from ir.core.work import MessageKind
from ir.workload.config.recurrence import LayerMixer
from ir.workload.part import PartCollective, PartWork, SavedBuffer
from ir.workload.parts import kernels as k
from ir.workload.parts.kernels import LinearKernel
from ir.workload.parts.region import enter, inline
from ir.workload.parts.residual import branch
from ir.workload.setting import PartSetting


def short_conv(s: PartSetting, m: LayerMixer) -> PartWork:
    """Work of the part. Backward of a gate reads its gradient and both factors, and writes theirs; of the convolution
    it reads its input and its gradient.
    """
    h, n = s.config.hidden, s.tokens * m.inner // s.layout.tp
    into = LinearKernel("in_proj", s.tokens, m.projected // s.layout.tp, h)
    out = LinearKernel("out_proj", s.tokens, h, m.inner // s.layout.tp)
    one = n * s.wide
    inside = PartWork(
        forward=(
            into.forward(s),
            k.memory(s, "conv_gate", 3 * one),
            k.memory(s, "conv", 2 * one),
            k.memory(s, "conv_gate", 3 * one),
            *k.cast(s, "context", n),
            out.forward(s),
        ),
        input_grad=(
            *k.input_grad(s, out),
            k.memory(s, "conv_gate", 5 * one),
            k.memory(s, "conv", 3 * one),
            k.memory(s, "conv_gate", 5 * one),
            *k.input_grad(s, into),
        ),
        weight_grad=k.weight_grad(s, into, out, biased=m.proj_bias),
        out_bytes=s.stream * h * s.wide,
        saved=(
            SavedBuffer("projected", 3 * one, Pass.I),
            SavedBuffer("gated", one, Pass.I),
            SavedBuffer("convolved", one, Pass.I),
            SavedBuffer("context", s.cached(n)),
        ),
        stash_bytes=k.stash(s, into, out),
        inline=(*enter(s, h), *_across(s, one)),
        forward_workspace=s.tokens * h * s.wide,
        model_flops=2 * s.shape.tokens * m.weights(h),
    )
    return branch(s, "input_norm", inside, 5 * one, reads=h)


def _across(s: PartSetting, size: int) -> tuple[PartCollective, ...]:
    """What the convolution reads and gives, over the context-parallel group; its gradients the other way."""
    if s.layout.cp == 1:
        return ()
    return tuple(inline(when, MessageKind.ALL_TO_ALL, size, "cp") for when in (Pass.F, Pass.I) for _ in range(2))
