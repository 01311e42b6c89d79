"""Layers whose experts are divided alike: their groups, the rows that each position receives, its exchanges."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ir.core.order import IntArray
from ir.job.routing.counts import ExpertCounts, ExpertLayer, distinct
from ir.workload.part import PartLayout
from piper_sim.folding.ground import DevicePlacement

AT_ONCE = 2**18  # numbers: what a cache holds


@dataclass(frozen=True, eq=False)
class ExpertDivision:
    """Some layers, by their index among those with experts, and what their positions get.

    groups: [group, member] positions that exchange tokens, members in the order of the experts they own.
    exchange: [layer, case, group] which of `rows` [exchange, member] of counts meet there; `road` [exchange] where.
    received: [layer, case, position] rows from its group. load: [layer, case, position] which of `loads`
    [load, expert] rows per expert, ascending, it works on: with etp those of all that share its experts.
    roads: nodes of the members of a group, by road.
    """

    layers: IntArray
    first: ExpertLayer
    layout: PartLayout
    groups: IntArray
    rows: IntArray
    road: IntArray
    roads: tuple[IntArray, ...]
    exchange: IntArray
    received: IntArray
    loads: IntArray
    load: IntArray

    @cached_property
    def group_of(self) -> IntArray:
        """[position] its group."""
        return _places(self.groups)[0]

    @cached_property
    def worked(self) -> IntArray:
        """[layer, case, position] rows that it works on."""
        return np.asarray(self.loads.sum(axis=1)[self.load])


def divisions(
    layers: tuple[ExpertLayer, ...], counts: ExpertCounts, ground: DevicePlacement
) -> tuple[ExpertDivision, ...]:
    """The layers by their layout. One division for all jobs but those whose directives treat layers differently."""
    layouts = list(dict.fromkeys(x.entry.layout for x in layers))
    alike = [[i for i, x in enumerate(layers) if x.entry.layout == y] for y in layouts]
    return tuple(_division(layers, mine, counts, ground) for mine in alike)


def _division(
    layers: tuple[ExpertLayer, ...], mine: list[int], counts: ExpertCounts, ground: DevicePlacement
) -> ExpertDivision:
    first = layers[mine[0]]
    layout, at = first.entry.layout, ground.positions
    groups = at.members(("ep",)) if layout.ep > 1 else np.arange(len(at))[:, None]
    peers = at.members(("etp",)) if layout.etp > 1 else np.arange(len(at))[:, None]
    # Nodes as numbers from 0 in the order of their first ranks: groups that lie alike are equal.
    roads, road = distinct(np.array([distinct(r[:, None])[1] for r in ground.node[0][groups]]))
    meeting = counts.at[mine][:, :, groups]
    where = np.broadcast_to(road[:, None], (*meeting.shape[:3], 1))
    table = np.concatenate([where, meeting], axis=3).reshape(-1, groups.shape[1] + 1)
    table, exchange = distinct(table)
    exchange = exchange.reshape(meeting.shape[:3])
    rows = table[:, 1:]
    experts = _experts(rows, counts.rows, groups.shape[1])
    group, member = _places(groups)
    received = experts.sum(axis=2)[exchange[:, :, group], member]
    loads, load = _loads(experts, exchange[:, :, group], member, peers)
    roads_ = tuple(roads)
    return ExpertDivision(
        np.array(mine), first, layout, groups, rows, table[:, 0], roads_, exchange, received, loads, load
    )


def _places(groups: IntArray) -> tuple[IntArray, IntArray]:
    """([position] its group, [position] its place there)."""
    group, member = np.empty(groups.size, dtype=np.int64), np.empty(groups.size, dtype=np.int64)
    group[groups], member[groups] = np.arange(len(groups))[:, None], np.arange(groups.shape[1])
    return group, member


def _experts(rows: IntArray, counts: IntArray, members: int) -> IntArray:
    """[exchange, member, its expert] rows from all sources."""
    step = max(1, AT_ONCE // (members * counts.shape[1]))
    pieces = [counts[rows[a : a + step]].sum(axis=1) for a in range(0, len(rows), step)]
    return np.concatenate(pieces).reshape(len(rows), members, -1)


def _loads(experts: IntArray, exchange: IntArray, member: IntArray, peers: IntArray) -> tuple[IntArray, IntArray]:
    """(different loads, [layer, case, position] which). exchange: [layer, case, position]; peers: [block, position]."""
    block, _ = _places(peers)
    code = np.broadcast_to(member, exchange.shape)
    for with_me in peers[block].T:
        code = np.unique(code * len(experts) + exchange[:, :, with_me], return_inverse=True)[1].reshape(code.shape)
    first = np.unique(code, return_index=True)[1]
    layer, case, position = np.unravel_index(first, code.shape)
    total = sum(experts[exchange[layer, case, q], member[position]] for q in peers[block[position]].T)
    loads, which = distinct(np.sort(total, axis=1))
    return loads, which[code]
