"""What every runnable model offers: its chunks, its parameters' global names, the units of any stretch of chunks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ir.work import DType

TORCH = {
    DType.FP64: torch.float64,
    DType.FP32: torch.float32,
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
}


@dataclass(frozen=True)
class Built:
    """Some chunks, built. units: name → module, in order. params: global name → parameter.

    extras: what a unit's forward takes beside the activations, out of "ids", "labels", "scale".
    """

    units: dict[str, nn.Module]
    params: dict[str, nn.Parameter]
    extras: Mapping[str, tuple[str, ...]]


class Model(Protocol):
    """A model that any rank can build any part of, with the same values."""

    @property
    def chunks(self) -> tuple[str, ...]:
        """All chunk names, in order."""
        ...

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Global parameter names in canonical order, and shapes."""
        ...

    def build(self, chunks: Sequence[str]) -> Built:
        """Build some chunks."""
        ...


def initial(name: str, shape: Sequence[int], seed: int, std: float, dtype: torch.dtype) -> Tensor:
    """A parameter's first value: a function of its global name and the seed, whoever builds it, in whatever order.

    Drawn in float64, then rounded, so that all precisions start from the same numbers. Names ending in a norm's weight
    give ones, biases zeros.

    >>> initial("model.norm.weight", [2], 0, 0.02, torch.float32).tolist()
    [1.0, 1.0]
    """
    if name.endswith("bias"):
        return torch.zeros(*shape, dtype=dtype)
    if name.endswith("norm.weight"):
        return torch.ones(*shape, dtype=dtype)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.empty(*shape, dtype=torch.float64).normal_(0.0, std, generator=generator).to(dtype)


class TokenLoss(nn.Module):
    """The last chunk and the loss behind it: Σ token losses · scale, scale = 1 / the step's valid tokens. Sums only.

    >>> loss = TokenLoss(nn.Identity())(torch.zeros(1, 2, 4), torch.tensor([[1, -100]]), 0.5)
    >>> round(loss.item(), 4)  # half of ln 4: the second token is masked
    0.6931
    """

    IGNORE = -100

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, *rest: object) -> Tensor:
        """The extras of the chunk come before labels and scale."""
        *extras, labels, scale = rest
        assert isinstance(labels, Tensor) and isinstance(scale, float)
        logits = self.inner(x, *extras).flatten(0, 1)
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        loss = F.cross_entropy(logits, labels.flatten(), ignore_index=self.IGNORE, reduction="sum")
        return loss * scale
