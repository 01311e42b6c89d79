"""Where ops in flight share devices and links: an event loop with its own heap. docs/ENGINE.md is its arithmetic."""

import numpy as np

from cost_models.jit import jit
from ir.core.grid import GRID
from ir.core.order import FloatArray, IntArray
from piper_sim.compiled import flows, state
from piper_sim.compiled.flows import LINKS, SLOTS, LinkFlows, LinkTable
from piper_sim.compiled.heap import pop, put
from piper_sim.compiled.net import OpNet, missing
from piper_sim.compiled.order import StreamHeads, advance, heads, sleep, stuck, wake
from piper_sim.compiled.path import longest, longest_path
from piper_sim.compiled.state import (
    DIRTY,
    HEAP,
    TODO,
    TOUCHED,
    CollectiveState,
    EngineWorkLists,
    OpRates,
    RankEngineState,
    StreamState,
)
from piper_sim.compiled.structure import CompiledEngine
from piper_sim.engine.scenario import EngineRun, EngineScenario


def event_loop(scenario: EngineScenario, duration: FloatArray, steps: int) -> EngineRun:
    """Run `steps` repetitions of a scenario under interference, on shared links. Transfers are rendezvous.

    duration: seconds of each op alone on its device, multiples of 2**-40.
    """
    c = CompiledEngine.of(scenario)
    if c.path is None:
        raise stuck(scenario, c.net, steps)
    net, n, host = c.net, c.net.ops, scenario.host
    start, end = np.full((steps, n), -1.0), np.full((steps, len(net.stream)), -1.0)
    rates, launch = state.rates(scenario.slow, n), host.launch if host else np.zeros(0)
    seconds = np.append(np.asarray(duration, dtype=np.float64), launch)
    table, flow = flows.table(scenario.links), flows.fresh(net, scenario.links)
    run(net, rates, table, seconds, heads(net), *state.fresh(net, rates), flow, start, end)
    return EngineRun(start, end[:, :n], end[:, n:] if host else None)


@jit
def run(
    net: OpNet, rates: OpRates, tb: LinkTable, duration: FloatArray, hd: StreamHeads,
    st: StreamState, mt: CollectiveState, pr: RankEngineState,
    ls: EngineWorkLists, fl: LinkFlows, start: FloatArray, end: FloatArray,
) -> None:  # fmt: skip
    """Fill start and end of every op and step, and the ends of dispatches."""
    t, own = 0.0, len(net.lane)
    while True:
        while ls.size[TODO]:
            ls.size[TODO] -= 1
            s = ls.todo[ls.size[TODO]]
            if s < own:
                _look(net, rates, tb, duration, hd, st, mt, pr, ls, fl, start, end, s, t)
            else:
                _dispatch(net, duration, hd, st, ls, end, s, t)
        _settle(net, rates, hd, st, mt, pr, ls, fl, t)
        if not ls.size[HEAP]:
            return
        t = mt.until[mt.heap[0]]
        while ls.size[HEAP] and mt.until[mt.heap[0]] == t:
            m = pop(mt.heap, mt.where, mt.until, ls.size[HEAP])
            ls.size[HEAP] -= 1
            if net.work[m] < net.ops:
                _end(net, rates, hd, st, pr, ls, fl, end, m, t)
            else:
                ls.size[TODO] = wake(hd, net.work[m], ls.todo, ls.size[TODO])


@jit
def _push(items: IntArray, size: IntArray, which: int, x: int) -> None:
    items[size[which]] = x
    size[which] += 1


@jit
def _mark(pr: RankEngineState, ls: EngineWorkLists, p: int) -> None:
    if not pr.dirty[p]:
        pr.dirty[p] = True
        _push(ls.dirty, ls.size, DIRTY, p)


@jit
def _dispatch(
    net: OpNet,
    duration: FloatArray,
    hd: StreamHeads,
    st: StreamState,
    ls: EngineWorkLists,
    end: FloatArray,
    s: int,
    t: float,
) -> None:
    """Let a host go on as far as it can see: until something it waits for has not ended. Its clock may be ahead of t.

    Only the first op it turns to can have been waited for, and if so until t.
    """
    more = True
    while more:
        i, k = net.queue[hd.at[s]], hd.step[s]
        w = hd.seek[s] = missing(net, end, k, i, hd.seek[s])
        if w < net.wait_at[i + 1]:
            sleep(hd, s, net.wait[w] % len(net.stream))
            return
        st.clock[s] = max(st.clock[s], t) + duration[i]
        end[k, i] = st.clock[s]
        ls.size[TODO] = wake(hd, i, ls.todo, ls.size[TODO])
        more = advance(net, hd, s, len(end))


@jit
def _look(
    net: OpNet, rates: OpRates, tb: LinkTable, duration: FloatArray, hd: StreamHeads,
    st: StreamState, mt: CollectiveState, pr: RankEngineState,
    ls: EngineWorkLists, fl: LinkFlows, start: FloatArray, end: FloatArray, s: int, t: float,
) -> None:  # fmt: skip
    """Start the head of stream s if all it waits for has ended, and begin its meeting if it comes last."""
    i, k = net.queue[hd.at[s]], hd.step[s]
    w = hd.seek[s] = missing(net, end, k, i, hd.seek[s])
    if w < net.wait_at[i + 1]:
        sleep(hd, s, net.wait[w] % len(net.stream))
        return
    call = net.ops + i
    if call < len(net.stream) and end[k, call] > t:
        mt.until[net.meeting[call]] = end[k, call]
        ls.size[HEAP] = put(mt.heap, mt.where, mt.until, ls.size[HEAP], net.meeting[call])
        sleep(hd, s, call)
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
    work = duration[net.work[m]] if net.work[m] >= 0 else longest(net, m, duration)
    if work == 0:
        _end(net, rates, hd, st, pr, ls, fl, end, m, t)
        return
    mt.left[m], mt.since[m], mt.rate[m] = work, t, 0.0
    for x in range(net.member_at[m], net.member_at[m + 1]):
        j = net.member[x]
        p, s = net.program[j], net.stream[j]
        st.meeting[s], st.pace[s] = m, 0.0
        _mark(pr, ls, p)
        if net.compute[j]:
            pr.computing[p, rates.kind[j]] += 1
        else:
            pr.moving[p, rates.kind[j]] += 1
    if len(tb.row):
        flows.enter(net, tb, fl, m)


@jit
def _end(
    net: OpNet, rates: OpRates, hd: StreamHeads, st: StreamState, pr: RankEngineState,
    ls: EngineWorkLists, fl: LinkFlows, end: FloatArray,
    m: int, t: float,
) -> None:  # fmt: skip
    """End every member of a meeting, wake who sleeps on it, let its stream go on."""
    for x in range(net.member_at[m], net.member_at[m + 1]):
        j = net.member[x]
        s, p, kind = net.stream[j], net.program[j], rates.kind[j]
        end[hd.step[s], j] = t
        moved = st.meeting[s] >= 0
        st.meeting[s] = -1
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
        if fl.many[s]:
            flows.leave(fl, s)
        ls.size[TODO] = wake(hd, j, ls.todo, ls.size[TODO])
        if advance(net, hd, s, len(end)):
            _push(ls.todo, ls.size, TODO, s)


@jit
def _settle(
    net: OpNet,
    rates: OpRates,
    hd: StreamHeads,
    st: StreamState,
    mt: CollectiveState,
    pr: RankEngineState,
    ls: EngineWorkLists,
    fl: LinkFlows,
    t: float,
) -> None:
    """Look at the rates where something changed; a rate that is new moves its meeting's end."""
    _paces(net, rates, hd, st, mt, pr, ls)
    for d in range(ls.size[TOUCHED]):
        m = ls.touched[d]
        mt.touched[m] = False
        pace = np.inf
        for x in range(net.member_at[m], net.member_at[m + 1]):
            pace = min(pace, st.pace[net.stream[net.member[x]]])
        s = net.stream[net.member[net.member_at[m]]]
        if fl.many[s]:
            fl.pace[s] = pace
            flows.touch(fl, s)
        else:
            _change(mt, ls, m, pace, t)
    ls.size[TOUCHED] = 0
    if fl.size[SLOTS] or fl.size[LINKS]:
        flows.share(fl)
        for x in range(fl.size[SLOTS]):
            s = fl.slots[x]
            _change(mt, ls, fl.meeting[s], fl.rate[s], t)
        fl.size[SLOTS] = 0


@jit
def _paces(
    net: OpNet,
    rates: OpRates,
    hd: StreamHeads,
    st: StreamState,
    mt: CollectiveState,
    pr: RankEngineState,
    ls: EngineWorkLists,
) -> None:
    """What each dirty program allows its streams."""
    for d in range(ls.size[DIRTY]):
        p = ls.dirty[d]
        pr.dirty[p] = False
        for x in range(net.lane_at[p], net.lane_at[p + 1]):
            s = net.lane[x]
            m = st.meeting[s]
            if m < 0:
                continue
            i = net.queue[hd.at[s]]
            pace = 1.0 / _slowdown(rates, pr, p, rates.kind[i], net.compute[i])
            if pace != st.pace[s]:
                st.pace[s] = pace
                if not mt.touched[m]:
                    mt.touched[m] = True
                    _push(ls.touched, ls.size, TOUCHED, m)
    ls.size[DIRTY] = 0


@jit
def _change(mt: CollectiveState, ls: EngineWorkLists, m: int, rate: float, t: float) -> None:
    """Note what meeting m has done so far, if its rate differs from now on."""
    if rate != mt.rate[m]:
        mt.left[m] = max(0.0, mt.left[m] - _quantised((t - mt.since[m]) * mt.rate[m]))
        mt.since[m], mt.rate[m] = t, rate
        mt.until[m] = t + _quantised(mt.left[m] / rate)
        ls.size[HEAP] = put(mt.heap, mt.where, mt.until, ls.size[HEAP], m)


@jit
def _slowdown(rates: OpRates, pr: RankEngineState, p: int, kind: int, compute: bool) -> float:
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
    """`quantised`, as a kernel of one number."""
    return float(np.rint(x * GRID) / GRID)


def play(scenario: EngineScenario, duration: FloatArray, steps: int = 1) -> EngineRun:
    """Longest path where nothing is shared, else the event loop."""
    return (event_loop if scenario.shared else longest_path)(scenario, duration, steps)
