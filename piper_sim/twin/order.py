"""An order in which a net's times can be computed in one pass, whatever the durations."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ir.order import BoolArray, IntArray
from piper_sim.twin.jit import jit
from piper_sim.twin.net import Net


class Path(NamedTuple):
    """The net's ops in an order in which each finds what it needs known. A value is an index into

        ends by op | starts by op | what the step before leaves: when each stream is free, ends that are carried over

    before: [place in the order] the values whose maximum is an op's start.
    act: [place] what its start completes: LONE, EARLY (others of its meeting are still to come), GROUP (its meeting),
    LATE (a buffered receive) or, of a pair, the other op.
    left: what a step leaves to the next, as values of its own.
    """

    order: IntArray
    before_at: IntArray
    before: IntArray
    act: IntArray
    left: IntArray


LONE, EARLY, GROUP, LATE = -1, -2, -3, -4


class Scratch(NamedTuple):
    """What `arrange` works with; see `events.Streams` for the words."""

    at: IntArray
    seek: IntArray
    todo: IntArray
    asleep: IntArray
    behind: IntArray
    come: IntArray
    ended: BoolArray


def arranged(net: Net) -> tuple[IntArray, IntArray]:
    """(ops in order, place of each op or -1). Where streams get stuck, the order ends early."""
    n, streams = len(net.stream), len(net.queue_at) - 1
    order, place = np.empty(n, dtype=np.int64), np.full(n, -1, dtype=np.int64)
    at, seek, todo, behind = net.queue_at[:streams].copy(), *np.empty((3, streams), dtype=np.int64)
    come, ended = np.zeros(len(net.work), dtype=np.int64), np.zeros(n, dtype=np.bool_)
    count = arrange(net, Scratch(at, seek, todo, place.copy(), behind, come, ended), order, place)
    return order[:count], place


def ended(net: Net, place: IntArray) -> BoolArray:
    """[op] whether all members of its meeting were reached."""
    out: BoolArray = (np.minimum.reduceat(place[net.member], net.member_at[:-1]) >= 0)[net.meeting]
    return out


def build(net: Net, order: IntArray, place: IntArray) -> Path:
    """From the order that `arrange` found, and where each op stands in it."""
    n, streams = len(order), len(net.queue_at) - 1
    sends = np.zeros(n, dtype=np.bool_)
    sends[net.gate[net.gate >= 0]] = True
    leaves = np.where(sends, n, 0) + np.arange(n)  # a buffered send frees its stream at its start
    first = np.zeros(n, dtype=np.bool_)
    first[net.queue_at[:-1]] = True
    ahead = np.empty(n, dtype=np.int64)
    ahead[net.queue] = np.where(first, 2 * n + net.stream[net.queue], leaves[np.roll(net.queue, 1)])
    free = leaves[net.queue[net.queue_at[1:] - 1]]
    kept = np.unique(net.wait[net.wait >= n])
    wait = np.where(net.wait < n, net.wait, 2 * n + streams + np.searchsorted(kept, net.wait))
    many = np.diff(net.wait_at)[order]
    before_at = np.zeros(n + 1, dtype=np.int64)
    np.cumsum(many + 1, out=before_at[1:])
    before = np.empty(int(before_at[-1]), dtype=np.int64)
    fill(order, ahead, net.wait_at, wait, before_at, before)
    act = np.full(n, LONE, dtype=np.int64)
    size = np.diff(net.member_at)
    latest = np.maximum.reduceat(place[net.member], net.member_at[:-1])
    act[place[net.member[np.repeat(size, size) > 1]]] = EARLY
    act[latest[net.work < 0]] = GROUP
    pair = np.flatnonzero((net.work >= 0) & (size == 2))
    both = net.member[net.member_at[pair][:, None] + np.arange(2)]
    act[latest[pair]] = np.where(place[both[:, 0]] == latest[pair], both[:, 1], both[:, 0])
    act[place[net.gate >= 0]] = LATE
    return Path(order, before_at, before, act, np.append(free, kept - n))


@jit
def fill(
    order: IntArray, ahead: IntArray, wait_at: IntArray, wait: IntArray, before_at: IntArray, before: IntArray
) -> None:
    """What each op of the order starts behind: the op ahead in its stream, then what it waits for."""
    for x in range(len(order)):
        i, e = order[x], before_at[x]
        before[e] = ahead[i]
        for w in range(wait_at[i], wait_at[i + 1]):
            e += 1
            before[e] = wait[w]


@jit
def arrange(net: Net, scratch: Scratch, order: IntArray, place: IntArray) -> int:
    """Fill `order` with ops as streams reach them, `place` with where each stands in it; returns how many were reached.

    An op that cannot go on sleeps on the first thing it misses, and only the end of that wakes its stream.
    """
    n, streams = len(net.stream), len(net.queue_at) - 1
    at, seek, todo, asleep, behind, come, ended = scratch
    size, count = 0, 0
    for s in range(streams - 1, -1, -1):
        seek[s] = net.wait_at[net.queue[at[s]]]
        todo[size] = s
        size += 1
    while size:
        size -= 1
        s = todo[size]
        i = net.queue[at[s]]
        w, last = seek[s], net.wait_at[i + 1]
        while w < last and (net.wait[w] >= n or ended[net.wait[w]]):
            w += 1
        seek[s] = w
        missing = net.wait[w] if w < last else net.gate[i]
        if missing >= 0 and not ended[missing]:
            behind[s], asleep[missing] = asleep[missing], s
            continue
        place[i], order[count] = count, i
        count += 1
        m = net.meeting[i]
        come[m] += 1
        if come[m] < net.member_at[m + 1] - net.member_at[m]:
            continue
        for k in range(net.member_at[m + 1] - 1, net.member_at[m] - 1, -1):
            j = net.member[k]
            ended[j] = True
            woken = asleep[j]
            while woken >= 0:
                todo[size] = woken
                size += 1
                woken = behind[woken]
            own = net.stream[j]
            at[own] += 1
            if at[own] < net.queue_at[own + 1]:
                seek[own] = net.wait_at[net.queue[at[own]]]
                todo[size] = own
                size += 1
    return count
