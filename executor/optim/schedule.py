"""The learning rate of each step: warm-up, then constant, cosine, linear, or stable with a decay at the end."""

from __future__ import annotations

import math

from ir.job.schema import JobOptimizer


def learning_rate(o: JobOptimizer, step: int, steps: int = 0) -> float:
    """Of step `step` (from 0) of a run that ends behind `steps`, which only "wsd" asks for.

    It rises to lr over `warmup_steps`, which the last of them has, and falls to min_lr over `decay_steps`: right behind
    the warm-up, or (wsd) over the run's last ones. Each is torch's scheduler of that name, in closed form.

    >>> o = JobOptimizer(lr=1.0, schedule="linear", warmup_steps=2, decay_steps=4, min_lr=0.2)
    >>> [round(learning_rate(o, k), 2) for k in range(8)]
    [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    """
    if step < o.warmup_steps:
        return o.lr * (step + 1) / o.warmup_steps
    if o.schedule == "constant" or not o.decay_steps:
        return o.lr
    begins = max(o.warmup_steps, steps - o.decay_steps) if o.schedule == "wsd" else o.warmup_steps
    share = min(max((step - begins) / o.decay_steps, 0.0), 1.0)
    left = (1 + math.cos(math.pi * share)) / 2 if o.schedule == "cosine" else 1 - share
    return o.min_lr + (o.lr - o.min_lr) * left
