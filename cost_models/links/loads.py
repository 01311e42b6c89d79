"""How much of its GPU's links a message takes while it runs at full speed, for max-min sharing."""

from dataclasses import dataclass

from cost_models.links.fabric import LinkFabric, distinct
from ir.core.work import Message, MessageKind


@dataclass(frozen=True, slots=True)
class LinkBytes:
    """Bytes that one rank of a group sends over its NVLink port and over its NIC. As much arrives."""

    node: float
    nic: float

    def loads(self, seconds: float, fabric: LinkFabric, pair: bool = False) -> tuple[float, float]:
        """Shares of (port, NIC) while the message takes `seconds`; at most 1: alone, nothing takes more than a link.

        >>> from cost_models.hardware import load_hardware
        >>> fabric = LinkFabric.of(load_hardware("h100-sxm"))
        >>> LinkBytes(0, 47e6).loads(2e-3, fabric)
        (0.0, 0.5)
        """
        if seconds <= 0:
            return 0.0, 0.0
        port = fabric.pair if pair else fabric.node
        return min(1.0, self.node / port / seconds), min(1.0, self.nic / fabric.nic / seconds)


def link_bytes(message: Message, ranks: int, per_node: int, deduplicate: bool = True) -> LinkBytes:
    """What a message moves per rank, by the algorithm that moves least: rings inside nodes, one per member across.

    ranks, per_node as in `message_seconds`.

    >>> link_bytes(Message(MessageKind.ALL_GATHER, 1600, ("dp",)), 16, 8)
    LinkBytes(node=1400.0, nic=100.0)
    """
    per_node = min(per_node, ranks)
    nodes = -(-ranks // per_node)
    size = float(message.bytes)
    inside, across = (per_node - 1) / per_node * size, (nodes - 1) / nodes * size / per_node
    match message.kind:
        case MessageKind.P2P:
            return LinkBytes(size, 0.0) if per_node > 1 else LinkBytes(0.0, size)
        case MessageKind.ALL_REDUCE:
            return LinkBytes(2 * inside, 2 * across)
        case MessageKind.REDUCE_SCATTER | MessageKind.ALL_GATHER:
            return LinkBytes(inside, across)
        case MessageKind.ALL_TO_ALL:
            tokens = size / message.fanout
            if message.fanout > 1 and deduplicate:
                reached = distinct(message.fanout, nodes, message.nodes_limit)
                node = tokens * reached * distinct(message.fanout / reached, per_node) * (per_node - 1) / per_node
                return LinkBytes(node, tokens * reached * (nodes - 1) / nodes)
            return LinkBytes(size * (per_node - 1) / ranks, size * (ranks - per_node) / ranks)
