"""The caching allocator's pools: best fit, segments, pages, and the replay of a trace. Compiled; see `allocator`.

With expandable segments each pool is one segment that starts at address 0 as one endless block without memory behind
it; block 0 (small pool) or 1 (large pool) always is its first.
"""

from cost_models.allocator.bands import BLOCK, LARGE_GRAIN, MIDDLE, MIDDLE_SEGMENT, SMALL, SMALL_SEGMENT
from cost_models.allocator.blocks import (
    ALLOCATED,
    COUNTS,
    FREE,
    GIVEN_BACK,
    MOST_ALLOCATED,
    MOST_RESERVED,
    RESERVED,
    TOP,
    UNMAPPED,
    USED,
    MemoryBlocks,
    cut,
    forget,
    free,
    join,
    new,
    offer,
    rank,
    split,
    withdraw,
)
from cost_models.jit import jit
from ir.core.order import IntArray

ENDLESS = 2**60


@jit
def _reach(h: MemoryBlocks, b: int) -> int:
    """The size an expandable block can grow to without moving."""
    c = h.behind[b]
    return int(h.size[b] + (h.size[c] if c >= 0 and h.state[c] == UNMAPPED else 0))


@jit
def _best(h: MemoryBlocks, pool: int, size: int, expandable: bool) -> int:
    """A free block to use, taken out and cut: the smallest that is large enough, then the lowest; -1: none."""
    end = pool * (len(h.free) // 2) + h.tally[pool]
    at = rank(h, pool, size, -1)
    if at == end:
        return -1
    if expandable:  # a block that can grow counts as what it can grow to
        while at + 1 < end and _reach(h, h.free[at + 1]) < _reach(h, h.free[at]):
            at += 1
    if _leaves(pool, h.size[h.free[at]] - size, expandable):
        return cut(h, pool, at, size)
    return withdraw(h, pool, at)


@jit
def _hold(h: MemoryBlocks, change: int) -> None:
    h.tally[RESERVED] += change
    h.tally[MOST_RESERVED] = max(h.tally[MOST_RESERVED], h.tally[RESERVED])


@jit
def _segment(h: MemoryBlocks, size: int, limit: int) -> int:
    """A new segment from the driver; -1: it would pass the limit. Later segments lie higher."""
    if size <= SMALL:
        size = SMALL_SEGMENT
    elif size < MIDDLE:
        size = MIDDLE_SEGMENT
    else:
        size = -(-size // LARGE_GRAIN) * LARGE_GRAIN
    if h.tally[RESERVED] + size > limit:
        return -1
    _hold(h, size)
    b = new(h, h.tally[TOP], size, -1, -1, USED)
    h.tally[TOP] += size
    return b


@jit
def _page(pool: int) -> int:
    return MIDDLE_SEGMENT if pool else SMALL_SEGMENT


@jit
def _map(h: MemoryBlocks, pool: int, b: int, size: int, limit: int) -> int:
    """Put memory behind the first bytes of an unmapped block, in whole pages; the free block they are then part of."""
    size = min(h.size[b], -(-size // _page(pool)) * _page(pool))
    if h.tally[RESERVED] + size > limit:
        return -1
    if size < h.size[b]:
        split(h, b, size)
    _hold(h, size)
    return free(h, pool, b)


@jit
def _extend(h: MemoryBlocks, pool: int, size: int, limit: int) -> int:
    """Map memory at the lowest address with room for the size, a free block right before it included; -1: no memory."""
    b, start = pool, -1
    while start < 0 and b >= 0:
        if h.state[b] == UNMAPPED:
            start = h.before[b] if h.before[b] >= 0 and h.state[h.before[b]] == FREE else b
            room, c = 0, start
            while c >= 0 and h.state[c] != USED and room < size:
                room += h.size[c]
                c = h.behind[c]
            if room < size:
                start = -1
        b = h.behind[b]
    if start >= 0 and h.state[start] == UNMAPPED:
        start = _map(h, pool, start, min(size, h.size[start]), limit)
    while start >= 0 and h.size[start] < size:
        start = _map(h, pool, h.behind[start], min(size - h.size[start], h.size[h.behind[start]]), limit)
    if start >= 0:
        withdraw(h, pool, rank(h, pool, h.size[start], h.address[start]))
    return start


@jit
def _return_segments(h: MemoryBlocks, pool: int) -> None:
    """Give back every segment of which nothing is in use."""
    start = pool * (len(h.free) // 2)
    kept = start
    for i in range(start, start + h.tally[pool]):
        b = h.free[i]
        if h.before[b] < 0 and h.behind[b] < 0:
            _hold(h, -h.size[b])
            forget(h, b)
        else:
            h.free[kept] = b
            kept += 1
    h.tally[pool] = kept - start


@jit
def _unmap(h: MemoryBlocks, pool: int) -> None:
    """Give back every page of which nothing is in use."""
    page = _page(pool)
    b = pool
    while b >= 0:
        first = -(-h.address[b] // page) * page
        end = (h.address[b] + h.size[b]) // page * page
        if h.state[b] == FREE and first < end:
            withdraw(h, pool, rank(h, pool, h.size[b], h.address[b]))
            if first > h.address[b]:
                rest = split(h, b, first - h.address[b])
                offer(h, pool, b)
                b = rest
            if h.address[b] + h.size[b] > end:
                offer(h, pool, split(h, b, end - first))
            _hold(h, first - end)
            h.state[b] = UNMAPPED
            if h.behind[b] >= 0 and h.state[h.behind[b]] == UNMAPPED:
                join(h, b, h.behind[b])
            if h.before[b] >= 0 and h.state[h.before[b]] == UNMAPPED:
                b = h.before[b]
                join(h, b, h.behind[b])
        b = h.behind[b]


@jit
def allocate(h: MemoryBlocks, pool: int, size: int, limit: int, expandable: bool) -> int:
    """A block for whole BLOCKs of bytes; -1: the device is full, also after everything cached was given back."""
    b = _best(h, pool, size, expandable)
    if b < 0:
        b = _extend(h, pool, size, limit) if expandable else _segment(h, size, limit)
    if b < 0:
        before = h.tally[RESERVED]
        for p in range(2):
            if expandable:
                _unmap(h, p)
            else:
                _return_segments(h, p)
        h.tally[GIVEN_BACK] += h.tally[RESERVED] < before
        b = _extend(h, pool, size, limit) if expandable else _segment(h, size, limit)
    if b < 0:
        return -1
    if _leaves(pool, h.size[b] - size, expandable):
        offer(h, pool, split(h, b, size))
    h.state[b] = USED
    h.tally[ALLOCATED] += h.size[b]
    h.tally[MOST_ALLOCATED] = max(h.tally[MOST_ALLOCATED], h.tally[ALLOCATED])
    return b


@jit
def passing(h: MemoryBlocks, pool: int, size: int) -> bool:
    """Count a block that is freed at once, where one is free for it: afterwards all is as before."""
    at = rank(h, pool, size, -1)
    if at == pool * (len(h.free) // 2) + h.tally[pool]:
        return False
    whole = h.size[h.free[at]]
    taken = size if _leaves(pool, whole - size, False) else whole
    h.tally[MOST_ALLOCATED] = max(h.tally[MOST_ALLOCATED], h.tally[ALLOCATED] + taken)
    return True


@jit
def _leaves(pool: int, rest: int, expandable: bool) -> bool:
    """Whether what a request leaves of a block is cut off."""
    return rest >= BLOCK if expandable or not pool else rest > SMALL


@jit
def start(h: MemoryBlocks, expandable: bool) -> None:
    """Empty pools."""
    for i in range(COUNTS):
        h.tally[i] = 0
    if expandable:
        for _ in range(2):
            new(h, 0, ENDLESS, -1, -1, UNMAPPED)


@jit
def run(
    h: MemoryBlocks,
    fixed: IntArray,
    events: IntArray,
    sizes: IntArray,
    at: IntArray,
    steps: int,
    limit: int,
    expandable: bool,
) -> int:
    """Allocate what is fixed, then replay the events step by step; what a step leaves is freed at its end.

    at: [allocation] scratch. Returns how many requests were served before one was refused; -1: none was.
    """
    start(h, expandable)
    for a in events:
        if a >= 0:
            at[a] = -1
    for i in range(len(fixed)):
        size = -(-fixed[i] // BLOCK) * BLOCK
        if size and allocate(h, int(size > SMALL), size, limit, expandable) < 0:
            return i
    for step in range(steps):
        i = -1
        while i + 1 < len(events):
            i += 1
            a = events[i]
            b = a if a >= 0 else ~a
            size = -(-sizes[b] // BLOCK) * BLOCK
            brief = size and a >= 0 and i + 1 < len(events) and events[i + 1] == ~a and not expandable
            if brief and passing(h, int(size > SMALL), size):
                i += 1
                continue
            if size and a >= 0:
                at[a] = allocate(h, int(size > SMALL), size, limit, expandable)
                if at[a] < 0:
                    return len(fixed) + step * len(events) + i
            elif size:
                h.tally[ALLOCATED] -= h.size[at[b]]
                free(h, int(size > SMALL), at[b])
                at[b] = -1
        for i in range(len(events)):
            a = events[i]
            if a >= 0 and at[a] >= 0:
                h.tally[ALLOCATED] -= h.size[at[a]]
                free(h, int(sizes[a] > SMALL), at[a])
                at[a] = -1
    return -1
