"""An order in which a net's times can be computed in one pass, whatever the durations."""

from typing import NamedTuple

import numpy as np

from cost_models.jit import jit
from ir.core.errors import PiperError
from ir.core.order import FloatArray, IntArray
from piper_sim.compiled.net import OpNet, missing
from piper_sim.engine.scenario import EngineScenario
from piper_sim.engine.stuck import deadlock


class OpOrder(NamedTuple):
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


class StreamHeads(NamedTuple):
    """Where streams stand. at: place of the head in `OpNet.queue`. seek: the first of its waits not known to have
    ended.

    asleep: [op] the first stream that sleeps until this op ends, -1 for none; behind: [stream] the next one.
    """

    at: IntArray
    step: IntArray
    seek: IntArray
    asleep: IntArray
    behind: IntArray


def heads(net: OpNet) -> StreamHeads:
    """Every stream before its first op."""
    streams = len(net.queue_at) - 1
    at, step, behind = net.queue_at[:streams].copy(), *np.zeros((2, streams), dtype=np.int64)
    return StreamHeads(at, step, net.wait_at[net.queue[at]], np.full(len(net.stream), -1), behind)


class StreamProgress(NamedTuple):
    """How far streams come when nothing takes time. By step and op: 0 where an op has started or ended, else -1.

    order: the ops that started, in an order in which they can; of buffered receives, those whose message was there.
    """

    order: IntArray
    start: FloatArray
    end: FloatArray


def arranged(net: OpNet, steps: int = 1) -> StreamProgress:
    """Let all streams go on until none can."""
    order = np.empty(steps * len(net.stream), dtype=np.int64)
    start, end = np.full((2, steps, len(net.stream)), -1.0)
    todo, come = np.arange(len(net.queue_at) - 1)[::-1].copy(), np.zeros(len(net.work), dtype=np.int64)
    count = arrange(net, heads(net), todo, come, order, start, end)
    return StreamProgress(order[:count], start, end)


def stuck(scenario: EngineScenario, net: OpNet, steps: int) -> PiperError:
    """The story of streams that cannot go on."""
    _, start, end = arranged(net, steps)
    post = end[:, net.ops :] if scenario.host else None
    return deadlock(scenario, start[:, : net.ops] >= 0, end[:, : net.ops] >= 0, post)


def build(net: OpNet, reached: StreamProgress) -> OpOrder | None:
    """The path along the order that was found; None where streams get stuck."""
    order, n, streams = reached.order, len(net.stream), len(net.queue_at) - 1
    if len(order) < n:
        return None
    place = np.empty(n, dtype=np.int64)
    place[order] = np.arange(n)
    sends = np.zeros(n, dtype=np.bool_)
    sends[net.gate[net.gate >= 0]] = True
    leaves = np.where(sends, n, 0) + np.arange(n)  # a buffered send frees its stream at its start
    ahead = np.empty(n, dtype=np.int64)
    ahead[net.queue] = leaves[np.roll(net.queue, 1)]
    ahead[net.queue[net.queue_at[:-1]]] = 2 * n + np.arange(streams)
    free = leaves[net.queue[net.queue_at[1:] - 1]]
    kept = np.unique(net.wait[net.wait >= n])
    wait = np.where(net.wait < n, net.wait, 2 * n + streams + np.searchsorted(kept, net.wait))
    before_at = np.zeros(n + 1, dtype=np.int64)
    np.cumsum(np.diff(net.wait_at)[order] + 1, out=before_at[1:])
    before = np.empty(int(before_at[-1]), dtype=np.int64)
    fill(order, ahead, net.wait_at, wait, before_at, before)
    return OpOrder(order, before_at, before, _acts(net, place), np.append(free, kept - n))


def _acts(net: OpNet, place: IntArray) -> IntArray:
    act = np.full(len(place), LONE)
    size = np.diff(net.member_at)
    latest = np.maximum.reduceat(place[net.member], net.member_at[:-1])
    act[place[net.member[np.repeat(size, size) > 1]]] = EARLY
    act[latest[net.work < 0]] = GROUP
    pair = np.flatnonzero((net.work >= 0) & (size == 2))
    both = net.member[net.member_at[pair][:, None] + np.arange(2)]
    act[latest[pair]] = np.where(place[both[:, 0]] == latest[pair], both[:, 1], both[:, 0])
    act[place[net.gate >= 0]] = LATE
    return act


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
def sleep(hd: StreamHeads, s: int, j: int) -> None:
    """Let stream s sleep until op j ends."""
    hd.behind[s] = hd.asleep[j]
    hd.asleep[j] = s


@jit
def wake(hd: StreamHeads, j: int, todo: IntArray, size: int) -> int:
    """Put every stream that sleeps on op j on `todo`; returns its new size."""
    s = hd.asleep[j]
    hd.asleep[j] = -1
    while s >= 0:
        todo[size] = s
        size += 1
        s = hd.behind[s]
    return size


@jit
def advance(net: OpNet, hd: StreamHeads, s: int, steps: int) -> bool:
    """Turn stream s to its next op; False behind the last op of the last step."""
    hd.at[s] += 1
    if hd.at[s] == net.queue_at[s + 1]:
        hd.at[s] = net.queue_at[s]
        hd.step[s] += 1
        if hd.step[s] == steps:
            return False
    hd.seek[s] = net.wait_at[net.queue[hd.at[s]]]
    return True


@jit
def arrange(
    net: OpNet, hd: StreamHeads, todo: IntArray, come: IntArray, order: IntArray, start: FloatArray, end: FloatArray
) -> int:
    """Fill what `StreamProgress` says; returns how many ops were reached.

    An op that cannot go on sleeps on the first thing it misses, and only the end of that wakes its stream.
    """
    size, count = len(todo), 0
    while size:
        size -= 1
        s = todo[size]
        i, k = net.queue[hd.at[s]], hd.step[s]
        hd.seek[s] = missing(net, end, k, i, hd.seek[s])
        if hd.seek[s] < net.wait_at[i + 1]:
            sleep(hd, s, net.wait[hd.seek[s]] % len(net.stream))
            continue
        start[k, i] = 0.0
        if net.gate[i] >= 0 and end[k, net.gate[i]] < 0:
            sleep(hd, s, net.gate[i])
            continue
        order[count] = i
        count += 1
        m = net.meeting[i]
        come[m] += 1
        if come[m] < net.member_at[m + 1] - net.member_at[m]:
            continue
        come[m] = 0
        for x in range(net.member_at[m + 1] - 1, net.member_at[m] - 1, -1):
            j = net.member[x]
            own = net.stream[j]
            end[hd.step[own], j] = 0.0
            size = wake(hd, j, todo, size)
            if advance(net, hd, own, len(end)):
                todo[size] = own
                size += 1
    return count
