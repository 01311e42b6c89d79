"""Reserved bytes by replaying one process's allocations through a model of PyTorch's CUDA caching allocator. Modelled.

What the model does, after c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h (PyTorch 2.2 to 2.10) and
the notes on memory management in PyTorch's documentation:

- a request is rounded up to 512 bytes; up to 1 MiB it is served from the small pool, else from the large one;
- the smallest free block that is large enough serves it, the one at the lowest address among equals. A rest of 512
  bytes (small) or more than 1 MiB (large) is cut off; else the block is handed out whole and counts as allocated;
- where none is free the driver is asked for a segment: 2 MiB (small), 20 MiB (under 10 MiB), else whole 2 MiB;
- a freed block joins its free neighbours in the segment; nothing goes back to the driver, until
- the driver refuses: then all segments without a block in use go back, and the request is tried once more.

`expandable=True` is `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`: one segment per pool, to which memory is mapped
in pages of 2 MiB (small) and 20 MiB (large) at the lowest address with room; any rest of 512 bytes is cut off; a block
that can grow is used last; whole free pages are unmapped when the driver refuses.

All requests come from one stream: plans free on compute ops whose waits prove every reader done, so buffers of
communication share the compute stream's pool. Later segments get higher addresses (the driver promises no order).
Not modelled: `max_split_size_mb`, `roundup_power2_divisions`, `garbage_collection_threshold`, CUDA graphs' pools.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from ir.core.order import IntArray

UNLIMITED = 2**62
STEPS = 2
"""The second step starts from the first's cache; see tests/piper_sim/memory/test_memory.py for what a third changes."""


@dataclass(frozen=True, slots=True, eq=False)
class MemoryRequests:
    """What one process asks for. state: bytes allocated once, before the first step, and never freed.

    events: one step in host order: a >= 0 makes allocation a, ~a frees it; what is left is freed at the step's end.
    sizes: bytes of each allocation, as asked for; 0 takes nothing.
    """

    state: Sequence[int]
    events: IntArray
    sizes: IntArray


@dataclass(frozen=True, slots=True)
class MemoryPeaks:
    """Bytes at the peak. allocated: `max_memory_allocated`, blocks as handed out; reserved: `max_memory_reserved`.

    given_back: how often cached memory went back to the driver to make room; each time stalls the device.
    refused: index into `events` of the first request that found no room, -1 where that was state, None: none.
    """

    allocated: int
    reserved: int
    given_back: int
    refused: int | None


def replay(
    requests: MemoryRequests, *, limit: int = UNLIMITED, expandable: bool = False, steps: int = STEPS
) -> MemoryPeaks:
    """Replay some equal steps. limit: bytes the driver has for this process.

    >>> MIB = 2**20
    >>> one = MemoryRequests((), np.array([0, ~0]), np.array([11 * MIB]))
    >>> replay(one).reserved // MIB, replay(one, expandable=True).reserved // MIB, replay(one, limit=11 * MIB).refused
    (12, 20, 0)
    """
    from cost_models.allocator import blocks, pools  # import numba

    columns = (np.ascontiguousarray(x, np.int64) for x in (requests.state, requests.events, requests.sizes))
    fixed, events, sizes = (_fast(c) for c in columns)
    heap = blocks.MemoryBlocks(*_columns(len(fixed) + int((requests.events >= 0).sum()), steps, blocks.COUNTS))
    scratch = _fast(np.empty(len(sizes), dtype=np.int64))
    served = int(pools.run(heap, fixed, events, sizes, scratch, steps, limit, expandable))
    refused = None
    if served >= 0:
        refused = (served - len(fixed)) % len(events) if served >= len(fixed) else -1
    counts = (blocks.MOST_ALLOCATED, blocks.MOST_RESERVED, blocks.GIVEN_BACK)
    allocated, reserved, given_back = (int(heap.tally[c]) for c in counts)
    return MemoryPeaks(allocated, reserved, given_back, refused)


def _columns(made: int, steps: int, counts: int) -> list[IntArray]:
    """Room for all blocks at one time. With n in use there are at most 4 n + 3 blocks, or 2 n and every segment.

    Between two used blocks lie at most a free, an unmapped and a free one right after memory was given back; later
    growth only fills unmapped ones. A segment is made by a request.
    """
    most = (4 + steps) * made + 16
    return [_fast(np.empty(n, dtype=np.int64)) for n in (most,) * 5 + (2 * most, most, counts)]


def _fast(column: IntArray) -> IntArray:
    """Lists where numba is missing: plain Python reads them five times as fast as arrays."""
    from cost_models.jit import numba

    return column if numba is not None else cast(Any, column.tolist())
