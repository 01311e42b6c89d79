"""The residual stream: norms on it, what they leave behind, residual additions and dropout."""

from ir.core.ops import Pass
from ir.core.work import Kernel, Work
from ir.workload.config.spec import LayerNormPlace, NormLayerKind
from ir.workload.part import SavedBuffer
from ir.workload.parts import kernels as k
from ir.workload.setting import PartSetting


def normed(s: PartSetting, name: str, elements: int) -> SavedBuffer:
    """A norm's output, kept as the input of the linears behind it; "norm" makes it again from the norm's input."""
    again = (k.norm_forward(s, f"{name}.again", elements), *k.cast(s, name, elements))
    return SavedBuffer(name, s.cached(elements), Pass.W, ("norm", "operators"), again)


def gathered_input(s: PartSetting, features: int) -> tuple[SavedBuffer, ...]:
    """What sequence parallelism gathered for a norm's linears, beside this device's share of it, where it is kept."""
    more = (s.tokens - s.stream) * features if s.style.keep_gathered else 0
    return (SavedBuffer("gathered", s.cached(more), Pass.W, ("norm", "operators")),) if more else ()


def stats(s: PartSetting, name: str = "norm_stats", norms: int = 1) -> SavedBuffer:
    """Norms' fp32 statistics per token: mean and reciprocal deviation, or the latter alone."""
    return SavedBuffer(name, norms * s.stream * (8 if s.config.norm is NormLayerKind.LAYER else 4), Pass.I)


def norm_before(s: PartSetting, label: str, *, own: bool = True) -> Work:
    """The norm that a branch's linears read, and its cast. own: False where they read another branch's."""
    n = s.stream * s.config.hidden
    first = own and s.config.form.norms is not LayerNormPlace.BEHIND
    return (*((k.norm_forward(s, label, n),) if first else ()), *(k.cast(s, "normed", n) if own else ()))


def norm_behind(s: PartSetting, label: str) -> Work:
    """The norm of what a branch adds to the stream, where it has one."""
    n = s.stream * s.config.hidden
    return (k.norm_forward(s, f"{label}_behind", n),) if s.config.form.norms is not LayerNormPlace.BEFORE else ()


def behind_backward(s: PartSetting, label: str) -> Work:
    """Back through that norm."""
    n, there = s.stream * s.config.hidden, s.config.form.norms is not LayerNormPlace.BEFORE
    return (k.norm_backward(s, f"{label}_behind_backward", n),) if there else ()


def before_backward(s: PartSetting, label: str, *, own: bool = True) -> Work:
    """Back through the norm that a branch's linears read, and into the stream's gradient."""
    n = s.stream * s.config.hidden
    first = own and s.config.form.norms is not LayerNormPlace.BEHIND
    back = (k.norm_backward(s, f"{label}_backward", n),) if first else ()
    return (*back, k.add(s, "residual_backward", n))


def branch_saved(s: PartSetting, features: int, *, own: bool = True) -> tuple[SavedBuffer, ...]:
    """What a branch keeps at its ends: its linears' input, what sequence parallelism gathered of it (`features` per
    token), the norms' statistics; of a norm behind them, what it read.

    Without a norm before them linears read the stream, which the chunk keeps; in fp8 they keep a copy of their own.
    """
    n, place = s.stream * s.config.hidden, s.config.form.norms
    behind = place is not LayerNormPlace.BEFORE
    if place is LayerNormPlace.BEHIND:
        read = (SavedBuffer("input_fp8", s.cached(n)),) if s.fp8 else ()
    else:
        read = (normed(s, "normed", n),) if own else ()
    norms = int(own and place is not LayerNormPlace.BEHIND) + behind
    return (
        *read,
        *gathered_input(s, features),
        *((stats(s, norms=norms),) if norms else ()),
        *((SavedBuffer("branch", n * s.wide, Pass.I),) if behind else ()),
    )


def mask(s: PartSetting) -> tuple[SavedBuffer, ...]:
    """The dropout mask on the way back to the residual stream, one byte per element."""
    if not s.config.hidden_dropout:
        return ()
    return (SavedBuffer("dropout_mask", s.stream * s.config.hidden, Pass.I),)


def residual(s: PartSetting) -> Kernel:
    """Dropout (its mask written on the way) and the residual addition, in one kernel."""
    n = s.stream * s.config.hidden
    return k.memory(s, "residual", 3 * n * s.wide + (n if s.config.hidden_dropout else 0))


def residual_grads(s: PartSetting, inner: int) -> int:
    """Bytes of gradients at their most between a residual branch's two ends. inner: of those inside of it.

    They stand beside the gradient that came, as dropout made it or sequence parallelism gathered it, and its fp8 copy.
    At the near end: the normed input's gradient, the input's, and its sum with the gradient that goes round.
    """
    whole, n = (t * s.config.hidden * s.wide for t in (s.tokens, s.stream))
    came = whole if s.sp else n if s.config.hidden_dropout else 0
    copy = s.cached(s.tokens * s.config.hidden) if s.fp8 else 0
    return came + max(inner + copy, whole + 2 * n)


def residual_backward(s: PartSetting) -> Work:
    """Dropout's backward; the addition itself passes gradients through."""
    n = s.stream * s.config.hidden
    return (k.memory(s, "dropout_backward", n * (2 * s.wide + 1)),) if s.config.hidden_dropout else ()
