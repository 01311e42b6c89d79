"""The part "mixer" where it is Mamba-1's selective scan (arXiv:2312.00752), as state-spaces/mamba's fused function is.

A norm, a projection in to values and gate, a convolution; of its output a key, a query and step sizes for each token; a
scan over the tokens, feature by feature, gated as it is written; a projection out. Backward convolves and makes step
sizes again. The scan is priced by what it reads and writes, once: its exponentials are not counted, and nothing was
measured. Tensor parallelism cuts features, and adds up what each makes of keys, queries and step sizes.
"""

from dataclasses import replace

from ir.core.ops import Pass
from ir.core.work import SCAN, SCAN_BACK, MessageKind
from ir.workload.config.recurrence import LayerMixer
from ir.workload.part import PartCollective, PartWork, SavedBuffer
from ir.workload.parts import kernels as k
from ir.workload.parts.kernels import LinearKernel
from ir.workload.parts.region import all_reduce, enter, inline
from ir.workload.parts.residual import branch
from ir.workload.setting import PartSetting


def selective(s: PartSetting, m: LayerMixer) -> PartWork:
    """Work of the part. The scan reads values, step sizes and gates, and writes what it gives with and without gate;
    back it reads these and two gradients' worth, and writes three, and the gated output again.
    """
    tp, h = s.layout.tp, s.config.hidden
    n, made = s.tokens * m.inner // tp, s.tokens * m.selected
    one, few = n * s.wide, made * s.wide
    into = LinearKernel("in_proj", s.tokens, m.projected // tp, h)
    select = LinearKernel("x_proj", s.tokens, m.selected, m.inner // tp)
    steps = LinearKernel("dt_proj", s.tokens, m.inner // tp, m.steps)
    out = LinearKernel("out_proj", s.tokens, h, m.inner // tp)
    inside = PartWork(
        forward=(
            into.forward(s),
            k.memory(s, "conv", 2 * one),
            *k.forward(s, select, steps),
            k.memory(s, f"{SCAN}selective", 5 * one + few),
            *k.cast(s, "context", n),
            out.forward(s),
        ),
        input_grad=(
            *k.input_grad(s, out),
            k.memory(s, "conv", 2 * one),
            replace(steps.forward(s), label="dt_proj.again"),
            k.memory(s, f"{SCAN_BACK}selective", 9 * one + 2 * few),
            *k.input_grad(s, steps, select),
            k.memory(s, "conv", 4 * one),
            *k.input_grad(s, into),
        ),
        weight_grad=k.weight_grad(s, into, select, steps, out, biased=m.proj_bias),
        out_bytes=s.stream * h * s.wide,
        saved=(
            SavedBuffer("projected", 2 * one, Pass.I),
            SavedBuffer("selected", few),
            SavedBuffer("recurred", one, Pass.I),
        ),
        stash_bytes=k.stash(s, into, select, steps, out) + one + s.cached(n),  # convolved, and gated again
        inline=(*enter(s, h), *_summed(s, few), *_across(s, one)),
        forward_workspace=max(s.tokens * h * s.wide, 3 * one),
        model_flops=2 * s.shape.tokens * m.weights(h) + 7 * s.shape.tokens * m.inner * m.state,
    )
    return branch(s, "input_norm", inside, 6 * one, reads=h)


def _summed(s: PartSetting, size: int) -> tuple[PartCollective, ...]:
    """Keys, queries and what step sizes come through, of all features; their gradients likewise."""
    return tuple(all_reduce(when, size) for when in (Pass.F, Pass.I)) if s.layout.tp > 1 else ()


def _across(s: PartSetting, size: int) -> tuple[PartCollective, ...]:
    """Values and gates to a share of the features, over the context-parallel group, and what the scan gives back."""
    if s.layout.cp == 1:
        return ()
    return tuple(inline(when, MessageKind.ALL_TO_ALL, n * size, "cp") for when in (Pass.F, Pass.I) for n in (2, 1))
