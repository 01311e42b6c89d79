"""What the allocator and the driver add to the bytes a program asks for. First version, modelled.

Allocated bytes come from the plan's buffers, in blocks of 512. Reserved bytes are what the caching allocator has taken
from the driver: here allocated times a band from the hardware file, not yet a replay of its pools. Outside the
allocator live the context and the communicators' buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.hardware import Hardware
from cost_models.hardware.schema import GIB, MIB

BLOCK = 512
_SMALL, _SMALL_SEGMENT = 1 * MIB, 2 * MIB
_MIDDLE, _MIDDLE_SEGMENT, _LARGE_GRAIN = 10 * MIB, 20 * MIB, 2 * MIB


@dataclass(frozen=True, slots=True)
class Band:
    """A modelled number with the range it is expected in, bytes."""

    low: int
    middle: int
    high: int


def block_bytes(nbytes: int) -> int:
    """What one tensor counts as in `memory_allocated`: whole blocks of 512 bytes.

    >>> block_bytes(1), block_bytes(512), block_bytes(0)
    (512, 512, 0)
    """
    return -(-nbytes // BLOCK) * BLOCK


def segment_bytes(nbytes: int) -> int:
    """What the CUDA caching allocator asks of the driver when no cached block fits (c10/cuda/CUDACachingAllocator).

    >>> [segment_bytes(n) // MIB for n in (1000, 3 * MIB, 11 * MIB)]
    [2, 20, 12]
    """
    if nbytes <= 0:
        return 0
    if nbytes <= _SMALL:
        return _SMALL_SEGMENT
    if nbytes < _MIDDLE:
        return _MIDDLE_SEGMENT
    return -(-nbytes // _LARGE_GRAIN) * _LARGE_GRAIN


def reserved_bytes(allocated: int, hw: Hardware) -> Band:
    """Peak reserved bytes for a peak of allocated ones: the hardware file's band, in the allocator's grain. Modelled.

    >>> from cost_models.hardware import load_hardware
    >>> reserved_bytes(100 * GIB, load_hardware("b200-sxm")).middle // GIB
    104
    """
    if allocated < 0:
        raise ValueError(f"{allocated} bytes allocated")
    low, middle, high = (segment_bytes(int(allocated * factor)) for factor in hw.reserved_over_allocated)
    return Band(low, middle, high)


def context_bytes(hw: Hardware, communicators: int) -> int:
    """Bytes outside the allocator on one rank: driver context and modules, buffers of each communicator. Modelled.

    communicators: those the rank is a member of with more than one rank, each process group counted once.

    >>> from cost_models.hardware import load_hardware
    >>> context_bytes(load_hardware("h100-sxm"), 2) // MIB
    1546
    """
    if communicators < 0:
        raise ValueError(f"{communicators} communicators")
    return int((hw.context_MiB + communicators * hw.communicator_MiB) * MIB)


def device_bytes(allocated: int, communicators: int, hw: Hardware) -> Band:
    """Peak bytes in use on the device: reserved and context, as a band. Modelled."""
    reserved, context = reserved_bytes(allocated, hw), context_bytes(hw, communicators)
    return Band(reserved.low + context, reserved.middle + context, reserved.high + context)


def margin_bytes(device_peak: int, hw: Hardware, memory_margin_GiB: float = 0.0) -> int:
    """Bytes left under the driver's total less the margin asked for; a job fits if this is not negative."""
    return hw.hbm_bytes - int(memory_margin_GiB * GIB) - device_peak
