"""The rotary embedding of the reference modules, with its angles stretched as `ir.workload.config.rope` reads them."""

import math
from dataclasses import dataclass
from functools import lru_cache
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, maybe_get_fake_mode

from executor.modules.functions import apply, wide
from executor.parallel.inline import stretches
from ir.workload.config.spec import AttentionRopeScaling, AttentionRopeScalingKind


@dataclass(frozen=True, slots=True)
class TokenAngles:
    """Of `dim` features, two for each angle. ranks, index: a sequence is divided among so many, this is one of them."""

    dim: int
    theta: float
    scaling: AttentionRopeScaling | None = None
    ranks: int = 1
    index: int = 0


def rotary(length: int, angles: TokenAngles, x: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, (length, 1, dim / 2) each, in x's format and place.

    length: of this rank's part of a sequence. The tables are made once, for each fake mode by themselves: its tensors
    are of no use to another.
    """
    return _rotary(length, angles, x.dtype, str(x.device), maybe_get_fake_mode(x), get_ident())


# Each thread has its own: what one rank makes on its lane, another may not read without a mark.
@lru_cache(maxsize=64)
def _rotary(
    length: int, angles: TokenAngles, dtype: torch.dtype, device: str, mode: FakeTensorMode | None, thread: int
) -> tuple[Tensor, Tensor]:
    fp = wide(dtype)
    at = stretches(torch.arange(length * angles.ranks, dtype=fp, device=device), angles.ranks, angles.index)
    turns = torch.outer(at, rates(angles, fp, device))
    times = angles.scaling.times if angles.scaling else 1.0

    def table(values: Tensor) -> Tensor:
        return (values if times == 1.0 else values * times).to(dtype).unsqueeze(1)

    return table(turns.cos()), table(turns.sin())


def forget_tables() -> None:
    """Whoever asks next makes them anew: a layer that is measured by itself makes its own."""
    _rotary.cache_clear()


def rates(angles: TokenAngles, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """By how much each angle grows from one token to the next, in radians.

    >>> rates(TokenAngles(4, 100.0), torch.float64).tolist()
    [1.0, 0.1]
    >>> rates(TokenAngles(4, 100.0, AttentionRopeScaling(AttentionRopeScalingKind.LINEAR, 4.0)), torch.float64).tolist()
    [0.25, 0.025]
    """
    dim, s = angles.dim, angles.scaling
    own: Tensor = angles.theta ** -(torch.arange(0, dim, 2, dtype=dtype, device=device) / dim)
    if s is None:
        return own
    if s.kind is AttentionRopeScalingKind.LINEAR:
        return own / s.factor
    if s.kind is AttentionRopeScalingKind.LLAMA3:
        # The share of the angle that stays is linear in its turns over `original`.
        stays = ((s.original * own / (2 * math.pi) - s.slow) / (s.fast - s.slow)).clamp(0.0, 1.0)
    else:
        stays = 1.0 - _ramp(angles, s, torch.arange(dim // 2, dtype=dtype, device=device))
    return own * stays + own / s.factor * (1.0 - stays)


def _ramp(angles: TokenAngles, s: AttentionRopeScaling, at: Tensor) -> Tensor:
    """YaRN's, from 0 to 1 over the angles that make from `fast` to `slow` turns over `original`."""
    low, high = (
        angles.dim * math.log(s.original / (turns * 2 * math.pi)) / (2 * math.log(angles.theta))
        for turns in (s.fast, s.slow)
    )
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, angles.dim - 1)
    return ((at - low) / (high - low or 0.001)).clamp(0.0, 1.0)


class _Rotate(torch.autograd.Function):
    """Features of (batch, length, heads, dim) turned in pairs by the angles of cos and sin; back by their negatives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, pairs: bool) -> Tensor:
        ctx.cos, ctx.sin, ctx.pairs = cos, sin, pairs  # they stay anyway
        return _turned(x, cos, sin, 1, pairs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return _turned(dy, ctx.cos, ctx.sin, -1, ctx.pairs), None, None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, way: int, pairs: bool) -> Tensor:
    out = torch.empty_like(x)
    (a, b), (first, second) = _both(x, pairs), _both(out, pairs)
    torch.mul(a, cos, out=first).sub_(b * sin, alpha=way)
    torch.mul(b, cos, out=second).add_(a * sin, alpha=way)
    return out


def _both(x: Tensor, pairs: bool) -> tuple[Tensor, Tensor]:
    """The two features of every angle: neighbours, or one of each half."""
    a, b = (x[..., 0::2], x[..., 1::2]) if pairs else x.chunk(2, -1)
    return a, b


def rotate(x: Tensor, cos: Tensor, sin: Tensor, pairs: bool = False) -> Tensor:
    """Apply the rotary embedding to the first features of (batch, length, heads, dim), two for each angle."""
    with torch._C.DisableTorchFunction():
        width = 2 * cos.shape[-1]
        turned = apply(_Rotate, x[..., :width], cos, sin, pairs)
        return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), dim=-1)
