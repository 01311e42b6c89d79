"""A binary heap of numbered items by a key that may change, in arrays. `where[x]` is x's place in it, -1 outside."""

from cost_models.jit import jit
from ir.core.order import FloatArray, IntArray


@jit
def put(heap: IntArray, where: IntArray, key: FloatArray, size: int, x: int) -> int:
    """Insert x, or move it after its key changed; returns the new size.

    >>> import numpy as np
    >>> heap, where, key = np.zeros(3, int), np.full(3, -1), np.array([2.0, 1.0, 3.0])
    >>> size = put(heap, where, key, put(heap, where, key, put(heap, where, key, 0, 0), 1), 2)
    >>> key[0] = 0.5
    >>> size = put(heap, where, key, size, 0)
    >>> [int(pop(heap, where, key, n)) for n in (3, 2, 1)]
    [0, 1, 2]
    """
    if where[x] < 0:
        where[x] = size
        size += 1
    at = _up(heap, where, key, where[x], x)
    _down(heap, where, key, size, at, x)
    return size


@jit
def pop(heap: IntArray, where: IntArray, key: FloatArray, size: int) -> int:
    """Take out an item of the least key; the heap is one smaller then."""
    out, last = heap[0], heap[size - 1]
    where[out] = -1
    if size > 1:
        _down(heap, where, key, size - 1, 0, last)
    return int(out)


@jit
def _up(heap: IntArray, where: IntArray, key: FloatArray, at: int, x: int) -> int:
    while at > 0:
        above = (at - 1) >> 1
        other = heap[above]
        if key[other] <= key[x]:
            break
        heap[at], where[other] = other, at
        at = above
    heap[at], where[x] = x, at
    return at


@jit
def _down(heap: IntArray, where: IntArray, key: FloatArray, size: int, at: int, x: int) -> None:
    while True:
        below = 2 * at + 1
        if below >= size:
            break
        if below + 1 < size and key[heap[below + 1]] < key[heap[below]]:
            below += 1
        other = heap[below]
        if key[x] <= key[other]:
            break
        heap[at], where[other] = other, at
        at = below
    heap[at], where[x] = x, at
