"""What an all-to-all of uneven counts moves over each rank's NVLink port and NIC, and its seconds by the fullest.

Counts say how many copies go where, not which of them are one token's. As in `cost_models.links.fabric`, the k
copies of a token are taken to fall independently: a node that gets share q of a source's copies sees 1 - (1 - q)**k
of its tokens; of those, a rank with share r of the node's copies sees 1 - (1 - r)**x, x the node's copies per token
that it sees. So equal counts give `links.distinct`'s numbers. It is exact for top-1, else a little low: a token's
experts differ. A lower bound mends that where one expert gets nearly all tokens: by how much its inclusion exceeds
the mean, as a share of how much it could. A limit of nodes per token scales a token's nodes down to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cost_models import LinkFabric, message_seconds
from cost_models.links.fabric import loaded_all_to_all_seconds
from ir.core.order import FloatArray, IntArray
from ir.core.work import Message
from ir.job.routing.counts import ExpertCounts
from piper_sim.folding.ground import DevicePlacement, RankSlot
from piper_sim.folding.uses import CollectiveUse
from piper_sim.pricing.routing.division import AT_ONCE, ExpertDivision


@dataclass(frozen=True, eq=False)
class TokenReach:
    """Of each row of counts. copies: [row, rank] to its experts; rank, node: [row, …] tokens that get there at all."""

    copies: FloatArray
    rank: FloatArray
    node: FloatArray


def reach(rows: IntArray, node: IntArray, top_k: int, limit: int = 0) -> TokenReach:
    """Of rows of counts by expert, whose ranks lie on nodes `node` (numbers from 0). limit: nodes per token; 0: none.

    >>> r = reach(np.full((1, 8), 2), np.array([0, 0, 1, 1]), top_k=2)  # 8 tokens, two experts on each rank
    >>> r.copies.tolist(), r.node.tolist()
    ([[4.0, 4.0, 4.0, 4.0]], [[6.0, 6.0]])
    """
    count, experts = rows.shape
    tokens = rows.sum(axis=1, keepdims=True) / top_k
    whole = np.maximum(tokens, 1.0)
    local = rows.reshape(count, len(node), -1)
    copies = local.sum(axis=2).astype(np.float64)
    nodes = int(node.max()) + 1
    on = node == np.arange(nodes)[:, None]
    by_node = np.stack([copies[:, n].sum(axis=1) for n in on], axis=1)
    mean = top_k / experts
    least = np.maximum((local.max(axis=2) / whole - mean) / max(1 - mean, 1e-300), 0.0)
    seen = 1 - np.power(1 - by_node / (whole * top_k), top_k)
    if limit:
        seen *= np.minimum(1.0, limit / np.maximum(seen.sum(axis=1, keepdims=True), 1e-300))
    seen = np.maximum(seen, np.stack([least[:, n].max(axis=1) for n in on], axis=1)) * tokens
    return TokenReach(copies, _ranks(copies, by_node, seen, node, least * tokens), seen)


def _ranks(copies: FloatArray, by_node: FloatArray, seen: FloatArray, node: IntArray, least: FloatArray) -> FloatArray:
    total, arrive = by_node[:, node], seen[:, node]
    share = copies / np.where(total > 0, total, 1.0)
    each = np.where(arrive > 0, total / np.where(arrive > 0, arrive, 1.0), 1.0)
    return np.asarray(np.maximum(arrive * (1 - np.power(1 - share, each)), least))


@dataclass(frozen=True, eq=False)
class LinkLoads:
    """Tokens over links, by [exchange, rank]. out: what it sends, into: what it receives. A combine swaps the two."""

    node_out: FloatArray
    node_into: FloatArray
    nic_out: FloatArray
    nic_into: FloatArray

    @property
    def worst(self) -> tuple[FloatArray, FloatArray]:
        """[exchange] tokens over the fullest NVLink port and over the fullest NIC, in either direction."""
        port = np.maximum(self.node_out, self.node_into).max(axis=1)
        return port, np.maximum(self.nic_out, self.nic_into).max(axis=1)


@dataclass(frozen=True, eq=False)
class LinkRoads:
    """How copies travel between the ranks of a group, which lie on nodes `node`, numbered from 0.

    via: [source, rank] the rank where what goes from source to the rank's node lands: the one with the source's own
    place on its node (a rail), itself on its own node. entry: [source, node] that rank.
    """

    node: IntArray
    via: IntArray
    entry: IntArray

    @classmethod
    def of(cls, node: IntArray) -> LinkRoads:
        """The roads of a group.

        >>> LinkRoads.of(np.array([0, 0, 1, 1])).via.tolist()
        [[0, 0, 2, 2], [1, 1, 3, 3], [0, 0, 2, 2], [1, 1, 3, 3]]
        """
        members = [np.flatnonzero(node == n) for n in range(int(node.max()) + 1)]
        place = np.array([int(np.flatnonzero(members[n] == r)[0]) for r, n in enumerate(node.tolist())])
        entry = np.stack([m[place % len(m)] for m in members], axis=1)
        entry[np.arange(len(node)), node] = np.arange(len(node))
        return cls(node, entry[:, node], entry)


def loads(exchanges: IntArray, reach: TokenReach, roads: LinkRoads, deduplicate: bool) -> LinkLoads:
    """Of exchanges, given as the [exchange, source] rows of counts that meet in them.

    deduplicate: a token crosses the network once per node and a node once per rank, as in DeepEP. Else every copy goes
    its own way.
    """
    step = max(1, AT_ONCE // max(1, exchanges.shape[1] ** 2))
    pieces = [exchanges[a : a + step] for a in range(0, len(exchanges), step)]
    found = [(_deduplicated if deduplicate else _direct)(p, reach, roads) for p in pieces]
    return LinkLoads(*(np.concatenate(x) for x in zip(*found, strict=True)))


_Tiers = tuple[FloatArray, FloatArray, FloatArray, FloatArray]


def _direct(exchanges: IntArray, reach: TokenReach, roads: LinkRoads) -> _Tiers:
    copies, ranks = reach.copies[exchanges], np.arange(len(roads.node))
    near = roads.node[:, None] == roads.node
    inside = copies * (near & (ranks[:, None] != ranks))
    across = copies * ~near
    return inside.sum(axis=2), inside.sum(axis=1), across.sum(axis=2), across.sum(axis=1)


def _deduplicated(exchanges: IntArray, reach: TokenReach, roads: LinkRoads) -> _Tiers:
    ranks = np.arange(len(roads.node))
    last = reach.rank[exchanges] * (roads.via != ranks)
    across = reach.node[exchanges] * (roads.node[:, None] != np.arange(roads.entry.shape[1]))
    return _gathered(last, roads.via), last.sum(axis=1), across.sum(axis=2), _gathered(across, roads.entry)


def _gathered(values: FloatArray, at: IntArray) -> FloatArray:
    """[exchange, rank] the sum of values [exchange, …] over the places where `at` […] is that rank."""
    order = np.argsort(at, axis=None, kind="stable")
    found, first = np.unique(at.ravel()[order], return_index=True)
    out = np.zeros((len(values), len(at)))
    out[:, found] = np.add.reduceat(values.reshape(len(values), -1)[:, order], first, axis=1)
    return out


def exchange_seconds(
    d: ExpertDivision, counts: ExpertCounts, message: Message, copy_bytes: float, fabric: LinkFabric
) -> FloatArray:
    """[exchange] seconds. copy_bytes: of one token's copy. A dispatch and a combine differ in nothing else."""
    port, nic = fullest(d, counts, message, fabric.deduplicate)
    ranks, dispatch = d.groups.shape[1], message.fanout > 1
    nodes = [int(r.max()) + 1 for r in d.roads]
    return np.array(
        [
            loaded_all_to_all_seconds(p, n, ranks, nodes[r], fabric, dispatch)
            for p, n, r in zip((port * copy_bytes).tolist(), (nic * copy_bytes).tolist(), d.road.tolist(), strict=True)
        ]
    )


def fullest(
    d: ExpertDivision, counts: ExpertCounts, message: Message, deduplicate: bool = True
) -> tuple[FloatArray, FloatArray]:
    """[exchange] tokens over the fullest NVLink port and over the fullest NIC of a group, in either direction."""
    port, nic = np.zeros(len(d.rows)), np.zeros(len(d.rows))
    for r, node in enumerate(d.roads):
        here = np.flatnonzero(d.road == r)
        used, rows = np.unique(d.rows[here], return_inverse=True)
        seen = reach(counts.rows[used], node, message.fanout, message.nodes_limit)
        found = loads(rows.reshape(len(here), -1), seen, LinkRoads.of(node), deduplicate and message.fanout > 1)
        port[here], nic[here] = found.worst
    return port, nic


def balanced_seconds(d: ExpertDivision, message: Message, ground: DevicePlacement, fabric: LinkFabric) -> FloatArray:
    """[exchange] seconds that the cost model gives the message where its group lies."""
    use = CollectiveUse.of(message, ground.positions.programs)
    of_road = np.zeros(len(d.roads))
    for r in range(len(d.roads)):
        e = int(np.flatnonzero(d.road == r)[0])
        group = int(np.argwhere(d.exchange == e)[0][2])
        lie = ground.spread(use, RankSlot(0, int(d.groups[group, 0])))
        of_road[r] = message_seconds(message, lie.ranks, lie.per_node, fabric, nodes=lie.nodes)
    return of_road[d.road]
