"""The kernels that parts are made of: matrix products by pass, attention, and memory-bound ones by bytes moved."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ir.core.work import CAST, WEIGHT_GRAD, DType, Kernel, KernelKind, Work
from ir.workload.setting import PartSetting


@dataclass(frozen=True, slots=True)
class LinearKernel:
    """A linear layer on one device: `rows` tokens in (per group), `into` features to `out`. groups: experts, 0 = plain.

    dtype: of the product; the job's compute format unless the layer stays in high precision (router, head). batched:
    its groups are one product whatever the style of experts.
    """

    label: str
    rows: int
    out: int
    into: int
    groups: int = 0
    dtype: DType | None = None
    batched: bool = False

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
        if not (s.style.grouped or self.batched):
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


def weight_grad(s: PartSetting, *linears: LinearKernel, biased: bool = False) -> Work:
    """The weight gradients of linears; operation by operation a bias's is a sum over tokens, which reads once more."""
    sums = linears if biased and s.style.op_by_op else ()
    return (*(x.weight_grad(s) for x in linears), *(memory(s, "bias_grad", x.elements * s.wide) for x in sums))


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


def several(s: PartSetting, label: str, moved: int, count: int) -> Kernel:
    """So many memory-bound kernels that move `moved` bytes together."""
    return replace(memory(s, label, moved // count), count=count)


def norm_forward(s: PartSetting, label: str, elements: int, *, stream: bool = False) -> Kernel:
    """Read x, write y. Operation by operation: cast to fp32, square, mean, add, root, scale, cast back, weigh; under
    autocast x is in fp32, and stays so. stream: x is the residual stream.
    """
    if s.written_norms:
        if stream and s.autocast:
            return several(s, label, elements * 7 * max(4, s.wide), 6)
        return several(s, label, elements * (7 * max(4, s.wide) + 4 * s.wide), 8)
    return memory(s, label, elements * (read_by_norm(s, stream) + normed_wide(s, stream)))


def norm_backward(s: PartSetting, label: str, elements: int, *, stream: bool = False) -> Kernel:
    """Read dy and x, write dx; the weight's own gradient is a by-product.

    Operation by operation: of the weight (its product, its sum) and of x (3), a cast, of the scale (2, its sum) and
    what it leads to (4 of a number per token), the mean's, the square's (3), the sum of both ways, a cast.
    """
    if s.written_norms:
        if stream and s.autocast:
            return several(s, label, elements * 19 * max(4, s.wide), 15)
        return several(s, label, elements * (19 * max(4, s.wide) + 8 * s.wide), 17)
    return memory(s, label, elements * (2 * read_by_norm(s, stream) + normed_wide(s, stream)))


def read_by_norm(s: PartSetting, stream: bool) -> int:
    """Bytes of an element of a norm's input."""
    return s.stream_wide if stream else s.wide


def normed_wide(s: PartSetting, stream: bool) -> int:
    """Bytes of an element of a norm's output: of what linears read, but under autocast."""
    return s.stream_wide if stream and s.autocast else s.wide


def rope(s: PartSetting, elements: int, *, back: bool = False) -> Kernel:
    """Rotary embedding of queries and keys. Operation by operation: x·cos, the halves changed (one negated, both
    joined), ·sin, the sum; backward cuts what was joined into two whole tensors of zeros, and adds these. Under
    autocast cosines, and what is made with them, have the stream's format; attention casts it, backward each gradient.
    """
    if s.autocast:
        wide, narrow, casts = (4, 11, 3) if back else (5, 5, 1)  # tensors moved; made into the other format
        moved = elements * (wide * s.stream_wide + narrow * s.wide + casts * (s.wide + s.stream_wide))
        return several(s, "rope", moved, 2 * ((9 if back else 5) + casts))
    if s.style.op_by_op:
        return several(s, "rope", elements * s.wide * (15 if back else 10), 2 * (9 if back else 5))
    return copies(s, "rope", elements)


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
