"""The residual stream: norms on it, what they leave behind, residual additions and dropout."""

from __future__ import annotations

from ir.core.ops import Pass
from ir.core.work import Kernel, Work
from ir.workload.config.spec import NormLayerKind
from ir.workload.part import SavedBuffer
from ir.workload.parts import kernels as k
from ir.workload.setting import PartSetting


def normed(s: PartSetting, name: str, elements: int) -> SavedBuffer:
    """A norm's output, kept as the input of the linears behind it; "norm" makes it again from the norm's input."""
    again = (k.norm_forward(s, f"{name}.again", elements), *k.cast(s, name, elements))
    return SavedBuffer(name, s.cached(elements), Pass.W, "norm", again)


def gathered_input(s: PartSetting, features: int) -> tuple[SavedBuffer, ...]:
    """What sequence parallelism gathered for a norm's linears, beside this device's share of it, where it is kept."""
    more = (s.tokens - s.stream) * features if s.style.keep_gathered else 0
    return (SavedBuffer("gathered", s.cached(more), Pass.W, "norm"),) if more else ()


def stats(s: PartSetting, name: str = "norm_stats", norms: int = 1) -> SavedBuffer:
    """Norms' fp32 statistics per token: mean and reciprocal deviation, or the latter alone."""
    return SavedBuffer(name, norms * s.stream * (8 if s.config.norm is NormLayerKind.LAYER else 4), Pass.I)


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
