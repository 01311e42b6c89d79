"""One aten call as the kernel it is: FLOPs by torch's formulas, bytes read and written, the shape of its product."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

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

GATHERS = (_aten.embedding, _aten.index_select, _aten.gather, _aten.index)


def kernel_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, read: Sequence[Tensor], made: Sequence[Tensor]
) -> Kernel | None:
    """The kernel of one call; None where nothing is computed or moved. made: outputs with storages of their own."""
    packet, name = func.overloadpacket, func.overloadpacket.__name__
    wrote = [*made, *(a for a in args[:1] if name.endswith("_") and isinstance(a, Tensor))]
    if not wrote or name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach"):
        return None
    # A gather reads the rows it wants, not the table.
    moved = sum(_bytes(t) for t in ((*wrote, *wrote, *read[1:]) if packet in GATHERS else (*read, *wrote)))
    dtype = next((FORMATS[t.dtype] for t in (*wrote, *read) if t.dtype in FORMATS), DType.FP32)
    if packet in ATTENTION:
        q, k, v = [t for t in read if t.dim() == 4][packet.__name__.endswith("backward") :][:3]
        shape = (*q.shape[:3], k.shape[2], q.shape[3], v.shape[3])
        return Kernel(KernelKind.ATTENTION, ATTENTION[packet](*args, **kwargs), moved, dtype, shape, name)
    flops = int(flop_registry[packet](*args, **kwargs, out_val=out)) if packet in flop_registry else 0
    factors = [t for t in read if t.dim() >= 2][-2:]  # an addmm reads its bias first
    if len(factors) < 2 or not flops:
        return Kernel(KernelKind.MEMORY, flops, moved, dtype, (), name)
    a, b = factors
    if packet in (_aten.mm, _aten.addmm):
        return Kernel(KernelKind.GEMM, flops, moved, dtype, (a.shape[0], b.shape[1], a.shape[1]), name)
    if packet in (_aten.bmm, _aten.baddbmm):
        shape = (a.shape[0], a.shape[1], b.shape[2], a.shape[2])
        return Kernel(KernelKind.GROUPED_GEMM, flops, moved, dtype, shape, name)
    return Kernel(KernelKind.MEMORY, flops, moved, dtype, (), name)


def _bytes(tensor: Tensor) -> int:
    """What a kernel touches of a tensor: an expanded one is read once, a slice as far as it goes."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or not size else 1
    return count * tensor.element_size()
