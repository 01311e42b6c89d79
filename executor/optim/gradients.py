"""The sums of weight gradients on one rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class ParamGradients:
    """Sums of weight gradients by global name, in the dtype they are accumulated in; each `add` is one microbatch.

    >>> grads = ParamGradients({"w": torch.zeros(2)}); grads.add("w", torch.ones(2)); grads.add("w", torch.ones(2))
    >>> grads["w"].tolist()
    [2.0, 2.0]
    """

    def __init__(self, params: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
        self.sums = {n: torch.zeros_like(p, dtype=dtype or p.dtype, requires_grad=False) for n, p in params.items()}
        self.passing: dict[tuple[str, int], Tensor] = {}  # of a microbatch, to be reduced before it is summed

    def __getitem__(self, name: str) -> Tensor:
        return self.sums[name]

    def add(self, name: str, grad: Tensor, mb: int = 0) -> None:
        (self.sums[name] if name in self.sums else self.passing[name, mb]).add_(grad.detach())

    def zero(self) -> None:
        for g in self.sums.values():
            g.zero_()
