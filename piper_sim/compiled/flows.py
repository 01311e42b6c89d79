"""Links shared by max-min, anew only where something changed. docs/ENGINE.md, 8, is the arithmetic.

A meeting under way that loads links is a flow. It is kept in the slot of the stream that its least op occupies.
"""

from typing import NamedTuple

import numpy as np

from cost_models.jit import jit
from ir.core.order import BoolArray, FloatArray, IntArray
from piper_sim.compiled.net import OpNet
from piper_sim.engine.scenario import Links


class LinkTable(NamedTuple):
    """`Links` as the kernels take it; empty where there are none."""

    row: IntArray
    at: IntArray
    resource: IntArray
    load: FloatArray


class LinkFlows(NamedTuple):
    """State by slot, by entry (slot x width + k: the k-th link that a slot's flow loads) and by link.

    many: [slot] links its flow loads, 0 where there is none. meeting, weight, pace, rate: [slot] the flow's.
    frozen: [slot] in this filling. near: [slot] whether it is on the list `slots`.
    link, load, owner: [entry] the link, how much of it, and the slot.
    first: [link] its first entry, in the order of meetings; after, before: [entry] the next ones, -1 for none.
    spot: [link] where a flow that loads it may have it among its own. level: [link] the bandwidth at which it is full.
    stale: [link] its level must be computed. known: [link] whether it is on the list `links`.
    slots, links: what must be shared anew; size: of these.
    """

    many: IntArray
    meeting: IntArray
    weight: FloatArray
    pace: FloatArray
    rate: FloatArray
    frozen: BoolArray
    near: BoolArray
    link: IntArray
    load: FloatArray
    owner: IntArray
    after: IntArray
    before: IntArray
    first: IntArray
    spot: IntArray
    level: FloatArray
    stale: BoolArray
    known: BoolArray
    slots: IntArray
    links: IntArray
    size: IntArray


SLOTS, LINKS = 0, 1


def table(links: Links | None) -> LinkTable:
    """The links that ops load."""
    none = np.zeros(0, dtype=np.int64)
    if links is None:
        return LinkTable(none, none, none, np.zeros(0))
    row, at, resource = (np.ascontiguousarray(x, dtype=np.int64) for x in (links.row, links.at, links.resource))
    return LinkTable(row, at, resource, np.ascontiguousarray(links.load, dtype=np.float64))


def fresh(net: OpNet, links: Links | None) -> LinkFlows:
    """No flows yet."""
    streams, count, width = len(net.queue_at) - 1, links.count if links else 0, 0
    if links is not None:
        many = np.append(np.diff(links.at), 0)[links.row]
        width = int(np.bincount(net.meeting[: net.ops], weights=many).max(initial=0))

    def ints(size: int, value: int = 0) -> IntArray:
        return np.full(size, value)

    def flags(size: int) -> BoolArray:
        return np.zeros(size, dtype=np.bool_)

    entries = streams * width
    weight, pace, rate = np.zeros((3, streams))
    return LinkFlows(
        ints(streams), ints(streams), weight, pace, rate, flags(streams), flags(streams),
        ints(entries), np.zeros(entries), np.repeat(np.arange(streams), width), ints(entries), ints(entries),
        ints(count, -1), ints(count), np.zeros(count), flags(count), flags(count),
        ints(streams), ints(count), ints(2),
    )  # fmt: skip


@jit
def enter(net: OpNet, tb: LinkTable, fl: LinkFlows, m: int) -> None:
    """Meeting m begins: note what it loads, each link once, and stand among each link's users."""
    s = net.stream[net.member[net.member_at[m]]]
    base, count = s * (len(fl.owner) // len(fl.many)), 0
    for x in range(net.member_at[m], net.member_at[m + 1]):
        row = tb.row[net.member[x]]
        if row < 0:
            continue
        for e in range(tb.at[row], tb.at[row + 1]):
            r = tb.resource[e]
            k = fl.spot[r]
            if k >= count or fl.link[base + k] != r:
                k = count
                fl.spot[r], fl.link[base + k], fl.load[base + k] = k, r, 0.0
                count += 1
            fl.load[base + k] += tb.load[e]
    fl.many[s], fl.meeting[s], fl.weight[s] = count, m, 0.0
    for e in range(base, base + count):
        fl.weight[s] = max(fl.weight[s], fl.load[e])
        _stand(fl, e, m)


@jit
def _stand(fl: LinkFlows, e: int, m: int) -> None:
    """Put entry e of meeting m among its link's, behind those of lower meetings."""
    last, this = -1, fl.first[fl.link[e]]
    while this >= 0 and fl.meeting[fl.owner[this]] < m:
        last, this = this, fl.after[this]
    fl.before[e], fl.after[e] = last, this
    if this >= 0:
        fl.before[this] = e
    if last >= 0:
        fl.after[last] = e
    else:
        fl.first[fl.link[e]] = e


@jit
def leave(fl: LinkFlows, s: int) -> None:
    """The flow in slot s ends; its links are to be shared anew."""
    base = s * (len(fl.owner) // len(fl.many))
    for e in range(base, base + fl.many[s]):
        last, this = fl.before[e], fl.after[e]
        if this >= 0:
            fl.before[this] = last
        if last >= 0:
            fl.after[last] = this
        else:
            fl.first[fl.link[e]] = this
        _reach(fl, fl.link[e])
    fl.many[s] = 0


@jit
def touch(fl: LinkFlows, s: int) -> None:
    """The flow in slot s is to be shared anew."""
    if not fl.near[s]:
        fl.near[s] = True
        fl.slots[fl.size[SLOTS]] = s
        fl.size[SLOTS] += 1


@jit
def _reach(fl: LinkFlows, r: int) -> None:
    if not fl.known[r]:
        fl.known[r] = True
        fl.links[fl.size[LINKS]] = r
        fl.size[LINKS] += 1


@jit
def share(fl: LinkFlows) -> None:
    """Rates of all flows that share links with what was touched, directly or by others; they stand in `slots` then."""
    _spread(fl)
    for x in range(fl.size[LINKS]):
        fl.known[fl.links[x]] = False
        fl.stale[fl.links[x]] = True
    for x in range(fl.size[SLOTS]):
        fl.near[fl.slots[x]] = False
        fl.frozen[fl.slots[x]] = False
    left = fl.size[SLOTS]
    while left:
        left -= _freeze(fl, _least(fl))
    fl.size[LINKS] = 0


@jit
def _spread(fl: LinkFlows) -> None:
    """Complete `slots` and `links`: users of every link, links of every user."""
    width = len(fl.owner) // len(fl.many)
    x, y = 0, 0
    while x < fl.size[SLOTS] or y < fl.size[LINKS]:
        if x < fl.size[SLOTS]:
            s = fl.slots[x]
            x += 1
            for e in range(s * width, s * width + fl.many[s]):
                _reach(fl, fl.link[e])
        else:
            e = fl.first[fl.links[y]]
            y += 1
            while e >= 0:
                touch(fl, fl.owner[e])
                e = fl.after[e]


@jit
def _least(fl: LinkFlows) -> float:
    """The bandwidth at which the next link is full, or the next flow has all that it can take."""
    out = np.inf
    for x in range(fl.size[LINKS]):
        r = fl.links[x]
        if fl.stale[r]:
            fl.stale[r], fl.level[r] = False, _level(fl, r)
        out = min(out, fl.level[r])
    for x in range(fl.size[SLOTS]):
        s = fl.slots[x]
        if not fl.frozen[s]:
            out = min(out, fl.pace[s] * fl.weight[s])
    return out


@jit
def _level(fl: LinkFlows, r: int) -> float:
    """The bandwidth at which the unfrozen users of link r fill what the frozen ones leave; infinite without any."""
    taken, wanted, e = 0.0, 0.0, fl.first[r]
    while e >= 0:
        s = fl.owner[e]
        if fl.frozen[s]:
            taken += fl.load[e] * fl.rate[s]
        else:
            wanted += fl.load[e] / fl.weight[s]
        e = fl.after[e]
    return max(0.0, 1.0 - taken) / wanted if wanted > 0 else np.inf


@jit
def _freeze(fl: LinkFlows, t: float) -> int:
    """Give their rate to all flows that can have no more than t; returns how many."""
    width, count = len(fl.owner) // len(fl.many), 0
    for x in range(fl.size[SLOTS]):
        s = fl.slots[x]
        if fl.frozen[s]:
            continue
        paced = full = fl.pace[s] * fl.weight[s] == t
        for e in range(s * width, s * width + fl.many[s]):
            full = full or fl.level[fl.link[e]] == t
        if full:
            fl.frozen[s], fl.rate[s] = True, fl.pace[s] if paced else min(fl.pace[s], t / fl.weight[s])
            count += 1
            for e in range(s * width, s * width + fl.many[s]):
                fl.stale[fl.link[e]] = True
    return count
