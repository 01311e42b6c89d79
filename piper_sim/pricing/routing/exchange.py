"""Seconds of every different all-to-all of a division, each as slow as its most loaded rank."""

import numpy as np

from cost_models import LinkFabric, message_seconds
from cost_models.links.fabric import loaded_all_to_all_seconds
from ir.core.order import FloatArray
from ir.core.work import Message
from ir.job.routing.counts import ExpertCounts
from piper_sim.folding.ground import DevicePlacement, RankSlot
from piper_sim.folding.uses import CollectiveUse
from piper_sim.pricing.routing.division import ExpertDivision
from piper_sim.pricing.routing.reach import reach
from piper_sim.pricing.routing.traffic import LinkRoads, loads


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
