"""SGD, AdamW, Muon on flat sets of named tensors, in stretches; learning rates, sums of gradients, their norm."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import overload

import numpy as np
import torch
from torch import Tensor

from executor.device.device import on_gpu
from executor.optim.fused import fused_adamw
from executor.optim.muon import MatrixShardGroup, update_matrix
from ir.job.schema import JobOptimizer


class ParamGradients:
    """Sums of weight gradients by global name, in the dtype they are accumulated in; each `add` is one microbatch.

    >>> grads = ParamGradients({"w": torch.zeros(2)}); grads.add("w", torch.ones(2)); grads.add("w", torch.ones(2))
    >>> grads["w"].tolist()
    [2.0, 2.0]
    >>> grads.begin(); grads.add("w", 3 * torch.ones(2)); grads["w"].tolist()
    [3.0, 3.0]
    """

    def __init__(self, params: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
        self.sums = {n: torch.zeros_like(p, dtype=dtype or p.dtype, requires_grad=False) for n, p in params.items()}
        self.passing: dict[tuple[str, int], Tensor] = {}  # of a microbatch, to be reduced before it is summed
        self.stale: set[str] = set()  # sums of a step that is over, which the first gradient takes the place of

    def __getitem__(self, name: str) -> Tensor:
        return self.sums[name]

    def add(self, name: str, grad: Tensor, mb: int = 0) -> None:
        if name in self.stale:
            self.stale.remove(name)
            self.sums[name].copy_(grad.detach())
        else:
            (self.sums[name] if name in self.sums else self.passing[name, mb]).add_(grad.detach())

    def room(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """Where the first gradient of a step may be written as it is made, instead of added; None for any other."""
        if name not in self.stale or self.sums[name].dtype != dtype:
            return None
        self.stale.remove(name)
        return self.sums[name]

    def begin(self, names: Iterable[str] | None = None) -> None:
        """Begin the sums anew: those of all parameters, or of these."""
        self.stale.update(self.sums if names is None else names)

    def settle(self, names: Iterable[str] | None = None) -> None:
        """Before sums are read: those that no gradient has come to are zero."""
        for name in self.stale.intersection(self.sums if names is None else names):
            self.stale.remove(name)
            self.sums[name].zero_()


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


Runs = tuple[tuple[slice, float], ...]  # stretches of a flat tensor, each with its weight decay
USUAL_DECAY = {"adamw": 0.01, "sgd": 0.0, "muon": 0.1}  # torch's
WEIGHT, MOMENT = "weight", "momentum_buffer"


def slots_of(config: JobOptimizer, *, matrix: bool = False) -> tuple[str, ...]:
    """The moments kept of every element. matrix: of a hidden one, which Muon updates.

    >>> slots_of(JobOptimizer("sgd")), slots_of(JobOptimizer()), slots_of(JobOptimizer("muon"), matrix=True)
    ((), ('exp_avg', 'exp_avg_sq'), ('momentum_buffer',))
    """
    if config.name == "muon" and matrix:
        return (MOMENT,)
    return () if config.name == "sgd" else ("exp_avg", "exp_avg_sq")


def decay_of(config: JobOptimizer, name: str) -> float:
    """A parameter's weight decay.

    >>> decay_of(JobOptimizer(), "l0.weight"), decay_of(JobOptimizer(no_decay=("*norm*",)), "l0.norm.weight")
    (0.01, 0.0)
    """
    usual = USUAL_DECAY[config.name] if config.weight_decay is None else config.weight_decay
    return 0.0 if any(fnmatchcase(name, p) for p in config.no_decay) else usual


class Optimizer:
    """The state of the parameters (or shards of them) that a rank updates; element by element, so any cut will do.

    dtype: of moments and master weights; a parameter that already has it gets no master copy. runs: of what is no
    parameter, but a shard of several: its stretches of one weight decay. ends: the step behind which the run ends.
    matrices: those that Muon updates, each whole but for what tensor parallelism cuts.

    >>> w = torch.ones(2)
    >>> opt = Optimizer(JobOptimizer("sgd", lr=0.5), {"w": w}); opt.step({"w": torch.ones(2)}); w.tolist()
    [0.5, 0.5]
    """

    def __init__(
        self,
        config: JobOptimizer,
        params: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float32,
        runs: Mapping[str, Runs] | None = None,
        matrices: Mapping[str, MatrixShardGroup | None] | None = None,
    ) -> None:
        self.matrices = matrices or {}
        self.config, self.params = config, {n: p.detach() for n, p in params.items()}
        whole = {n: ((slice(None), decay_of(config, n)),) for n in params}
        self.runs: dict[str, Runs] = {**whole, **(runs or {})}
        self.lr, self.ends = config.lr, 0
        wide = {n: torch.promote_types(p.dtype, dtype) for n, p in self.params.items()}
        self.masters = {n: p.to(wide[n]) for n, p in self.params.items() if p.dtype != wide[n]}
        self.steps = 0
        slots = {n: slots_of(config, matrix=n in self.matrices) for n in self.params}
        self.state = {n: {s: torch.zeros_like(p, dtype=wide[n]) for s in slots[n]} for n, p in self.params.items()}

    def kept(self, name: str) -> dict[str, Tensor]:
        """All that a parameter's next update starts from: the value that is updated, and its moments."""
        return {WEIGHT: self.masters.get(name, self.params[name]), **self.state[name]}

    @torch.no_grad()
    def step(self, grads: Mapping[str, Tensor], scale: float | Tensor = 1.0) -> None:
        """Update all parameters with grads · scale."""
        self.lr = learning_rate(self.config, self.steps, self.ends)
        self.steps += 1
        weights = [self.masters.get(n, p) for n, p in self.params.items()]
        # The kernel knows scales of float32 alone, which float64 is not compared by.
        fused = self.config.name != "sgd" and all(on_gpu(w) and w.dtype is not torch.float64 for w in weights)
        if fused:
            fused_adamw(self.config, self.lr, self.steps, scale, self._updates(grads))
        else:
            for decay, tensors in self._updates(grads):
                self._in_stretches(scale, decay, tensors)
        for name in (n for n in self.params if n in self.matrices):
            weight = self.masters.get(name, self.params[name])
            self._matrix(name, weight, grads[name].view_as(weight).to(weight.dtype), scale)
        if late := [n for n in self.masters if fused or n in self.matrices]:
            torch._foreach_copy_([self.params[n] for n in late], [self.masters[n] for n in late])

    def _updates(self, grads: Mapping[str, Tensor]) -> Iterator[tuple[float, Sequence[Tensor]]]:
        """Weight decay, and (the parameter, the weight that is updated, its gradient, its moments), of one layout."""
        for name, own in self.params.items():
            if name not in self.matrices:
                tensors = [own, self.masters.get(name, own), grads[name], *self.state[name].values()]
                for cut, decay in self.runs[name]:
                    yield decay, tensors if cut == slice(None) else [t.view(-1)[cut] for t in tensors]

    def _matrix(self, name: str, weight: Tensor, grad: Tensor, scale: float | Tensor) -> None:
        grad = grad * scale if self.config.clip_norm else grad
        moment, decay = self.state[name][MOMENT], decay_of(self.config, name)
        update_matrix(self.config, self.lr, decay, weight, grad, moment, self.matrices[name])

    def _in_stretches(self, scale: float | Tensor, decay: float, tensors: Sequence[Tensor]) -> None:
        """Of (the parameter, the weight that is updated, its gradient, its moments), and the parameter made of it."""
        own, weight, grad, *_ = tensors
        sgd = self.config.name == "sgd"
        whole = sgd and not self.config.clip_norm and not decay and grad.dtype == weight.dtype  # in one kernel
        for param, wide, grad, *state in [tensors] if whole else _blocks(tensors):
            grad = grad.to(wide.dtype)
            grad = grad * scale if self.config.clip_norm else grad  # by 1.0 too, so memory knows no data
            (self._sgd if sgd else self._adamw)(decay, wide, grad, *state)
            if weight is not own:
                param.copy_(wide)

    def _sgd(self, decay: float, weight: Tensor, grad: Tensor) -> None:
        weight.add_(grad.add(weight, alpha=decay) if decay else grad, alpha=-self.lr)

    def _adamw(self, decay: float, weight: Tensor, grad: Tensor, avg: Tensor, sq: Tensor) -> None:
        # torch.optim.AdamW's single-tensor arithmetic, op for op: a test holds the two bitwise equal.
        beta1, beta2 = self.config.betas
        weight.mul_(1 - self.lr * decay)
        avg.lerp_(grad, 1 - beta1)
        sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        step_size = self.lr / (1 - beta1**self.steps)
        denom = (sq.sqrt() / math.sqrt(1 - beta2**self.steps)).add_(self.config.eps)
        weight.addcdiv_(avg, denom, value=-step_size)


def _blocks(tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Tensors of one layout, stretch by stretch: what an update makes on its way is no tensor of the whole."""
    sizes = update_blocks(tensors[0].numel())
    if len(sizes) == 1 or not tensors[0].is_contiguous():
        yield tensors
        return
    yield from zip(*(t.view(-1).split(sizes) for t in tensors), strict=True)


ROW = 512  # elements


def square_sums(grads: Mapping[str, Tensor], order: Sequence[str], device: torch.device | None = None) -> Tensor:
    """Σ g² of each parameter held here, in canonical order; 0 for the others. In float64.

    Summing such vectors over ranks that hold different parameters adds zeros only, hence changes no bit. What is
    narrower is summed in float32 row by row, as a wide copy of a whole gradient would cost more than its update; on a
    GPU by torch's kernel for lists.

    >>> square_sums({"b": torch.tensor([3.0, 4.0])}, ["a", "b"]).tolist()
    [0.0, 25.0]
    """
    out = torch.zeros(len(order), dtype=torch.float64, device=device)
    here = [grads[name].detach() for name in order if name in grads]
    if here and on_gpu(here[0]):
        wide = torch.promote_types(here[0].dtype, torch.float32)
        norms = dict(zip([n for n in order if n in grads], torch._foreach_norm(here, dtype=wide), strict=True))
        none = out.new_zeros((), dtype=wide)
        return torch.stack([norms.get(name, none) for name in order]).double().square()
    for i, name in enumerate(order):
        if name in grads:
            flat = grads[name].detach().reshape(-1)
            wide = torch.promote_types(flat.dtype, torch.float32)
            end = 0 if wide is torch.float64 else flat.numel() // ROW * ROW
            for part in (flat[:end].view(-1, ROW), flat[end:]) if end else (flat,):
                out[i] += torch.linalg.vector_norm(part, dim=-1, dtype=wide).double().square().sum()
    return out


def norm_of(sums: Tensor) -> float:
    """The global norm from all parameters' square sums, added one after the other in their order.

    >>> norm_of(torch.tensor([9.0, 16.0]))
    5.0
    """
    total = 0.0
    for value in sums.tolist():
        total += value
    return math.sqrt(total)


def global_norm(sums: Tensor, *, ahead: bool) -> float | Tensor:
    """`norm_of`; where the host runs ahead of the device, left there, which adds in an order of its own.

    >>> global_norm(torch.tensor([9.0, 16.0]), ahead=True)
    tensor(5.)
    """
    return sums.sum().sqrt() if ahead else norm_of(sums)


@overload
def clip_scale(norm: float, clip_norm: float, *, single: bool = False) -> float: ...
@overload
def clip_scale(norm: float | Tensor, clip_norm: float, *, single: bool = False) -> float | Tensor: ...
def clip_scale(norm: float | Tensor, clip_norm: float, *, single: bool = False) -> float | Tensor:
    """What gradients are multiplied by: torch's clip coefficient. single: rounded to float32.

    >>> clip_scale(0.5, 1.0), round(clip_scale(4.0, 1.0), 4), clip_scale(4.0, 0.0)
    (1.0, 0.25, 1.0)
    >>> clip_scale(3.0, 1.0, single=True) == clip_scale(3.0 * (1 + 1e-15), 1.0, single=True)
    True
    """
    if isinstance(norm, Tensor):  # the host does not know it
        clip = (clip_norm / (norm + 1e-6)).clamp(max=1.0)
        return clip.float() if single else clip
    scale = min(1.0, clip_norm / (norm + 1e-6)) if clip_norm else 1.0
    return float(np.float32(scale)) if single else scale


LEAST_BLOCK, BLOCKS = 4096, 16


def update_blocks(numel: int) -> list[int]:
    """Sizes of the stretches in which a tensor is updated: a fused kernel needs no room of its own, these need little.

    >>> update_blocks(5000), len(update_blocks(10**6))
    ([4096, 904], 16)
    """
    size = max(LEAST_BLOCK, -(-numel // BLOCKS))
    return [min(size, numel - i) for i in range(0, numel, size)] or [0]
