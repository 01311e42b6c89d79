"""How long a piece of work takes: on a CPU by the clock; on a GPU between events, with caches flushed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from executor.device import clock
from executor.device.device import CudaDevice, Device

WARM_UP = 3  # repetitions that are not counted
HOLD_S = 0.001  # for which the GPU is kept busy at first, so that the host has launched all before the work begins
MOST_HOLD_S = 0.01  # work that waits for the GPU itself would ask for ever more
CYCLES_PER_S = 2e9  # of the spinning kernel; a clock that is slower holds longer
FLUSH = 2  # times the second-level cache


class DeviceTimer(Protocol):
    """Times one call."""

    def __call__(self, work: Callable[[], object]) -> float:
        """Seconds that the work takes where it is done."""


class HostDeviceTimer:
    """Of a host that does everything itself.

    >>> HostDeviceTimer()(lambda: None) < 1.0
    True
    """

    def __call__(self, work: Callable[[], object]) -> float:
        began_s = clock.now()
        work()
        return clock.now() - began_s


class CudaDeviceTimer:
    """Of a GPU. Before the first event its second-level cache is overwritten, so that nothing is found there which a
    training step would have pushed out; then a kernel spins for as long as the host needs to launch the work, so that
    no gap between launches is counted.
    """

    def __init__(self, device: torch.device) -> None:
        size = int(torch.cuda.get_device_properties(device).L2_cache_size)
        self._flush = torch.empty(max(FLUSH * size, 2**20), dtype=torch.uint8, device=device)
        self._hold_s = HOLD_S
        self._device = device

    def __call__(self, work: Callable[[], object]) -> float:
        """Between two events of the current stream, which is waited for."""
        event: Any = torch.cuda.Event
        start, end = event(enable_timing=True), event(enable_timing=True)
        torch.cuda.synchronize(self._device)
        self._flush.zero_()
        torch.cuda._sleep(int(self._hold_s * CYCLES_PER_S))
        began_s = clock.now()
        start.record()
        work()
        end.record()
        launching_s = clock.now() - began_s
        end.synchronize()
        if launching_s > self._hold_s:  # the next repetition is held for longer
            self._hold_s = min(MOST_HOLD_S, 2 * launching_s)
        return float(start.elapsed_time(end)) / 1e3


def watch_of(device: Device) -> DeviceTimer:
    """The one for a device."""
    return CudaDeviceTimer(device.torch) if isinstance(device, CudaDevice) else HostDeviceTimer()
