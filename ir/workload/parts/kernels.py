"""The kernels that parts are made of: matrix products by pass, attention, and memory-bound ones by bytes moved."""

from collections.abc import Iterable
from dataclasses import dataclass

from ir.core.work import CAST, WEIGHT_GRAD, DType, Kernel, KernelKind, Work
from ir.workload.setting import PartSetting


@dataclass(frozen=True, slots=True)
class LinearKernel:
    """A linear layer on one device: `rows` tokens in (per group), `into` features to `out`. groups: experts, 0 = plain.

    dtype: of the product; the job's compute format unless the layer stays in high precision (router, head).
    """

    label: str
    rows: int
    out: int
    into: int
    groups: int = 0
    dtype: DType | None = None

    @property
    def flops(self) -> int:
        """Of one of its three products."""
        return 2 * max(self.groups, 1) * self.rows * self.out * self.into

    @property
    def elements(self) -> int:
        """Of its output."""
        return max(self.groups, 1) * self.rows * self.out

    def forward(self, s: PartSetting) -> Kernel:
        """y = x·wᵀ: (m, n, k) = (rows, out, into)."""
        return self._kernel(s, self.rows, self.out, self.into, s.wide)

    def input_grad(self, s: PartSetting) -> Kernel:
        """dx = dy·w: (rows, into, out)."""
        return self._kernel(s, self.rows, self.into, self.out, s.wide)

    def weight_grad(self, s: PartSetting) -> Kernel:
        """dw += dyᵀ·x: (out, into, rows); the gradient is read and written back."""
        label = f"{self.label}{WEIGHT_GRAD}"
        return self._kernel(s, self.out, self.into, self.rows, 2 * s.precision.grads.bytes, label)

    def _kernel(self, s: PartSetting, m: int, n: int, k: int, result_bytes: int, label: str = "") -> Kernel:
        dtype, label = self.dtype or s.precision.compute, label or self.label
        one = (m * k + n * k) * dtype.bytes + m * n * result_bytes
        if not self.groups:
            return Kernel(KernelKind.GEMM, self.flops, one, dtype, (m, n, k), label)
        if not s.style.grouped:
            return Kernel(KernelKind.GEMM, self.flops // self.groups, one, dtype, (m, n, k), label, self.groups)
        shape = (self.groups, m, n, k)
        return Kernel(KernelKind.GROUPED_GEMM, self.flops, self.groups * one, dtype, shape, label)


def forward(s: PartSetting, *linears: LinearKernel) -> Work:
    """The forward products of linears."""
    return tuple(x.forward(s) for x in linears)


def input_grad(s: PartSetting, *linears: LinearKernel, arrives_fp8: bool = False) -> Work:
    """Input gradients, each behind the fp8 casts of its operands.

    The output gradient is quantised along rows (for this product) and columns (for the weight gradient's); the saved
    input is transposed and quantised again along columns, here and not in W, as DeepSeek's profile shows; so is the
    weight. arrives_fp8: the output gradient comes quantised (from a dispatch), and is only turned.
    """
    out: list[Kernel] = []
    for x in linears:
        groups = max(x.groups, 1)
        if s.fp8 and x.dtype is None:
            grads, inputs = groups * x.rows * x.out, groups * x.rows * x.into
            out.append(memory(s, f"{x.label}.cast_grad{CAST}", grads * (2 if arrives_fp8 else 2 * (s.wide + 1))))
            out.append(memory(s, f"{x.label}.transpose{CAST}", inputs * 2))
            out.append(memory(s, f"{x.label}.transpose_weight{CAST}", groups * x.out * x.into * 2))
        out.append(x.input_grad(s))
    return tuple(out)


def weight_grad(s: PartSetting, *linears: LinearKernel) -> Work:
    """The weight gradients of linears."""
    return tuple(x.weight_grad(s) for x in linears)


def stash(s: PartSetting, *linears: LinearKernel) -> int:
    """Bytes of the linears' output gradients, which live from I to W."""
    wide = sum(x.elements for x in linears if x.dtype is not None)
    return s.cached(sum(x.elements for x in linears if x.dtype is None)) + wide * s.wide


def memory(s: PartSetting, label: str, moved: int) -> Kernel:
    """A memory-bound kernel that reads and writes `moved` bytes in all."""
    return Kernel(KernelKind.MEMORY, 0, moved, s.precision.activations, (), label)


def cast(s: PartSetting, label: str, elements: int) -> Work:
    """To fp8, where matrix products are: read wide, write one byte."""
    return (memory(s, f"{label}.cast{CAST}", elements * (s.wide + 1)),) if s.fp8 else ()


def store(s: PartSetting, label: str, elements: int, byte_each: float) -> Work:
    """Into the narrow format in which a wide tensor is kept from forward to backward, or back out of it."""
    return (memory(s, f"{label}{CAST}", int(elements * (s.wide + byte_each))),)


def norm_forward(s: PartSetting, label: str, elements: int) -> Kernel:
    """Read x, write y."""
    return memory(s, label, 2 * elements * s.wide)


def norm_backward(s: PartSetting, label: str, elements: int) -> Kernel:
    """Read dy and x, write dx; the weight's own gradient is a by-product."""
    return memory(s, label, 3 * elements * s.wide)


def add(s: PartSetting, label: str, elements: int, terms: int = 2) -> Kernel:
    """Sum `terms` tensors into one."""
    return memory(s, label, (terms + 1) * elements * s.wide)


def copies(s: PartSetting, label: str, elements: int) -> Kernel:
    """Read and write each element once: rope, concatenation, permutation."""
    return memory(s, label, 2 * elements * s.wide)


def flops(work: Iterable[Kernel]) -> int:
    """FLOPs of some kernels.

    >>> flops([Kernel(KernelKind.GEMM, 6, 0, DType.BF16, count=2)])
    12
    """
    return sum(k.flops * k.count for k in work)


def beyond(most: int, *written: int) -> int:
    """What gradients and temporaries need at their most, less what is left in the end: that takes their place.

    >>> beyond(10, 3, 4), beyond(10, 20)
    (3, 0)
    """
    return max(0, most - sum(written))
