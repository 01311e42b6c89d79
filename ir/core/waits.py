"""Waits: what every op needs from other streams, each said once. One running maximum per pair of streams."""

import numpy as np

from ir.core.order import BoolArray, IntArray


def running_max(values: IntArray, segment: IntArray) -> IntArray:
    """Running maximum that starts anew in each segment.

    >>> running_max(np.array([3, 1, 2]), np.array([0, 0, 1])).tolist()
    [3, 3, 2]
    """
    if not len(values):
        return values
    low = int(values.min())
    span = int(values.max()) - low + 1
    lifted = np.maximum.accumulate(values - low + segment * span)
    out: IntArray = lifted - segment * span + low
    return out


def segments(*keys: IntArray) -> IntArray:
    """0, 1, 2, … per run of equal keys."""
    new: BoolArray = np.zeros(len(keys[0]), dtype=bool)
    for k in keys:
        new[1:] |= k[1:] != k[:-1]
    return np.cumsum(new)


def order_by(*keys: IntArray) -> IntArray:
    """The order that sorts by the first key, then by the next, equal rows as they stand: `np.lexsort` backwards.

    Keys and places are packed into one number each, and the numbers sorted: several times as fast as `np.lexsort`.

    >>> order_by(np.array([1, 0, 1]), np.array([5, 9, 4])).tolist()
    [1, 2, 0]
    """
    count = len(keys[0])
    code, size, bits = np.zeros(count, dtype=np.int64), 1, count.bit_length()
    for key in keys if count else ():
        low = int(key.min())
        wide = int(key.max()) - low + 1
        size *= wide
        if size > 2 ** (63 - bits):
            return np.lexsort(keys[::-1])
        if wide > 1:  # in place, as new memory costs more than all else here
            code *= wide
            code += key
            code -= low
    code <<= bits
    code |= np.arange(count)
    code.sort()
    code &= (1 << bits) - 1
    return code


def grouped(key: IntArray, count: int) -> list[IntArray]:
    """[key] the places that have it, rising; those below 0 are nobody's.

    >>> [places.tolist() for places in grouped(np.array([1, -1, 1]), 2)]
    [[], [0, 2]]
    """
    order = order_by(key)
    return np.split(order, np.searchsorted(key[order], np.arange(count + 1)))[1:-1]


def strongest(
    row: IntArray, on: IntArray, stream: IntArray, position: IntArray, streams: int
) -> tuple[IntArray, IntArray]:
    """The waits that are not implied by stream order or by an earlier wait of the same stream.

    row, on: op `row` needs op `on` (final indices). stream, position: of each op, position counting inside its stream.

    >>> stream, position = np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])
    >>> [a.tolist() for a in strongest(np.array([2, 3, 3]), np.array([1, 0, 1]), stream, position, 2)]
    [[2], [1]]
    """
    other = stream[row] != stream[on]
    row, on = row[other], on[other]
    if not len(row):
        return row, on
    pair = stream[row] * streams + stream[on]
    by = order_by(pair, position[row], position[on])
    row, on, pair = row[by], on[by], pair[by]
    segment = np.cumsum(np.concatenate([[0], (np.diff(pair) != 0).astype(np.int64)]))
    reach = running_max(position[on], segment)
    last: BoolArray = np.ones(len(row), dtype=bool)
    last[:-1] = (row[1:] != row[:-1]) | (segment[1:] != segment[:-1])
    row, reach, segment, on = row[last], reach[last], segment[last], on[last]
    fresh: BoolArray = np.ones(len(row), dtype=bool)
    fresh[1:] = (segment[1:] != segment[:-1]) | (reach[1:] > reach[:-1])
    return row[fresh], on[fresh]
