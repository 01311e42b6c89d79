"""AdamW as one kernel, on a GPU: what takes the host a dozen launches otherwise, and memory ten passes."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ir.job.schema import JobOptimizer

Update = Callable[[float, Sequence[Tensor]], None]


def fused_adamw(config: JobOptimizer, lr: float, step: int, scale: float | Tensor, device: torch.device) -> Update:
    """torch's own update number `step` (from 1), given a weight decay and (parameter, the weight that is updated,
    gradient, first, second moment), all in one layout; of gradient · scale. Such a gradient is left scaled, unless it
    is copied into the weight's format. A parameter that is not the weight itself is left to the caller.

    >>> weight, grad, first, second = torch.ones(2), torch.ones(2), torch.zeros(2), torch.zeros(2)
    >>> update = fused_adamw(JobOptimizer(), 0.5, 1, 1.0, weight.device)
    >>> update(0.0, (weight, weight, grad, first, second)); weight.round(decimals=4).tolist()
    [0.5, 0.5]
    """
    count, divisor = torch.full((), step, dtype=torch.float32, device=device), None
    if isinstance(scale, Tensor) or scale != 1.0:
        divisor = torch.as_tensor(scale, dtype=torch.float32, device=device).reciprocal()

    def update(decay: float, tensors: Sequence[Tensor]) -> None:
        _, weight, grad, first, second = tensors
        torch._fused_adamw_(
            [weight],
            [grad.to(weight.dtype)],
            [first],
            [second],
            [],
            [count],
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

    return update
