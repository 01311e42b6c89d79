"""Waits: what every op needs from other streams, each said once. One running maximum per pair of streams."""

from __future__ import annotations

import numpy as np

from ir.order import BoolArray, IntArray


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
    by = np.lexsort((position[on], position[row], pair))
    row, on, pair = row[by], on[by], pair[by]
    segment = np.cumsum(np.concatenate([[0], (np.diff(pair) != 0).astype(np.int64)]))
    reach = running_max(position[on], segment)
    last: BoolArray = np.ones(len(row), dtype=bool)
    last[:-1] = (row[1:] != row[:-1]) | (segment[1:] != segment[:-1])
    row, reach, segment, on = row[last], reach[last], segment[last], on[last]
    fresh: BoolArray = np.ones(len(row), dtype=bool)
    fresh[1:] = (segment[1:] != segment[:-1]) | (reach[1:] > reach[:-1])
    return row[fresh], on[fresh]


def proven(
    row: IntArray, on: IntArray, needed_row: IntArray, needed_on: IntArray, stream: IntArray, position: IntArray, streams: int
) -> BoolArray:
    """For each needed (row, on): do stream order and the given waits say that `on` has ended before `row` starts?"""
    same = stream[needed_row] == stream[needed_on]
    ok: BoolArray = same & (position[needed_on] < position[needed_row])
    rest = np.flatnonzero(~same)
    if not len(rest):
        return ok
    pair_w = stream[row] * streams + stream[on]
    pair_n = stream[needed_row[rest]] * streams + stream[needed_on[rest]]
    pair = np.concatenate([pair_w, pair_n])
    at = np.concatenate([position[row], position[needed_row[rest]]])
    value = np.concatenate([position[on], np.full(len(rest), -1)])
    is_need = np.concatenate([np.zeros(len(row), np.int64), np.ones(len(rest), np.int64)])
    by = np.lexsort((is_need, at, pair))
    segment = np.cumsum(np.concatenate([[0], (np.diff(pair[by]) != 0).astype(np.int64)]))
    reach = np.empty(len(by), dtype=np.int64)
    reach[by] = running_max(value[by], segment)
    ok[rest] = reach[len(row) :] >= position[needed_on[rest]]
    return ok
