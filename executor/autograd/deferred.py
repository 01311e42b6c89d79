"""Weight gradients that wait for pass W: of one function of weights, and of a linear, as most are."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from executor.modules.remade import RemadeBufferView, tensor_of


@dataclass(slots=True)
class DeferredPass:
    """One seam's unfinished weight gradient: where to enter its graph, which weights, and (after I) with what."""

    edges: tuple[GradientEdge, ...]
    leaves: tuple[Any, ...]  # tensors, or edges where those are not kept
    weights: tuple[Tensor, ...]
    derived: bool
    grads: tuple[Tensor | None, ...] | None = None

    def run(self) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(self.edges, self.weights, self.grads, retain_graph=self.derived, allow_unused=True)


@dataclass(slots=True)
class DeferredLinearPass:
    """The same of a linear: its input, and where torch's own graph has its output's gradient, until I has asked.
    flipped: its weight is stored (into, out).
    """

    x: Tensor | RemadeBufferView
    version: int
    weights: tuple[Tensor, ...]
    edge: GradientEdge | None
    flipped: bool = False
    grads: Tensor | None = None

    def run(self, into: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """into: where to make the weight's gradient; of a linear without bias."""
        assert self.grads is not None
        x = tensor_of(self.x)
        if x is self.x and x._version != self.version:
            raise RuntimeError("the input of a linear was written to in place, and its weight's gradient reads it")
        dys = self.grads.reshape(-1, self.grads.shape[-1])
        x = x.view(-1, x.shape[-1])
        dw = torch.mm(x.t(), dys, out=into) if self.flipped else torch.mm(dys.t(), x, out=into)
        return (dw,) if len(self.weights) == 1 else (dw, dys.sum(0))
