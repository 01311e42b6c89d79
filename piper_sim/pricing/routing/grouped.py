"""Seconds of an experts part's kernels for many devices at once, each with its own rows per expert.

`cost_models.compute.roofline` prices one kernel whose groups are equal; here the same roofline, tiles, waves and
ramps take groups of different sizes, and give its seconds where they are equal. A forward or input-gradient product
has as many tiles as its experts need, each for itself. In a weight gradient rows are the summed dimension: every
expert has equally many tiles, and they differ in length; they take their mean length per wave, and no less than the
longest one. Bytes of weights, and of their gradients, count once for each expert that has rows. Without rows there
is no kernel.
"""

from dataclasses import dataclass

import numpy as np

from cost_models import DeviceHardware, kernel_seconds
from cost_models.compute.roofline import SPLITS, main_share, settled, traffic
from ir.core.order import FloatArray, IntArray
from ir.core.work import Kernel, KernelKind, Work


@dataclass(frozen=True, slots=True)
class KernelProbe:
    """One kernel for one expert with `rows` rows, and with twice as many: what does not grow comes with the expert."""

    rows: int
    once: Kernel
    twice: Kernel

    @property
    def line(self) -> tuple[int, float]:
        """Bytes for each expert and for each row."""
        return 2 * self.once.bytes - self.twice.bytes, (self.twice.bytes - self.once.bytes) / self.rows

    @property
    def grows(self) -> int:
        """Which of (groups, m, n, k) the rows are."""
        return next(d for d in range(4) if self.once.shape[d] != self.twice.shape[d])


def work_seconds(once: Work, twice: Work, rows: int, groups: IntArray, hw: DeviceHardware) -> FloatArray:
    """[device] seconds of a pass. once, twice: its kernels for one expert with `rows` rows, and twice as many.

    groups: [device, expert] rows.
    """
    by_expert = np.ascontiguousarray(groups.T)  # sums over the few experts are then sums of long rows
    out = np.zeros(len(groups))
    for a, b in zip(once, twice, strict=True):
        out += _seconds(KernelProbe(rows, a, b), by_expert, hw)
    return np.where(by_expert.sum(axis=0) > 0, out, 0.0)


def _seconds(probe: KernelProbe, groups: IntArray, hw: DeviceHardware) -> FloatArray:
    """[device] seconds of one kernel. groups, here and below: [expert, device] rows."""
    kernel = probe.once
    if traffic(kernel, hw) == 0:  # no kernel of its own, as `kernel_seconds` has it
        return np.zeros(groups.shape[1])
    if kernel == probe.twice and kernel.kind is not KernelKind.MEMORY:
        return np.full(groups.shape[1], kernel_seconds(kernel, hw))
    each, row = probe.line
    moved = traffic(kernel, hw) * (each * (groups > 0).sum(axis=0) + row * groups.sum(axis=0))
    memory = (moved + hw.memory_ramp_KiB * 1024) / (hw.hbm_bytes_per_s * hw.memory_efficiency)
    memory = np.where(moved > 0, memory, 0.0)
    once = memory
    if kernel.kind is not KernelKind.MEMORY:
        assert kernel.kind is KernelKind.GROUPED_GEMM, f"{kernel.label}: {kernel.kind} over rows of experts"
        arithmetic = _arithmetic(probe, groups, hw)
        once = settled(np.maximum(arithmetic, memory), np.minimum(arithmetic, memory), kernel.dtype, hw)
    return np.asarray(kernel.count * (once + hw.kernel_launch_us * 1e-6))


def _arithmetic(probe: KernelProbe, groups: IntArray, hw: DeviceHardware) -> FloatArray:
    """[device] seconds of the products if HBM were free, with the best tile and split of K."""
    dtype = probe.once.dtype
    ramp = hw.gemm.ramp_bytes / dtype.bytes
    best = np.full(groups.shape[1], np.inf)
    for height, width, relative in hw.gemm.tiles:
        for cost in _waves(probe, groups, height, width, ramp, hw.sms):
            best = np.minimum(best, cost * (height * width / relative))
    rate = hw.peak_flops(dtype) * main_share(probe.once, hw)
    return 2 * best * hw.sms / rate


def _waves(probe: KernelProbe, groups: IntArray, height: int, width: int, ramp: float, sms: int) -> list[FloatArray]:
    """For each split of K, [device] steps of K that an SM makes, one tile after the other."""
    _, m, n, k = probe.once.shape
    ramps = [ramp * (1 if split == 1 else 2) for split in SPLITS]
    if probe.grows == 1:
        tiles = -(-groups // height).sum(axis=0) * -(-n // width)
        return [np.ceil(tiles * s / sms) * (-(-k // s) + r) for s, r in zip(SPLITS, ramps, strict=True)]
    assert probe.grows == 3, f"{probe.once.label}: rows are neither m nor k"
    active = (groups > 0).sum(axis=0)
    tiles, out = active * (-(-m // height) * -(-n // width)), []
    for split, r in zip(SPLITS, ramps, strict=True):
        steps = np.where(groups > 0, -(-groups // split) + r, 0.0)
        mean = steps.sum(axis=0) / np.maximum(active, 1)
        out.append(np.maximum(np.ceil(tiles * split / sms) * mean, steps.max(axis=0)))
    return out
