"""One process that trains the whole model, microbatch after microbatch: what every plan's run must equal."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from executor.autograd.stage import Stage
from executor.modules.base import Model, evaluate
from executor.optim.optimizer import Optimizer, ParamGradients, clip_scale, norm_of, square_sums
from executor.runtime.batch import MicrobatchLoader
from ir.core.ops import Pass
from ir.job.schema import JobOptimizer


def forward(stage: Stage, mb: int, *acts: Tensor) -> tuple[Tensor, ...]:
    """F of a whole stage: input in, output out."""
    stage.feed(mb, *acts)
    stage.run(Pass.F, mb)
    return stage.take_output(mb)


def input_grad(stage: Stage, mb: int, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """I of a whole stage: output gradient (of a loss none) in, input gradient out."""
    if grads:
        stage.feed_grad(mb, *grads)
    stage.run(Pass.I, mb)
    return stage.take_input_grad(mb)


@dataclass(frozen=True)
class ReferenceSteps:
    """What a run leaves. losses, grad_norms: one per step, norms before clipping. grads: of the last step; first: of
    the first."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    grads: dict[str, Tensor] = field(default_factory=dict)
    first: dict[str, Tensor] = field(default_factory=dict)
    params: dict[str, Tensor] = field(default_factory=dict)


class TorchMuon:
    """torch.optim's own: Muon of every linear map of the layers, one expert by itself, and AdamW of all else."""

    def __init__(self, o: JobOptimizer, params: Mapping[str, Tensor]) -> None:
        self.params, self.ends = params, 0
        matrix = {n: p.dim() > 1 and not any(x in n for x in ("embed", "lm_head")) for n, p in params.items()}
        self.leaves = {
            n: [x.detach().clone().requires_grad_() for x in (p if matrix[n] and p.dim() == 3 else [p])]
            for n, p in params.items()
        }
        hidden, other = (
            [x for n, leaves in self.leaves.items() if matrix[n] is m for x in leaves] for m in (True, False)
        )
        keys = {"nesterov": o.nesterov, "ns_steps": o.ns_steps, "adjust_lr_fn": o.adjust_lr, "momentum": o.momentum}
        self.muon = torch.optim.Muon(hidden, o.lr, weight_decay=0.1, **keys)  # type: ignore[arg-type]
        self.adamw = torch.optim.AdamW(other, o.lr, o.betas, o.eps, weight_decay=0.1, foreach=False)

    def step(self, grads: Mapping[str, Tensor], scale: float) -> None:
        """As `Optimizer.step`."""
        for n, leaves in self.leaves.items():
            for leaf, grad in zip(leaves, grads[n] if len(leaves) > 1 else [grads[n]], strict=True):
                leaf.grad = (grad * scale).view_as(leaf)
        self.muon.step()
        self.adamw.step()
        for n, p in self.params.items():
            leaves = [x.detach() for x in self.leaves[n]]
            p.data.copy_((torch.stack(leaves) if len(leaves) > 1 else leaves[0]).view_as(p))


def train(
    model: Model,
    data: MicrobatchLoader,
    steps: int,
    *,
    optimizer: JobOptimizer | None = None,
    grads: torch.dtype | None = None,
    moments: torch.dtype = torch.float32,
    split: bool = False,
) -> ReferenceSteps:
    """Train `steps` steps. grads: dtype gradients are summed in; moments: of optimizer state.

    split: by our own I and W; else by torch's plain backward over the whole model at once, which shares none of our
    code for cutting and splitting.
    """
    config = optimizer or JobOptimizer()
    built = model.build(model.chunks)
    sums = ParamGradients(built.params, grads)
    stage = Stage(built.units, built.params, grads=sums, reads=built.reads)
    opt = TorchMuon(config, built.params) if config.name == "muon" else Optimizer(config, built.params, moments)
    out = ReferenceSteps(grads=sums.sums, params=dict(built.params))
    opt.ends, order = steps, list(model.shapes)
    for step in range(steps):
        sums.begin()
        loss = 0.0
        for replica in range(data.replicas):
            for mb in range(data.microbatches):
                batch = data.batch(step, replica, mb)
                extras = {u: batch.extras(w) for u, w in built.extras.items()}
                if split:
                    for name, more in extras.items():
                        stage.feed_extra(mb, name, *more)
                    loss += forward(stage, mb, batch.ids)[0].item()
                    input_grad(stage, mb)
                    stage.run(Pass.W, mb)
                else:
                    end = evaluate(built, batch.ids, extras)
                    end.backward()
                    loss += end.item()
                    for name, p in built.params.items():
                        assert p.grad is not None, name
                        sums.add(name, p.grad)
                        p.grad = None
        sums.settle()
        if step == 0:
            out.first.update({n: t.detach().clone() for n, t in sums.sums.items()})
        norm = norm_of(square_sums(sums.sums, order))
        out.losses.append(loss)
        out.grad_norms.append(norm)
        opt.step(sums.sums, clip_scale(norm, config.clip_norm))
    return out
