"""What a device's allocator reserves for a plan: its requests, replayed through a model of the allocator."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from cost_models import DeviceHardware
from cost_models.allocator import UNLIMITED, MemoryRequests, replay
from cost_models.allocator.bands import MemoryBand, replayed_band
from ir.core.order import IntArray
from ir.plan.plan import Plan
from piper_sim.memory.timeline import Memory


@dataclass(frozen=True, eq=False)
class ReservedMemory:
    """What one program's allocator takes from the driver, and whether it gets it.

    reserved: peak bytes. allocated: peak of `torch.cuda.memory_allocated`, whole blocks. given_back: how often cached
    segments went back to the driver for room under the limit; each time stalls the device. fits: whether the default
    allocator serves all requests under the limit; else, bytes are those of a device without limit: what the plan would
    need. asked: None where nothing is cached. op: of each event; where nothing is cached, of the peak alone. wanted:
    what it would reserve without limit. peak: bytes asked for.
    """

    reserved: int
    allocated: int
    given_back: int
    fits: bool
    asked: MemoryRequests | None
    op: IntArray
    wanted: int
    peak: int
    limit: int
    hardware: DeviceHardware

    @cached_property
    def refused(self) -> int | None:
        """The op whose request cannot be served, -1 where that is the persistent state, None: all are served."""
        if self.fits:
            return None
        at = 0 if self.asked is None else replay(self.asked, limit=self.limit).refused
        assert at is not None
        return int(self.op[at]) if at >= 0 else at

    @cached_property
    def band(self) -> MemoryBand:
        """Peak reserved bytes, see `replayed_band`."""
        return replayed_band(self.reserved, self._expandable, self.peak, self.hardware)

    @cached_property
    def expandable_fits(self) -> bool:
        """Whether expandable segments serve all requests."""
        if self.asked is None or self._expandable <= self.limit:
            return self._expandable <= self.limit
        tight = self.wanted > self.limit
        return tight and replay(self.asked, limit=self.limit, expandable=True).refused is None

    @cached_property
    def _expandable(self) -> int:
        """Peak with expandable segments, replayed when it is asked for."""
        return self.reserved if self.asked is None else replay(self.asked, expandable=True).reserved


def bands(found: Sequence[ReservedMemory]) -> list[MemoryBand]:
    """The bands of several programs; compiled replays hold no lock."""
    with _threads(len(found)) as threads:
        return list(threads.map(lambda r: r.band, found))


def _threads(tasks: int) -> ThreadPoolExecutor:
    """No more than can run: starting one takes as long as a small replay."""
    return ThreadPoolExecutor(max(1, min(tasks, os.cpu_count() or 1)))


def requests(plan: Plan, found: Memory) -> list[tuple[MemoryRequests, IntArray]]:
    """Each program's requests of one step, and the op of each. State is one flat buffer per kind, as in Megatron."""
    op, size, request = found.asked
    sizes = np.zeros(int(request.max(initial=-1)) + 1, dtype=np.int64)
    sizes[request[request >= 0]] = size[request >= 0]
    cuts = np.searchsorted(op, plan.bounds).tolist()
    more = (found.library,) if found.library else ()
    state = [(s.parameters, s.gradients, s.optimizer, *more) for s in found.state]
    return [(MemoryRequests(s, request[a:b], sizes), op[a:b]) for s, (a, b) in zip(state, pairwise(cuts), strict=True)]


def reserved(plan: Plan, found: Memory, hardware: DeviceHardware, limit: int = UNLIMITED) -> tuple[ReservedMemory, ...]:
    """Replay every program's requests. limit: bytes that the driver has for the allocator: less context and margin."""
    if hardware.reserved_over_allocated[1] == 1:
        return tuple(_uncached(int(b), int(at), hardware, limit) for b, at in zip(found.peak, found.at, strict=True))
    asked = requests(plan, found)
    with _threads(len(asked)) as threads:
        return tuple(threads.map(lambda x, peak: _cached(x[0], x[1], int(peak), hardware, limit), asked, found.peak))


def _uncached(peak: int, at: int, hardware: DeviceHardware, limit: int) -> ReservedMemory:
    whole = replayed_band(peak, peak, peak, hardware).middle
    return ReservedMemory(whole, peak, 0, whole <= limit, None, np.array([at]), whole, peak, limit, hardware)


def _cached(asked: MemoryRequests, op: IntArray, peak: int, hardware: DeviceHardware, limit: int) -> ReservedMemory:
    default = used = replay(asked)
    fits = default.reserved <= limit
    if not fits and peak <= limit:  # what is asked for at a time has no room where it is more than all of it
        tight = replay(asked, limit=limit)
        fits = tight.refused is None
        used = tight if fits else default
    counts = (used.reserved, used.allocated, used.given_back, fits)
    return ReservedMemory(*counts, asked, op, default.reserved, peak, limit, hardware)
