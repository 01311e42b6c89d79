"""The caching allocator's blocks, as arrays: found, cut and joined. Compiled; see `allocator` for the rules.

A block is a number; its columns stand in `MemoryBlocks`. Blocks of one segment are linked in order of address. Free
blocks of a pool stand sorted by size, then address.
"""

from typing import NamedTuple

from cost_models.jit import jit
from ir.core.order import IntArray

USED, FREE, UNMAPPED = 0, 1, 2
SPARE, MADE, TOP, ALLOCATED, RESERVED, MOST_ALLOCATED, MOST_RESERVED, GIVEN_BACK = range(2, 10)
COUNTS = 10


class MemoryBlocks(NamedTuple):
    """Columns by block, and the rest. before, behind: neighbours in the segment, -1 at its ends.

    free: small pool's free blocks in the first half, the large pool's in the second. spare: numbers to use again.
    tally: how many of both, then the counters named above.
    """

    address: IntArray
    size: IntArray
    before: IntArray
    behind: IntArray
    state: IntArray
    free: IntArray
    spare: IntArray
    tally: IntArray


@jit
def rank(h: MemoryBlocks, pool: int, size: int, address: int) -> int:
    """Where in `free` the first block of at least this size, then address, stands."""
    low = pool * (len(h.free) // 2)
    high = low + h.tally[pool]
    while low < high:
        middle = (low + high) // 2
        b = h.free[middle]
        if h.size[b] < size or (h.size[b] == size and h.address[b] < address):
            low = middle + 1
        else:
            high = middle
    return low


@jit
def offer(h: MemoryBlocks, pool: int, b: int) -> None:
    """Put a block among the free ones."""
    at = rank(h, pool, h.size[b], h.address[b])
    for i in range(pool * (len(h.free) // 2) + h.tally[pool], at, -1):
        h.free[i] = h.free[i - 1]
    h.free[at] = b
    h.tally[pool] += 1
    h.state[b] = FREE


@jit
def withdraw(h: MemoryBlocks, pool: int, at: int) -> int:
    """Take the block at this place of `free` out."""
    b = int(h.free[at])
    h.tally[pool] -= 1
    for i in range(at, pool * (len(h.free) // 2) + h.tally[pool]):
        h.free[i] = h.free[i + 1]
    return b


@jit
def new(h: MemoryBlocks, address: int, size: int, before: int, behind: int, state: int) -> int:
    """A block's number."""
    if h.tally[SPARE]:
        h.tally[SPARE] -= 1
        b = int(h.spare[h.tally[SPARE]])
    else:
        b = int(h.tally[MADE])
        h.tally[MADE] += 1
    h.address[b], h.size[b], h.before[b], h.behind[b], h.state[b] = address, size, before, behind, state
    return b


@jit
def forget(h: MemoryBlocks, b: int) -> None:
    """Its number may be used again."""
    h.spare[h.tally[SPARE]] = b
    h.tally[SPARE] += 1


@jit
def split(h: MemoryBlocks, b: int, size: int) -> int:
    """Cut a block to this size; the rest becomes a block of the same state behind it."""
    rest = new(h, h.address[b] + size, h.size[b] - size, b, h.behind[b], h.state[b])
    if h.behind[b] >= 0:
        h.before[h.behind[b]] = rest
    h.behind[b] = rest
    h.size[b] = size
    return rest


@jit
def join(h: MemoryBlocks, a: int, b: int) -> None:
    """Make b, right behind a, a part of it."""
    h.size[a] += h.size[b]
    h.behind[a] = h.behind[b]
    if h.behind[b] >= 0:
        h.before[h.behind[b]] = a
    forget(h, b)


@jit
def free(h: MemoryBlocks, pool: int, b: int) -> int:
    """Join a block with its free neighbours and offer the whole."""
    a, c = h.before[b], h.behind[b]
    before, behind = a >= 0 and h.state[a] == FREE, c >= 0 and h.state[c] == FREE
    if not before and not behind:
        offer(h, pool, b)
        return b
    if before and behind:
        withdraw(h, pool, rank(h, pool, h.size[c], h.address[c]))
    x, first = (a, a) if before else (c, b)
    size = h.size[b] + (h.size[a] if before else 0) + (h.size[c] if behind else 0)
    old, new = rank(h, pool, h.size[x], h.address[x]), rank(h, pool, size, h.address[first]) - 1
    for i in range(old, new):  # the whole is larger than the neighbour in whose place it comes
        h.free[i] = h.free[i + 1]
    h.free[new] = first
    if behind:
        join(h, b, c)
    if before:
        join(h, a, b)
    h.state[first] = FREE
    return first


@jit
def cut(h: MemoryBlocks, pool: int, at: int, size: int) -> int:
    """Take the first bytes of the free block at this place of `free`; the rest stays free."""
    b = h.free[at]
    to = rank(h, pool, h.size[b] - size, h.address[b] + size)
    rest = split(h, b, size)
    for i in range(at, to, -1):  # the rest is smaller than the whole
        h.free[i] = h.free[i - 1]
    h.free[to] = rest
    return int(b)
