"""Muon's update of one hidden matrix: torch.optim.Muon's single-tensor arithmetic, op for op."""

import math

import torch
from torch import Tensor

from ir.job.schema import JobOptimizer

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of A^0, A, A^2; kellerjordan.github.io/posts/muon
EPS = 1e-7


def orthogonalised(matrix: Tensor, steps: int) -> Tensor:
    """A matrix near the orthogonal one that is nearest to `matrix`, in bf16: its singular values are near 1.

    >>> x = orthogonalised(torch.diag(torch.tensor([4.0, 1.0, 0.5])), 5)
    >>> bool(((torch.linalg.svdvals(x.float()) - 1).abs() < 0.4).all())
    True
    """
    a, b, c = COEFFICIENTS
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.bfloat16().clone() if matrix.dtype == torch.bfloat16 else matrix.bfloat16()
    x = x.T if tall else x
    x.div_(x.norm().clamp(min=EPS))
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def lr_of(config: JobOptimizer, lr: float, rows: int, columns: int) -> float:
    """The rate of a matrix of this shape."""
    if config.adjust_lr == "original":
        return lr * math.sqrt(max(1, rows / columns))
    return lr * (0.2 * math.sqrt(max(rows, columns)))


def update_matrix(config: JobOptimizer, lr: float, decay: float, weight: Tensor, grad: Tensor, moment: Tensor) -> None:
    """One step of a matrix [rows, columns], or of a stack of them, each by itself."""
    if weight.dim() == 3:
        for each in zip(weight, grad, moment, strict=True):
            update_matrix(config, lr, decay, *each)
        return
    moment.lerp_(grad, 1 - config.momentum)
    ahead = grad.lerp(moment, config.momentum) if config.nesterov else moment
    step = orthogonalised(ahead, config.ns_steps)
    weight.mul_(1 - lr * decay)
    weight.add_(step, alpha=-lr_of(config, lr, *weight.shape))
