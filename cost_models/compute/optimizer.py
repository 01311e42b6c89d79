"""What training keeps per parameter, and what one update moves through HBM. Sizes are exact, times modelled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ir.core.work import DType, Kernel, KernelKind, Work

LISTS = frozenset({"update", "grad_norm", "clip"})  # kernels over lists of tensors
OptimizerName = Literal["adamw", "sgd", "muon"]


@dataclass(frozen=True, slots=True)
class OptimizerPrecision:
    """A precision recipe: dtypes of weights, gradients, optimizer (moments and master weights), as in a job file.

    name "muon": of hidden matrices; `others` is the recipe of all else.

    grad_copy: bytes per element of the format that a microbatch's gradients are made in, before they are added to the
    sums; 0: products add to the sums themselves. Where sums have another format, whoever reduces gradients with others
    keeps a copy in it, whole (DistributedDataParallel's buckets, DeepSpeed's gradients in bf16). fresh: gradients are
    made by the first backward pass of a step and given up behind its update (`zero_grad(set_to_none=True)`): none
    persist, none are set to zero. cast_apart: such a copy is made in the sums' format first, by a kernel of its own.
    tied_apart: under ZeRO-1 each stage that holds a tied weight shards it over its own
    replicas. offload: share of the parameters that the host updates, and keeps moments and master weights of.
    """

    name: OptimizerName = "adamw"
    params: DType = DType.BF16
    grads: DType = DType.FP32
    optimizer: DType = DType.FP32
    grad_copy: int = 0
    offload: float = 0.0
    tied_apart: bool = False
    fresh: bool = False
    cast_apart: bool = False

    def kept(self, numel: int) -> int:
        """Of so many parameters, those that the device updates."""
        return numel - int(numel * self.offload)

    @property
    def moments(self) -> int:
        """Tensors of moments: AdamW keeps two, Muon of a matrix one, plain SGD none."""
        return {"adamw": 2, "sgd": 0, "muon": 1}[self.name]

    @property
    def others(self) -> OptimizerPrecision:
        """Of what are no hidden matrices."""
        return replace(self, name="adamw") if self.name == "muon" else self

    @property
    def master(self) -> bool:
        """Whether a master copy exists: not where the weights have the optimizer's dtype, or a wider one."""
        return self.params is not self.optimizer and self.params.bytes <= self.optimizer.bytes

    @property
    def optimizer_bytes(self) -> int:
        """Optimizer bytes per parameter: moments and master copy.

        >>> OptimizerPrecision().optimizer_bytes, OptimizerPrecision(params=DType.FP32).optimizer_bytes
        (12, 8)
        """
        return (self.moments + self.master) * self.optimizer.bytes


@dataclass(frozen=True, slots=True)
class OptimizerMemory:
    """What persists between steps on one rank, bytes."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def state_bytes(
    numel: int,
    recipe: OptimizerPrecision,
    params_shards: int = 1,
    grads_shards: int = 1,
    optimizer_shards: int = 1,
    *,
    alone: bool = False,
) -> OptimizerMemory:
    """Bytes of the state of `numel` parameters on one of its owners, each kind divided over its number of shards.

    Shards are of a flat buffer padded to equal parts, hence ceil division. ZeRO-1 over d owners: optimizer_shards=d;
    ZeRO-2: grads_shards too; ZeRO-3: all three. alone: gradients are reduced with nobody.

    >>> state_bytes(1000, OptimizerPrecision(), optimizer_shards=8)
    OptimizerMemory(parameters=2000, gradients=4000, optimizer=1500)
    """
    summed = 0 if recipe.fresh else shard(numel, grads_shards) * recipe.grads.bytes
    return OptimizerMemory(
        shard(numel, params_shards) * recipe.params.bytes,
        summed + (0 if alone or recipe.grad_copy == recipe.grads.bytes else numel * recipe.grad_copy),
        recipe.kept(shard(numel, optimizer_shards)) * recipe.optimizer_bytes,
    )


def shard(numel: int, shards: int) -> int:
    """Elements of one shard of a flat buffer, padded to equal parts.

    >>> shard(10, 4)
    3
    """
    if numel < 0 or shards < 1:
        raise ValueError(f"cannot cut {numel} elements into {shards} shards")
    return -(-numel // shards)


def update(numel: int, recipe: OptimizerPrecision) -> Kernel:
    """One fused optimizer step on `numel` local elements: reads gradient and state, writes state and weights.

    >>> update(1, OptimizerPrecision()).bytes  # grad 4; m, v, master read and written 24; weight written 2
    30
    """
    kept = recipe.kept(numel)
    return _memory("update", kept, _touched(recipe), recipe.optimizer, flops=6 * recipe.moments + 2)


def _touched(recipe: OptimizerPrecision) -> int:
    """Bytes that an update moves per parameter."""
    state = 2 * recipe.moments * recipe.optimizer.bytes
    weights = 2 * recipe.optimizer.bytes + recipe.params.bytes if recipe.master else 2 * recipe.params.bytes
    return recipe.grads.bytes + state + weights


def offloaded_seconds(numel: int, recipe: OptimizerPrecision, host_GBps: float, pcie_GBps: float) -> float:
    """Seconds of the host's share of an update of `numel` local elements.

    Gradients come down, weights go up, piece by piece beside the update of other pieces, which moves through the host's
    memory what `update` moves through HBM: the slowest of the three decides. Modelled; nothing was measured.

    >>> half = OptimizerPrecision(offload=0.5)
    >>> offloaded_seconds(10**9, half, host_GBps=30, pcie_GBps=4), offloaded_seconds(10**9, half, 300, 4)
    (0.5, 0.5)
    """
    wire = max(recipe.grads.bytes, recipe.params.bytes) / pcie_GBps
    return numel * recipe.offload * 1e-9 * max(wire, _touched(recipe) / host_GBps)


def grad_norm(numel: int, recipe: OptimizerPrecision) -> Kernel:
    """Sum of squares of the local gradients: one read."""
    return _memory("grad_norm", numel, recipe.grads.bytes, recipe.grads, flops=2)


def clip(numel: int, recipe: OptimizerPrecision) -> Kernel:
    """Scaling the local gradients in place: one read, one write."""
    return _memory("clip", numel, 2 * recipe.grads.bytes, recipe.grads, flops=1)


def zero_grads(numel: int, recipe: OptimizerPrecision) -> Kernel:
    """Setting the local gradients to zero: one write; nothing where they are made anew."""
    return _memory("zero_grads", numel, 0 if recipe.fresh else recipe.grads.bytes, recipe.grads, flops=0)


def accumulate(work: Work, recipe: OptimizerPrecision) -> list[Kernel]:
    """Adding the weight gradients that `work` makes to the sums, where kernels of their own do it.

    They write and read the gradients, and read and write the sums; in one format autograd's own sums, which read both.
    Cast apart, gradients are read, and written in the sums' format, from where they are added: what the product is
    listed with (sums read and written, where it writes a copy) hides under its arithmetic, and stands for nothing here.

    >>> from ir.core.work import DType
    >>> gemm = Kernel(KernelKind.GEMM, 2 * 8**3, 0, DType.BF16, (8, 8, 8))
    >>> accumulate((gemm,), OptimizerPrecision(grad_copy=2))[0].bytes == 12 * 8 * 8
    True
    >>> accumulate((gemm,), OptimizerPrecision())
    []
    """
    if not recipe.grad_copy:
        return []
    alike = recipe.grad_copy == recipe.grads.bytes
    each = (1 if alike else 2) * recipe.grad_copy + 2 * recipe.grads.bytes
    if recipe.cast_apart and not alike:
        each = recipe.grad_copy + 4 * recipe.grads.bytes
    products = [k for k in work if k.kind in (KernelKind.GEMM, KernelKind.GROUPED_GEMM) and k.shape]
    numels = [(k.shape[0] if len(k.shape) == 4 else 1) * k.shape[-3] * k.shape[-2] * k.count for k in products]
    return [Kernel(KernelKind.MEMORY, n, n * each, recipe.grads, label="accumulate") for n in numels]


def _memory(label: str, numel: int, bytes_each: int, dtype: DType, flops: int) -> Kernel:
    if numel < 0:
        raise ValueError(f"{label}: {numel} elements")
    return Kernel(KernelKind.MEMORY, flops * numel, bytes_each * numel, dtype, label=label)
