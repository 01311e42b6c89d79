"""AdamW in a kernel for many tensors, on a GPU: what takes the host a dozen launches each otherwise, and memory ten
passes."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ir.job.schema import JobOptimizer


def fused_adamw(
    config: JobOptimizer, lr: float, step: int, scale: float | Tensor, updates: Iterable[tuple[float, Sequence[Tensor]]]
) -> None:
    """torch's own update number `step` (from 1). Of each: its weight decay, and (parameter, the weight that is updated,
    gradient, first, second moment), all in one layout; of gradient · scale. Such a gradient is left scaled, unless it
    is copied into the weight's format. A parameter that is not the weight itself is left to the caller.

    >>> weight, grad, first, second = torch.ones(2), torch.ones(2), torch.zeros(2), torch.zeros(2)
    >>> fused_adamw(JobOptimizer(), 0.5, 1, 1.0, [(0.0, (weight, weight, grad, first, second))])
    >>> weight.round(decimals=4).tolist()
    [0.5, 0.5]
    """
    alike: dict[tuple[float, torch.dtype, torch.dtype], list[Sequence[Tensor]]] = {}
    for decay, tensors in updates:
        alike.setdefault((decay, tensors[1].dtype, tensors[2].dtype), []).append(tensors)
    for (decay, wide, narrow), found in alike.items():
        device, divisor = found[0][1].device, None
        count = torch.full((), step, dtype=torch.float32, device=device)
        if isinstance(scale, Tensor) or scale != 1.0:
            divisor = torch.as_tensor(scale, dtype=torch.float32, device=device).reciprocal()
        for some in [found] if wide is narrow else _as_large_as_one(found):
            _, weights, grads, first, second = map(list, zip(*some, strict=True))
            torch._fused_adamw_(
                weights,
                [g.to(wide) for g in grads],
                first,
                second,
                [],
                [count] * len(some),
                lr=lr,
                beta1=config.betas[0],
                beta2=config.betas[1],
                weight_decay=decay,
                eps=config.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=divisor,
                found_inf=None,
            )


def _as_large_as_one(found: Sequence[Sequence[Tensor]]) -> Iterator[list[Sequence[Tensor]]]:
    """Neighbours that together are no larger than the largest: their gradients' copies are there at once.

    >>> [len(some) for some in _as_large_as_one([[torch.ones(n)] * 3 for n in (1, 4, 2, 2, 1)])]
    [1, 1, 2, 1]
    """
    most, some, size = max(tensors[2].numel() for tensors in found), list[Sequence[Tensor]](), 0
    for tensors in found:
        size += tensors[2].numel()
        if size > most:
            yield some
            some, size = [], tensors[2].numel()
        some.append(tensors)
    yield some
