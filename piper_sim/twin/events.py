"""Where kernels and messages slow each other: an event loop with its own heap. docs/ENGINE.md is its arithmetic."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ir.order import BoolArray, FloatArray, IntArray
from ir.plan import Plan
from piper_sim.engine.contention import Interference
from piper_sim.engine.loop import Run
from piper_sim.twin.compiled import Compiled
from piper_sim.twin.heap import pop, put
from piper_sim.twin.jit import jit
from piper_sim.twin.net import Net
from piper_sim.twin.stuck import deadlock

GRID = 2.0**40


class Rates(NamedTuple):
    """Who slows whom, by op class: `Interference` as the kernels take it."""

    kind: IntArray
    held: FloatArray
    moving: FloatArray
    wire: FloatArray


class Streams(NamedTuple):
    """Where streams stand. at: place of the head in `Net.queue`. seek: the first of its waits not known to have ended.

    running: the meeting under way, -1 for none. pace: the rate its own program allows it.
    asleep: [op] the first stream that sleeps until this op ends, -1 for none; behind: [stream] the next one.
    """

    at: IntArray
    step: IntArray
    seek: IntArray
    running: IntArray
    pace: FloatArray
    asleep: IntArray
    behind: IntArray


class Meetings(NamedTuple):
    """State by meeting; until, heap and where are the heap of ends. touched: its pace changed in this settling."""

    come: IntArray
    left: FloatArray
    since: FloatArray
    rate: FloatArray
    until: FloatArray
    heap: IntArray
    where: IntArray
    touched: BoolArray


class Programs(NamedTuple):
    """How many ops of each class are in flight on each program, and whether its rates must be looked at."""

    held: IntArray
    moving: IntArray
    computing: IntArray
    dirty: BoolArray


class Lists(NamedTuple):
    """Streams to look at, programs that are dirty, meetings touched; size: of these and of the heap."""

    todo: IntArray
    dirty: IntArray
    touched: IntArray
    size: IntArray


TODO, DIRTY, TOUCHED, HEAP = 0, 1, 2, 3


def event_loop(plan: Plan, duration: FloatArray, interference: Interference, steps: int = 1) -> Run:
    """Run `steps` repetitions of the plan under pairwise interference. Transfers are rendezvous.

    duration: seconds of each op alone on its device, multiples of 2**-40.
    """
    c = Compiled.of(plan)
    rates = Rates(
        np.ascontiguousarray(interference.kind, dtype=np.int64),
        np.ascontiguousarray(interference.held, dtype=np.float64),
        np.ascontiguousarray(interference.moving, dtype=np.float64),
        np.ascontiguousarray(interference.wire, dtype=np.float64),
    )
    start, end = np.full((2, steps, c.ops), -1.0)
    play(c.net, rates, np.ascontiguousarray(duration, dtype=np.float64), *_state(c.net, *rates.held.shape), start, end)
    for posted, ended in zip(start >= 0, end >= 0, strict=True):
        if not ended.all():
            raise deadlock(plan, posted, ended)
    return Run(start, end)


def _state(net: Net, computes: int, comms: int) -> tuple[Streams, Meetings, Programs, Lists]:
    """Nothing has happened."""
    ops, streams, meetings, programs = len(net.stream), len(net.queue_at) - 1, len(net.work), len(net.lane_at) - 1

    def ints(size: int, value: int = 0) -> IntArray:
        return np.full(size, value, dtype=np.int64)

    def counts(classes: int) -> IntArray:
        return np.zeros((programs, classes), dtype=np.int64)

    left, since, rate, until = np.zeros((4, meetings))
    return (
        Streams(
            net.queue_at[:streams].copy(), ints(streams), net.wait_at[net.queue[net.queue_at[:streams]]],
            ints(streams, -1), np.zeros(streams), ints(ops, -1), ints(streams, -1),
        ),
        Meetings(
            ints(meetings), left, since, rate, until, ints(streams), ints(meetings, -1), np.zeros(meetings, np.bool_)
        ),
        Programs(counts(comms), counts(comms), counts(computes), np.zeros(programs, np.bool_)),
        Lists(np.arange(streams)[::-1].copy(), ints(programs), ints(streams), np.array([streams, 0, 0, 0])),
    )  # fmt: skip


@jit
def play(
    net: Net, rates: Rates, duration: FloatArray, st: Streams, mt: Meetings, pr: Programs, ls: Lists,
    start: FloatArray, end: FloatArray,
) -> None:  # fmt: skip
    """Fill start and end of every op and step; what is never reached stays negative."""
    t = 0.0
    while True:
        while ls.size[TODO]:
            ls.size[TODO] -= 1
            _look(net, rates, duration, st, mt, pr, ls, start, end, ls.todo[ls.size[TODO]], t)
        _settle(net, rates, st, mt, pr, ls, t)
        if not ls.size[HEAP]:
            return
        t = mt.until[mt.heap[0]]
        while ls.size[HEAP] and mt.until[mt.heap[0]] == t:
            m = pop(mt.heap, mt.where, mt.until, ls.size[HEAP])
            ls.size[HEAP] -= 1
            _end(net, rates, st, pr, ls, start, end, m, t)


@jit
def _push(items: IntArray, size: IntArray, which: int, x: int) -> None:
    items[size[which]] = x
    size[which] += 1


@jit
def _mark(pr: Programs, ls: Lists, p: int) -> None:
    if not pr.dirty[p]:
        pr.dirty[p] = True
        _push(ls.dirty, ls.size, DIRTY, p)


@jit
def _look(
    net: Net, rates: Rates, duration: FloatArray, st: Streams, mt: Meetings, pr: Programs, ls: Lists,
    start: FloatArray, end: FloatArray, s: int, t: float,
) -> None:  # fmt: skip
    """Post the head of stream s if all it waits for has ended, and begin its meeting if it comes last."""
    i, k, n = net.queue[st.at[s]], st.step[s], len(net.stream)
    for w in range(st.seek[s], net.wait_at[i + 1]):
        j, when = net.wait[w], k
        if j >= n:
            j, when = j - n, k - 1
        if when >= 0 and end[when, j] < 0:
            st.seek[s] = w
            st.behind[s], st.asleep[j] = st.asleep[j], s
            return
    start[k, i] = t
    p, m = net.program[i], net.meeting[i]
    if not net.compute[i]:
        pr.held[p, rates.kind[i]] += 1
        if pr.held[p, rates.kind[i]] == 1:
            _mark(pr, ls, p)
    mt.come[m] += 1
    if mt.come[m] < net.member_at[m + 1] - net.member_at[m]:
        return
    mt.come[m] = 0
    work = duration[net.work[m]] if net.work[m] >= 0 else _longest(net, duration, m)
    if work == 0:
        _end(net, rates, st, pr, ls, start, end, m, t)
        return
    mt.left[m], mt.since[m], mt.rate[m] = work, t, 0.0
    for x in range(net.member_at[m], net.member_at[m + 1]):
        j = net.member[x]
        p, s = net.program[j], net.stream[j]
        st.running[s], st.pace[s] = m, 0.0
        _mark(pr, ls, p)
        if net.compute[j]:
            pr.computing[p, rates.kind[j]] += 1
        else:
            pr.moving[p, rates.kind[j]] += 1


@jit
def _end(
    net: Net, rates: Rates, st: Streams, pr: Programs, ls: Lists,
    start: FloatArray, end: FloatArray, m: int, t: float,
) -> None:  # fmt: skip
    """End every member of a meeting, wake who sleeps on it, let its stream go on."""
    for x in range(net.member_at[m], net.member_at[m + 1]):
        j = net.member[x]
        s, p, kind = net.stream[j], net.program[j], rates.kind[j]
        end[st.step[s], j] = t
        moved = st.running[s] >= 0
        st.running[s] = -1
        left = 1
        if net.compute[j]:
            if moved:
                pr.computing[p, kind] -= 1
                left = pr.computing[p, kind]
        else:
            pr.held[p, kind] -= 1
            left = pr.held[p, kind]
            if moved:
                pr.moving[p, kind] -= 1
                left = min(left, pr.moving[p, kind])
        if not left:
            _mark(pr, ls, p)
        woken = st.asleep[j]
        st.asleep[j] = -1
        while woken >= 0:
            _push(ls.todo, ls.size, TODO, woken)
            woken = st.behind[woken]
        st.at[s] += 1
        if st.at[s] == net.queue_at[s + 1]:
            st.at[s] = net.queue_at[s]
            st.step[s] += 1
            if st.step[s] == len(start):
                continue
        st.seek[s] = net.wait_at[net.queue[st.at[s]]]
        _push(ls.todo, ls.size, TODO, s)


@jit
def _longest(net: Net, duration: FloatArray, m: int) -> float:
    out = 0.0
    for x in range(net.member_at[m], net.member_at[m + 1]):
        out = max(out, duration[net.member[x]])
    return out


@jit
def _settle(net: Net, rates: Rates, st: Streams, mt: Meetings, pr: Programs, ls: Lists, t: float) -> None:
    """Look at the rates on every program where something changed; a rate that is new moves its meeting's end."""
    for d in range(ls.size[DIRTY]):
        p = ls.dirty[d]
        pr.dirty[p] = False
        for x in range(net.lane_at[p], net.lane_at[p + 1]):
            s = net.lane[x]
            m = st.running[s]
            if m < 0:
                continue
            pace = 1.0 / _slowdown(rates, pr, p, rates.kind[net.queue[st.at[s]]], net.compute[net.queue[st.at[s]]])
            if pace != st.pace[s]:
                st.pace[s] = pace
                if not mt.touched[m]:
                    mt.touched[m] = True
                    _push(ls.touched, ls.size, TOUCHED, m)
    ls.size[DIRTY] = 0
    for d in range(ls.size[TOUCHED]):
        m = ls.touched[d]
        mt.touched[m] = False
        rate = np.inf
        for x in range(net.member_at[m], net.member_at[m + 1]):
            rate = min(rate, st.pace[net.stream[net.member[x]]])
        if rate != mt.rate[m]:
            mt.left[m] = max(0.0, mt.left[m] - _quantised((t - mt.since[m]) * mt.rate[m]))
            mt.since[m], mt.rate[m] = t, rate
            mt.until[m] = t + _quantised(mt.left[m] / rate)
            ls.size[HEAP] = put(mt.heap, mt.where, mt.until, ls.size[HEAP], m)
    ls.size[TOUCHED] = 0


@jit
def _slowdown(rates: Rates, pr: Programs, p: int, kind: int, compute: bool) -> float:
    out = 1.0
    if compute:
        for c in range(pr.held.shape[1]):
            if pr.held[p, c]:
                out += rates.held[kind, c]
        for c in range(pr.moving.shape[1]):
            if pr.moving[p, c]:
                out += rates.moving[kind, c]
    else:
        for a in range(pr.computing.shape[1]):
            if pr.computing[p, a]:
                out += rates.wire[kind, a]
    return out


@jit
def _quantised(x: float) -> float:
    return float(np.rint(x * GRID) / GRID)
