"""The part "mixer": norm, projections in, convolution, recurrence, gated norm, projection out, residual.

Tensor parallelism cuts heads and their groups. Under context parallelism tokens of whole sequences come by an
all-to-all to a share of the heads, and go back by another, as Megatron-LM's mixers do.
"""

from ir.core.ops import Pass
from ir.core.work import Kernel, MessageKind
from ir.workload.config.recurrence import LayerMixer, LayerMixerKind
from ir.workload.part import PartCollective, PartWork, SavedBuffer
from ir.workload.parts import kernels as k
from ir.workload.parts.kernels import LinearKernel
from ir.workload.parts.mixer_core import LayerRecurrence, model_flops
from ir.workload.parts.region import enter, inline
from ir.workload.parts.residual import branch
from ir.workload.parts.selective import selective
from ir.workload.parts.short_conv import short_conv
from ir.workload.setting import PartSetting


def mixer(s: PartSetting) -> PartWork:
    """Work of the part, for either kind of recurrence, or a short convolution."""
    m, core, h = _mixer(s), LayerRecurrence.of(s), s.config.hidden
    if m.kind is LayerMixerKind.CONV:
        return short_conv(s, m)
    if m.kind is LayerMixerKind.SELECTIVE:
        return selective(s, m)
    ins, out = _linears(s, m)
    inner, widest = core.rows * core.inner, m.projected // s.layout.tp
    inside = PartWork(
        forward=(
            *k.forward(s, *ins),
            _convolved(s, core, 2),
            *core.forward(s),
            _gated(s, inner, 3),
            *((k.norm_forward(s, "mixer_norm", inner),) if m.normed else ()),
            *k.cast(s, "context", inner),
            out.forward(s),
        ),
        input_grad=(
            *k.input_grad(s, out),
            *((k.norm_backward(s, "mixer_norm_backward", inner),) if m.normed else ()),
            _gated(s, inner, 5),
            *(() if core.delta else (_convolved(s, core, 2),)),  # made again; the delta rule keeps what it gives
            *core.backward(s),
            _convolved(s, core, 4),
            *k.input_grad(s, *ins),
        ),
        weight_grad=k.weight_grad(s, *ins, out),
        out_bytes=s.stream * h * s.wide,
        saved=(*_saved(s, core, widest), *core.saved(s)),
        stash_bytes=k.stash(s, *ins, out),
        inline=(*enter(s, h), *(enter(s, 2 * m.rank) if m.rank else ()), *_across(s, widest, m)),
        forward_workspace=max(s.tokens * h * s.wide, core.rows * core.channels * s.wide + core.workspace(s)),
        model_flops=2 * s.shape.tokens * m.weights(h) + model_flops(s),
    )
    grads = (s.tokens * widest + core.rows * core.channels + inner) * s.wide + core.workspace(s)
    own = not m.beside
    return branch(s, "input_norm", inside, grads, reads=h if own else 0, own=own, linears=len(ins))


def _linears(s: PartSetting, m: LayerMixer) -> tuple[tuple[LinearKernel, ...], LinearKernel]:
    """The projections in, and the one out. The delta rule's rates have one of their own, and so have Kimi's gates: down
    to a few features on the residual stream's tokens, uncut, and up again.
    """
    tp, h = s.layout.tp, s.config.hidden
    rates = m.rates * m.heads if m.kind.is_delta else 0
    gates = m.gates if m.rank else 0
    main = LinearKernel("in_proj", s.tokens, (m.projected - rates - gates) // tp, h)
    more = (LinearKernel("rates_proj", s.tokens, rates // tp, h),) if rates else ()
    down = (LinearKernel("gates_down", s.stream, 2 * m.rank, h),) if gates else ()
    up = tuple(LinearKernel(f"{x}_up", s.tokens, m.inner // tp, m.rank) for x in ("decays", "gate")) if gates else ()
    return (main, *more, *down, *up), LinearKernel("out_proj", s.tokens, h, m.inner // tp)


def _saved(s: PartSetting, core: LayerRecurrence, widest: int) -> tuple[SavedBuffer, ...]:
    """The projections' output, whole sequences of it; the recurrence's, gated (the norm's input) and, but for the delta
    rule's kernels, which gate inside of the norm, not; the norm's, as the input of the projection out.
    """
    n, normed = core.rows * core.inner, _mixer(s).normed
    gated = (SavedBuffer("gated", n * s.wide, Pass.I),) if normed and not core.delta else ()
    numbers = 4 * core.rows * (core.heads if core.delta else core.groups)
    stats = (SavedBuffer("mixer_norm_stats", numbers, Pass.I),) if normed else ()
    return (
        SavedBuffer("projected", s.tokens * widest * s.wide, Pass.I),
        *_narrow(s),
        SavedBuffer("recurred", n * s.wide, Pass.I),
        *gated,
        *stats,
        SavedBuffer("context", s.cached(n)),
    )


def _narrow(s: PartSetting) -> tuple[SavedBuffer, ...]:
    """What Kimi's gates come through, as the input of their way up."""
    return (SavedBuffer("gates", s.stream * 2 * rank * s.wide),) if (rank := _mixer(s).rank) else ()


def _across(s: PartSetting, features: int, m: LayerMixer) -> tuple[PartCollective, ...]:
    """All-to-alls over the context-parallel group, before and behind the recurrence; backward mirrors them."""
    if s.layout.cp == 1:
        return ()
    sizes = (s.tokens * features * s.wide, s.tokens * m.inner // s.layout.tp * s.wide)
    return tuple(inline(when, MessageKind.ALL_TO_ALL, size, "cp") for when in (Pass.F, Pass.I) for size in sizes)


def _convolved(s: PartSetting, core: LayerRecurrence, tensors: int) -> Kernel:
    """The convolution over a few tokens and its activation, or back through them."""
    return k.memory(s, "conv", tensors * core.rows * core.channels * s.wide)


def _gated(s: PartSetting, elements: int, tensors: int) -> Kernel:
    """The output times its gate's activation, or back."""
    return k.memory(s, "mixer_gate", tensors * elements * s.wide)


def _mixer(s: PartSetting) -> LayerMixer:
    mixer = s.config.mixer
    assert mixer is not None, f"{s.config.source} has no recurrence"
    return mixer
