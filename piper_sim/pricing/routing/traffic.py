"""What an all-to-all of uneven counts moves over each rank's NVLink port and NIC, and the most of any rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ir.core.order import FloatArray, IntArray
from piper_sim.pricing.routing.reach import TokenReach

_AT_ONCE = 2**18  # numbers: what a cache holds


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
    step = max(1, _AT_ONCE // max(1, exchanges.shape[1] ** 2))
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
