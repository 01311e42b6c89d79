"""The residual stream: norms on it, what they leave behind, residual additions and dropout."""

from __future__ import annotations

from ir.model import kernels as k
from ir.model.part import Saved
from ir.model.setting import Setting
from ir.model.spec import Norm
from ir.ops import Pass
from ir.work import Kernel, Work


def normed(s: Setting, name: str, elements: int) -> Saved:
    """A norm's output, kept as the input of the linears behind it; "norm" makes it again from the norm's input."""
    again = (k.norm_forward(s, f"{name}.again", elements), *k.cast(s, name, elements))
    return Saved(name, s.cached(elements), Pass.W, "norm", again)


def stats(s: Setting, name: str = "norm_stats", norms: int = 1) -> Saved:
    """Norms' fp32 statistics per token: mean and reciprocal deviation, or the latter alone."""
    return Saved(name, norms * s.stream * (8 if s.config.norm is Norm.LAYER else 4), Pass.I)


def mask(s: Setting) -> tuple[Saved, ...]:
    """The dropout mask on the way back to the residual stream, one byte per element."""
    if not s.config.hidden_dropout:
        return ()
    return (Saved("dropout_mask", s.stream * s.config.hidden, Pass.I),)


def residual(s: Setting) -> Kernel:
    """Dropout (its mask written on the way) and the residual addition, in one kernel."""
    n = s.stream * s.config.hidden
    return k.memory(s, "residual", 3 * n * s.wide + (n if s.config.hidden_dropout else 0))


def residual_backward(s: Setting) -> Work:
    """Dropout's backward; the addition itself passes gradients through."""
    n = s.stream * s.config.hidden
    return (k.memory(s, "dropout_backward", n * (2 * s.wide + 1)),) if s.config.hidden_dropout else ()
