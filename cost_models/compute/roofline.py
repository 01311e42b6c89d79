"""Kernels to seconds: a roofline whose two rates depend on size. Every result is modelled, from one hardware file.

A kernel's arithmetic and its HBM traffic run side by side, but not perfectly: the larger counts whole, of the smaller
the share that the hardware file says stays unhidden. Then comes a fixed floor per launch. All terms only grow with
work, so more FLOPs or bytes are never faster. A kernel measured by itself runs at boost clocks until the power limit
holds, which takes milliseconds; in training (`DeviceHardware.in_training`) it always holds.
"""

import math
from functools import lru_cache
from typing import TypeVar

from cost_models.compute.host import host_seconds, launch_seconds
from cost_models.compute.optimizer import LISTS
from cost_models.hardware import DeviceHardware
from cost_models.hardware.schema import RecurrenceKernel
from cost_models.software.dispatcher import fp8_casts
from ir.core.errors import ErrorKind, PiperError
from ir.core.order import FloatArray
from ir.core.work import (
    CAST,
    DROPOUT,
    EXPERTS,
    LOSS,
    SCAN,
    SCAN_BACK,
    SCAN_PASS,
    SORTS,
    WEIGHT_GRAD,
    DType,
    Kernel,
    KernelKind,
    Work,
)

Seconds = TypeVar("Seconds", float, FloatArray)
SPLITS = (1, 2, 4, 8)
_Q_TILE = 128
_ALIGNED, _NARROW = 16, 64


def work_seconds(work: Work, hw: DeviceHardware, sms: int | None = None) -> float:
    """Seconds of a node's kernels, one after the other, alone on the device."""
    return math.fsum(kernel_seconds(kernel, hw, sms) for kernel in work)


def kernel_seconds(kernel: Kernel, hw: DeviceHardware, sms: int | None = None) -> float:
    """Seconds of `kernel.count` launches, alone on the device; on `sms` of its SMs if some are taken by others.

    >>> from cost_models.hardware import load_hardware
    >>> from ir.core.work import DType
    >>> n = 8192
    >>> gemm = Kernel(KernelKind.GEMM, 2 * n**3, 3 * 2 * n * n, DType.BF16, (n, n, n))
    >>> hw = load_hardware("h100-sxm")
    >>> [round(gemm.flops / kernel_seconds(gemm, h) / 1e12) for h in (hw, hw.in_training())]  # TFLOP/s
    [775, 659]
    """
    moved = traffic(kernel, hw) * kernel.bytes
    if kernel.count == 0 or kernel.bytes > moved == 0:
        return 0.0
    arithmetic = arithmetic_seconds(kernel, hw, sms)
    memory = memory_seconds(moved, hw)
    once = max(arithmetic, memory)
    if kernel.kind is KernelKind.ATTENTION:
        once += hw.gemm.unhidden_memory[kernel.dtype.value] * min(arithmetic, memory)
    elif arithmetic > 0.0:
        once = settled(once, min(arithmetic, memory), kernel.dtype, hw)
    if hw.recurrence is not None and kernel.label.startswith(SCAN):
        once = _recurring(once, kernel, hw.recurrence)
    return kernel.count * dispatched(once + hw.kernel_launch_us * 1e-6, hw)


def dispatched(seconds: float, hw: DeviceHardware) -> float:
    """Seconds from one launch to the next: the longer of device and host, or both where a launch waits for its end.

    >>> from cost_models.hardware import load_hardware
    >>> round(1e6 * dispatched(1e-3, load_hardware("h100-sxm")))
    1000
    """
    host = host_seconds(hw.software.dispatch_us, hw)
    if not hw.blocking:
        return max(seconds, host)
    return seconds + max(host, launch_seconds(hw))


def settled(larger: Seconds, smaller: Seconds, dtype: DType, hw: DeviceHardware) -> Seconds:
    """Seconds of a product of which arithmetic and memory take these by themselves.

    Of the smaller a share stays unhidden; in a burst the power limit then adds the more the longer it lasts.
    """
    burst = None if hw.training else hw.gemm.burst
    if burst is None:
        return larger + hw.gemm.unhidden_memory[dtype.value] * smaller
    once = larger + burst.unhidden_memory.get(dtype.value, hw.gemm.unhidden_memory[dtype.value]) * smaller
    return once * (1.0 + burst.throttle.get(dtype.value, 0.0) * once / (once + burst.throttle_us * 1e-6))


def _recurring(once: float, kernel: Kernel, r: RecurrenceKernel) -> float:
    """Seconds of a recurrence's kernel whose products and traffic take `once`."""
    once /= r.backward if kernel.label.startswith(SCAN_BACK) else r.forward
    if kernel.kind is not KernelKind.GROUPED_GEMM or not kernel.label.endswith(SCAN_PASS):
        return once
    tokens = kernel.shape[-1]
    products = kernel.flops / (2 * math.prod(kernel.shape))
    return max(once, products * tokens * r.product_ns * 1e-9)


def traffic(kernel: Kernel, hw: DeviceHardware) -> float:
    """Bytes that count at an elementwise kernel's rate, over those that the kernel is listed with."""
    spread = kernel.kind is KernelKind.MEMORY and not kernel.label.startswith(LOSS)
    factor = hw.software.traffic if spread else 1.0
    if hw.dispatcher is not None and kernel.label in SORTS:
        factor *= hw.dispatcher.permute
    if kernel.label in LISTS:
        factor /= hw.multi_tensor_efficiency.get(kernel.dtype.value, 1.0)
    if kernel.label.endswith(CAST):
        said = (x for name, x in fp8_casts()[hw.fp8_recipe].items() if kernel.label.removesuffix(CAST).endswith(name))
        factor *= next(said, 1.0) / hw.cast_efficiency
    return factor


def memory_seconds(nbytes: float, hw: DeviceHardware) -> float:
    """Seconds to move bytes through HBM in one elementwise kernel: a rate, and a ramp worth a fixed number of bytes."""
    if nbytes <= 0:
        return 0.0
    return (nbytes + hw.memory_ramp_KiB * 1024) / (hw.hbm_bytes_per_s * hw.memory_efficiency)


def arithmetic_seconds(kernel: Kernel, hw: DeviceHardware, sms: int | None = None) -> float:
    """Seconds of one launch's arithmetic if HBM were free; 0 for memory-bound kinds, whose FLOPs ride along."""
    if kernel.flops <= 0 or kernel.kind is KernelKind.MEMORY:
        return 0.0
    narrow = kernel.kind is KernelKind.ATTENTION and kernel.dtype is DType.FP8
    peak = hw.peak_flops(DType.BF16 if narrow else kernel.dtype)
    match kernel.kind:
        case KernelKind.GEMM | KernelKind.GROUPED_GEMM:
            shape = kernel.shape
            if len(shape) == 3:
                shape = (1, *shape)
            share = _gemm_share(shape, kernel, hw, sms or hw.sms)
        case KernelKind.ATTENTION:
            share = _attention_share(kernel, hw, sms or hw.sms) * (_narrow_attention(kernel, hw) if narrow else 1.0)
    return kernel.flops / (peak * share)


def _gemm_share(shape: tuple[int, ...], kernel: Kernel, hw: DeviceHardware, sms: int) -> float:
    """Share of the device's peak that a GEMM of (groups, m, n, k) reaches."""
    main = main_share(kernel, hw)
    if not shape:
        return main * sms / hw.sms
    if len(shape) != 4 or min(shape) < 1:
        raise ValueError(
            f"{kernel.kind} {kernel.label!r}: not (m, n, k) or (groups, m, n, k) from 1 up: {kernel.shape}"
        )
    main *= 1.0 if aligned(kernel) else hw.gemm.unaligned
    return main * _tile_share(shape, hw.gemm.tiles, hw.gemm.ramp_bytes / kernel.dtype.bytes, hw.sms, sms)


def aligned(kernel: Kernel) -> bool:
    """Whether the rows of a product's tensors, which are as long as there are features, begin at 16 bytes.

    Narrow ones (a gate's) are no matter of tensor cores.

    >>> [aligned(Kernel(KernelKind.GEMM, 1, 1, DType.BF16, (4096, n, 768))) for n in (50257, 50304, 1)]
    [False, True, True]
    """
    m, n, k = kernel.shape[-3:]
    features = (m, n) if kernel.label.endswith(WEIGHT_GRAD) else (n, k)
    return not any(f * kernel.dtype.bytes % _ALIGNED for f in features if f >= _NARROW)


def main_share(kernel: Kernel, hw: DeviceHardware) -> float:
    """Share of peak of a product's main loop."""
    main = hw.gemm.efficiency[kernel.dtype.value]
    if kernel.kind is KernelKind.GROUPED_GEMM:
        main *= hw.gemm.grouped_efficiency
        if hw.fused_experts and kernel.dtype is DType.FP8 and kernel.label.startswith(EXPERTS):
            main *= hw.gemm.experts_fused or 1.0
    if kernel.label.endswith(WEIGHT_GRAD) and hw.fp8_recipe == "blocks":
        main *= hw.gemm.weight_grad.get(kernel.dtype.value, 1.0)
    if hw.training:
        main *= hw.gemm.sustained.get(kernel.dtype.value, 1.0) * hw.power_share
    elif hw.gemm.burst and hw.fp8_recipe == "tensor":
        main *= hw.gemm.burst.tensor_scaled.get(kernel.dtype.value, 1.0)
    return main


@lru_cache(maxsize=65536)
def _tile_share(
    shape: tuple[int, ...], tiles: tuple[tuple[int, int, float], ...], ramp_k: float, all_sms: int, sms: int
) -> float:
    """Share of the main-loop rate left after tiles, waves and ramps, with the best tile and split of K.

    The library cuts the output into tiles, one per SM at a time: partial tiles and a partial last wave cost like whole
    ones, and every tile pays its prologue and epilogue, as `ramp_k` more steps of K. Splitting K makes more tiles when
    there are fewer than SMs.
    """
    groups, m, n, k = shape
    best = math.inf
    for rows, columns, relative in tiles:
        count = groups * math.ceil(m / rows) * math.ceil(n / columns)
        for split in SPLITS:
            # Each piece of a split writes partial sums that must be added up: one more ramp.
            steps = math.ceil(k / split) + ramp_k * (1 if split == 1 else 2)
            best = min(best, math.ceil(count * split / sms) * rows * columns * steps / relative)
    return groups * m * n * k / (best * all_sms)


def _attention_share(kernel: Kernel, hw: DeviceHardware, sms: int) -> float:
    """Share of peak of a fused attention kernel; forward and backward are told apart by their FLOPs (or the label)."""
    a = hw.attention
    written = (a.portable if hw.software.portable_attention else 1.0) / hw.software.attention
    written *= a.sustained * hw.power_share if hw.training else 1.0
    if not kernel.shape:
        return written * a.forward_efficiency * sms / hw.sms
    if len(kernel.shape) != 6 or min(kernel.shape) < 1:
        raise ValueError(f"attention {kernel.label!r} needs (batch, heads, q, kv, qk_dim, v_dim), not {kernel.shape}")
    batch, heads, q, kv, qk_dim, v_dim = kernel.shape
    head = min((qk_dim + v_dim) / 2, a.head_limit) / 128
    share = a.backward_efficiency if is_backward(kernel) else a.forward_efficiency
    share *= written * math.pow(head, a.head_exponent)
    share /= _dropped_and_fixed(kernel, hw)
    share *= kv / (kv + a.ramp_tokens)
    # A part-filled tile costs a whole one, and fewer tiles than SMs leave SMs idle. Causal tiles differ in length, so a
    # last wave is not rounded up: what it costs is some waves more, however many there are.
    per_head = math.ceil(q / _Q_TILE)
    waves = batch * heads * per_head / sms
    busy = waves / (max(1.0, waves) + a.tail_waves * (1.0 - 1.0 / per_head))
    return min(share, 1.0) * q / (per_head * _Q_TILE) * busy * sms / hw.sms


def _narrow_attention(kernel: Kernel, hw: DeviceHardware) -> float:
    """Rate of an attention kernel in fp8 over its rate in 16 bits. Raises PiperError (hardware): none is known."""
    if (found := hw.attention.fp8.get(hw.fp8_recipe)) is None:
        message = f"{hw.name} has no attention in fp8 of the recipe {hw.fp8_recipe}"
        known = [f'cluster.fp8_recipe = "{x}"' for x in hw.attention.fp8]
        fix = next(iter(known), "leave precision.attention out")
        raise PiperError(
            ErrorKind.HARDWARE, message, key="precision.attention", allowed=["bf16", *known], suggestion=fix
        )
    *_, qk_dim, v_dim = kernel.shape
    if qk_dim + v_dim <= 2 * 128:
        found = hw.attention.fp8_narrow.get(hw.fp8_recipe, found)
    return found[is_backward(kernel)]


def _dropped_and_fixed(kernel: Kernel, hw: DeviceHardware) -> float:
    """Seconds of an attention kernel that draws dropout, or adds up in one order, over those of one that does neither.

    What drawing adds does not depend on how quick the rest is.
    """
    a, back, drops = hw.attention, is_backward(kernel), kernel.label.endswith(DROPOUT)
    own = a.fixed if a.portable_fixed is None or not hw.software.portable_attention else a.portable_fixed
    left = (1.0, own) if a.fixed_dropout is None or not drops else a.fixed_dropout
    plain = 1.0 / left[back] if hw.deterministic else 1.0
    return plain + (1.0 / a.dropout[back] - 1.0 if drops else 0.0)


def is_backward(kernel: Kernel) -> bool:
    """Whether an attention kernel is a backward one.

    A label that says so decides; else FLOPs do: forward does half (causal) or all of 2 b h q kv (qk + v), backward 2.5
    times that.
    """
    if "bwd" in kernel.label or "backward" in kernel.label:
        return True
    if "fwd" in kernel.label or "forward" in kernel.label:
        return False
    batch, heads, q, kv, qk_dim, v_dim = kernel.shape
    return kernel.flops > 1.1 * 2 * batch * heads * q * kv * (qk_dim + v_dim)
