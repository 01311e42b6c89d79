"""One aten call as the kernel it is: FLOPs by torch's formulas, bytes read and written, the shape of its product."""

from collections.abc import Callable, Mapping, Sequence
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from executor.frontend.calls import KernelForm
from executor.modules.base import TORCH
from ir.core.work import DType, Kernel, KernelKind

FORMATS = {dtype: form for form, dtype in TORCH.items()}
_aten = torch.ops.aten


def _attention_flops(q: Tensor, k: Tensor, v: Tensor, features: int, causal: bool) -> int:
    """2 · rows · keys · features, halved where the causal mask hides half."""
    batch, heads, rows, _ = q.shape
    return 2 * batch * heads * rows * k.shape[2] * features // (2 if causal else 1)


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, is_causal: bool = False, **_: Any) -> int:
    return _attention_flops(q, k, v, q.shape[-1] + v.shape[-1], is_causal)


def _flash_backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **_: Any) -> int:
    is_causal = rest[3]  # behind out, logsumexp and dropout
    return _attention_flops(q, k, v, 3 * q.shape[-1] + 2 * v.shape[-1], is_causal)


# torch counts no FLOPs for its CPU attention. The backward makes the scores again: 5 products against 2.
ATTENTION: Mapping[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _flash,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward,
}

PRODUCTS = (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm)
THIN = 32  # terms, rows or columns: too few FLOPs a byte for any device's arithmetic to be what it waits for
OVERWRITES = ("copy_", "fill_", "zero_")
SCATTERS = ("scatter_", "scatter_add_", "index_put_", "index_add_")
# What torch tags neither as pointwise nor as a reduction, though a compiler makes loops of it.
ELEMENTS = {
    *("_to_copy", "copy", "fill", "zero", "cat", "stack", "repeat", "roll", "flip", "tril", "triu", "constant_pad_nd"),
    *("slice_backward", "select_backward", "slice_scatter", "select_scatter", "lift_fresh"),
    *("bernoulli", "native_dropout"),
    *("arange", "full", "full_like", "zeros", "zeros_like", "ones", "ones_like", "scalar_tensor"),
    *("new_ones", "new_zeros", "new_full"),
}
ROWS = {
    *("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"),
    *("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward"),
}
GATHERS = (_aten.embedding, _aten.index_select, _aten.gather, _aten.index)


def kernel_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, read: Sequence[Tensor], made: Sequence[Tensor]
) -> Kernel | None:
    """The kernel of one call; None where nothing is computed or moved. made: outputs with storages of their own."""
    packet, name = func.overloadpacket, func.overloadpacket.__name__
    wrote = [*made, *rewritten(func, args)]
    if not wrote or name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach"):
        return None
    moved = sum(map(touched, _moved(packet, name, read, wrote)))
    dtype = next((FORMATS[t.dtype] for t in (*wrote, *read) if t.dtype in FORMATS), DType.FP32)
    if packet in ATTENTION:
        q, k, v = [t for t in read if t.dim() == 4][packet.__name__.endswith("backward") :][:3]
        shape = (*q.shape[:3], k.shape[2], q.shape[3], v.shape[3])
        return Kernel(KernelKind.ATTENTION, ATTENTION[packet](*args, **kwargs), moved, dtype, shape, name)
    if packet is _aten._grouped_mm:
        return _grouped(read[0], read[1], moved, dtype, next(t.shape[0] for t in (*read[:2], *made) if t.dim() == 3))
    flops = int(flop_registry[packet](*args, **kwargs, out_val=out)) if packet in flop_registry else 0
    factors = [t for t in read if t.dim() >= 2][-2:]  # an addmm reads its bias first
    if len(factors) < 2 or not flops:
        return Kernel(KernelKind.MEMORY, flops, moved, dtype, (), name)
    a, b = factors
    if packet in PRODUCTS and _thin(a, b):
        return Kernel(KernelKind.MEMORY, flops, moved, dtype, (), name)
    if packet in (_aten.mm, _aten.addmm):
        return Kernel(KernelKind.GEMM, flops, moved, dtype, (a.shape[0], b.shape[1], a.shape[1]), name)
    if packet in (_aten.bmm, _aten.baddbmm):
        shape = (a.shape[0], a.shape[1], b.shape[2], a.shape[2])
        return Kernel(KernelKind.GROUPED_GEMM, flops, moved, dtype, shape, name)
    return Kernel(KernelKind.MEMORY, flops, moved, dtype, (), name)


def _thin(a: Tensor, b: Tensor) -> bool:
    """Whether a product is a loop that moves bytes: two sizes of each of a batch are small, or one beside large ones
    whose format no tensor core takes."""
    small, second, _ = sorted((*a.shape[-2:], b.shape[-1]))
    return second <= THIN if a.dim() > 2 else small <= THIN < THIN**2 <= second and a.dtype is torch.float32


def _grouped(a: Tensor, b: Tensor, moved: int, dtype: DType, groups: int) -> Kernel:
    """A product of groups as long as one another, of which torch counts no FLOPs: of rows, or of columns, with a matrix
    each; of matrices, one by one; of rows among themselves, as for weights.

    >>> x, w = torch.zeros(16, 8), torch.zeros(4, 8, 24)
    >>> [_grouped(*both, 0, DType.BF16, 4).shape for both in ((x, w), (x.T, x), (w, w.mT), (w.mT, x.T))]
    [(4, 4, 24, 8), (4, 8, 8, 4), (4, 8, 8, 24), (4, 24, 4, 8)]
    """
    k, many = a.shape[-1], gcd(groups, a.shape[0] if a.dim() == 2 else b.shape[-1])
    match a.dim(), b.dim():
        case 2, 2:
            shape = (groups, a.shape[0], b.shape[1], -(-k // groups))
        case 3, 3:
            shape = (groups, a.shape[1], b.shape[2], k)
        case 2, _:
            shape = (many, a.shape[0] // many, b.shape[2], k)
        case _:
            shape = (many, a.shape[1], b.shape[1] // many, k)
    return Kernel(KernelKind.GROUPED_GEMM, 2 * prod(shape), moved, dtype, shape, "grouped_mm")


def rewritten(func: Any, args: Sequence[Any]) -> list[Tensor]:
    """What a call writes in place."""
    return [a for a in args[:1] if func.overloadpacket.__name__.endswith("_") and isinstance(a, Tensor)]


def _moved(packet: Any, name: str, read: Sequence[Tensor], wrote: Sequence[Tensor]) -> Sequence[Tensor]:
    """What is read and written. A gather reads the rows it wants, no others; a scatter in place touches those alone."""
    if of_a_shape(name):
        return wrote
    if packet in GATHERS:
        return (*wrote, *wrote, *read[1:])
    if name in SCATTERS:
        return (*read[1:], read[-1], read[-1])
    if name in OVERWRITES:
        return (*read[1:], *wrote)
    return (*read, *wrote)


def of_a_shape(name: str) -> bool:
    """Whether a call reads no values of what it is given.

    >>> [of_a_shape(name) for name in ("zeros_like", "new_full", "add")]
    [True, True, False]
    """
    return name.startswith("new_") or name.endswith("_like")


def looped(func: Any, args: Sequence[Any], read: Sequence[Tensor], made: Sequence[Tensor]) -> tuple[KernelForm, int]:
    """What a compiler's loops can do with a call, and the elements that they go over.

    >>> x, y = torch.zeros(64, 128), torch.zeros(4, 4)
    >>> [looped(f, (x, *more), [x], [out])[0].value for f, more, out in (
    ...     (_aten.neg.default, (), x), (_aten.sum.dim_IntList, ([1],), x[:, 0]),
    ...     (_aten.sum.dim_IntList, ([0],), x[0]))]
    ['elements', 'rows', 'columns']
    >>> a, b = torch.zeros(2, 4, 4), torch.zeros(2, 4, 64)
    >>> [looped(_aten.bmm.default, (), [l, r], [l @ r])[0].value for l, r in ((b.mT, b), (a, b), (b, b.mT))]
    ['apart', 'elements', 'rows']
    """
    name = func.overloadpacket.__name__
    plain, over = name.rstrip("_") if name.endswith("_") else name, max((t.numel() for t in read), default=0)
    if func.overloadpacket in GATHERS:
        return KernelForm.GATHER, max(t.numel() for t in made)
    if plain in ROWS:
        grads = next((a for a in reversed(args) if isinstance(a, list) and all(isinstance(x, bool) for x in a)), [True])
        return (KernelForm.ROWS if grads[0] else KernelForm.COLUMNS), over
    if func.overloadpacket in PRODUCTS and _thin(*(factors := [t for t in read if t.dim() >= 2][-2:])):
        large = max((made[0], *factors), key=lambda t: t.numel())
        if large is made[0]:
            return KernelForm.ELEMENTS, large.numel()
        along = large.stride(-1 if large is factors[0] else -2)
        return (KernelForm.ROWS if along == 1 else KernelForm.COLUMNS), large.numel()
    if torch.Tag.reduction in func.tags and read:
        dims = args[1] if len(args) > 1 and isinstance(args[1], int | list) else []
        inner = [read[0].stride(d) == 1 for d in ([dims] if isinstance(dims, int) else dims)]
        return (KernelForm.ROWS if any(inner) or not inner else KernelForm.COLUMNS), over
    if torch.Tag.pointwise in func.tags or plain in ELEMENTS:
        return KernelForm.ELEMENTS, max((t.numel() for t in made), default=0)
    return KernelForm.APART, 0


def touched(tensor: Tensor) -> int:
    """What a kernel touches of a tensor: an expanded one is read once, a slice as far as it goes."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or not size else 1
    return count * tensor.element_size()
