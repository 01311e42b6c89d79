"""Muon's update of one hidden matrix: torch.optim.Muon's single-tensor arithmetic, op for op."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from executor.parallel.inline import RankAxis
from executor.parallel.shares import ShardCut
from ir.job.schema import JobOptimizer

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of A^0, A, A^2; kellerjordan.github.io/posts/muon
EPS = 1e-7


@dataclass(frozen=True)
class MatrixShardGroup:
    """How a matrix is shared out: this rank of `axis` has `own` of it, along its rows or its columns."""

    axis: RankAxis
    own: ShardCut

    def whole(self, part: Tensor) -> Tensor:
        """The matrix, of everyone's part."""
        dim, cuts = self.own.dim, [replace(self.own, index=i) for i in range(self.axis.size)]
        shape = list(part.shape)
        shape[dim] = sum(map(len, cuts))
        whole = part.new_empty(shape)
        for cut, each in zip(cuts, self.axis.gather(part), strict=True):
            whole.index_copy_(dim, cut.rows().to(part.device), each)
        return whole

    def part(self, whole: Tensor) -> Tensor:
        """This rank's."""
        return whole.index_select(self.own.dim, self.own.rows().to(whole.device))


def orthogonalised(matrix: Tensor, steps: int, axis: RankAxis | None = None) -> Tensor:
    """A matrix near the orthogonal one that is nearest to `matrix`, in bf16: its singular values are near 1.

    axis: whose ranks have other columns of it each.

    >>> x = orthogonalised(torch.diag(torch.tensor([4.0, 1.0, 0.5])), 5)
    >>> bool(((torch.linalg.svdvals(x.float()) - 1).abs() < 0.4).all())
    True
    """
    a, b, c = COEFFICIENTS
    tall = axis is None and matrix.size(0) > matrix.size(1)
    x = matrix.bfloat16().clone() if matrix.dtype == torch.bfloat16 else matrix.bfloat16()
    x = x.T if tall else x
    norm = x.norm() if axis is None else axis.sum(x.float().square().sum()).sqrt().to(x.dtype)
    x.div_(norm.clamp(min=EPS))
    for _ in range(steps):
        gram = x @ x.T if axis is None else axis.sum(x @ x.T)
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def lr_of(config: JobOptimizer, lr: float, rows: int, columns: int) -> float:
    """The rate of a matrix of this shape."""
    if config.adjust_lr == "original":
        return lr * math.sqrt(max(1, rows / columns))
    return lr * (0.2 * math.sqrt(max(rows, columns)))


def update_matrix(
    config: JobOptimizer,
    lr: float,
    decay: float,
    weight: Tensor,
    grad: Tensor,
    moment: Tensor,
    cut: MatrixShardGroup | None = None,
) -> None:
    """One step of a matrix [rows, columns], or of a stack of them, each by itself. cut: of one that ranks share; then
    `tp_mode` says whether that is told apart. Its rate is that of what is orthogonalised."""
    if weight.dim() == 3:
        for each in zip(weight, grad, moment, strict=True):
            update_matrix(config, lr, decay, *each, cut)
        return
    moment.lerp_(grad, 1 - config.momentum)
    ahead = grad.lerp(moment, config.momentum) if config.nesterov else moment
    step, (rows, columns) = _step(config, ahead, cut)
    weight.mul_(1 - lr * decay)
    weight.add_(step, alpha=-lr_of(config, lr, rows, columns))


def _step(config: JobOptimizer, ahead: Tensor, cut: MatrixShardGroup | None) -> tuple[Tensor, torch.Size]:
    """This rank's part of an orthogonal matrix, and the shape of what it is a part of."""
    if cut is None or config.tp_mode == "blockwise":
        return orthogonalised(ahead, config.ns_steps), ahead.shape
    if config.tp_mode == "duplicated":
        whole = cut.whole(ahead)
        return cut.part(orthogonalised(whole, config.ns_steps)), whole.shape
    turned = cut.own.dim == 0  # A is summed over what is cut
    step = orthogonalised(ahead.T if turned else ahead, config.ns_steps, cut.axis)
    shape = [*ahead.shape]
    shape[cut.own.dim] *= cut.axis.size
    return step.T if turned else step, torch.Size(shape)
