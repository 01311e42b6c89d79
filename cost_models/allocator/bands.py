"""What the allocator and the driver add to the bytes a program asks for: rounding rules, bands, the context. Modelled.

Reserved bytes are what the caching allocator has taken from the driver. Where a plan's requests are known, `allocator`
replays them and `replayed_band` puts a band around the result; where only their peak is, `reserved_bytes` scales it.
Outside the allocator live the context and the communicators' buffers.
"""

from dataclasses import dataclass

from cost_models.hardware import DeviceHardware
from cost_models.hardware.schema import MIB

BLOCK = 512
"""Every request is a multiple of this."""

SMALL, SMALL_SEGMENT = 2**20, 2 * 2**20
"""Largest request of the small pool; its segments, and its pages with expandable segments."""

MIDDLE, MIDDLE_SEGMENT = 10 * 2**20, 20 * 2**20
"""Large requests below the first share segments of the second, which is also the large pool's page."""

LARGE_GRAIN = 2 * 2**20
"""Other segments are a multiple of this."""


@dataclass(frozen=True, slots=True)
class MemoryBand:
    """A modelled number with the range it is expected in, bytes."""

    low: int
    middle: int
    high: int


def segment_bytes(nbytes: int) -> int:
    """What the CUDA caching allocator asks of the driver when no cached block fits (c10/cuda/CUDACachingAllocator).

    >>> [segment_bytes(n) // MIB for n in (1000, 3 * MIB, 11 * MIB)]
    [2, 20, 12]
    """
    if nbytes <= 0:
        return 0
    if nbytes <= SMALL:
        return SMALL_SEGMENT
    if nbytes < MIDDLE:
        return MIDDLE_SEGMENT
    return -(-nbytes // LARGE_GRAIN) * LARGE_GRAIN


def reserved_bytes(allocated: int, hw: DeviceHardware) -> MemoryBand:
    """Peak reserved bytes where only the peak of allocated ones is known: the hardware file's band. Modelled.

    >>> from cost_models.hardware import load_hardware
    >>> reserved_bytes(100 * 2**30, load_hardware("b200-sxm")).middle // 2**30
    104
    """
    if allocated < 0:
        raise ValueError(f"{allocated} bytes allocated")
    low, middle, high = (segment_bytes(int(allocated * factor)) for factor in hw.reserved_over_allocated)
    return MemoryBand(low, middle, high)


def replayed_band(default: int, expandable: int, allocated: int, hw: DeviceHardware) -> MemoryBand:
    """A band around a replay of the allocator, from its peaks in both modes and the peak of the bytes asked for.

    middle: the default allocator. low: the better mode, as a rule expandable segments. high: the middle and an
    allowance for what a plan does not show: workspaces of libraries, temporaries of single kernels, pools of other
    streams, and buffers that the plan counts as one and a framework allocates as several. The allowance is the upper
    end of what measured runs reserve above what they allocate (the hardware file's `reserved_over_allocated`); it
    holds those runs' own fragmentation too, so on top of a replay it is generous. Where the file's middle is 1 there
    is no caching allocator (CPU), and the replay does not count.

    >>> from cost_models.hardware import load_hardware
    >>> band = replayed_band(102 * 2**30, 100 * 2**30, 100 * 2**30, load_hardware("b200-sxm"))
    >>> band.low >> 30, band.middle >> 30, band.high >> 30
    (100, 102, 110)
    """
    _, middle, high = hw.reserved_over_allocated
    if middle == 1:
        return reserved_bytes(allocated, hw)
    return MemoryBand(min(default, expandable), default, default + segment_bytes(int(allocated * (high - 1))))


def context_bytes(hw: DeviceHardware, communicators: int) -> int:
    """Bytes outside the allocator on one rank: driver context and modules, buffers of each communicator. Modelled.

    communicators: those the rank is a member of with more than one rank, each process group counted once.

    >>> from cost_models.hardware import load_hardware
    >>> context_bytes(load_hardware("h100-sxm"), 2) // MIB
    1546
    """
    if communicators < 0:
        raise ValueError(f"{communicators} communicators")
    return int((hw.context_MiB + communicators * hw.communicator_MiB) * MIB)
