"""Messages to seconds: alpha-beta over a two-level fabric, the best of the algorithms a library has. All modelled.

A group of `ranks` has `per_node` members on each node. Inside a node they talk over NVLink (or what stands for it),
between nodes each GPU has its own NIC. Rings, trees and hierarchical forms are alternatives: the fastest is taken, as
the library's own tuner would.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist

from cost_models.hardware import DeviceHardware
from cost_models.links.protocols import NVLS_LATENCY_US, TREE_BANDWIDTH, CollectiveProtocol, protocols
from ir.core.work import Message, MessageKind


@dataclass(frozen=True, slots=True)
class LinkFabric:
    """Links of one GPU, as rates in bytes/s that long collectives reach in one direction, and latencies in seconds.

    node, nic: busbw of a ring inside a node, of one NIC. pair: between two given GPUs of a node.
    sharp: rate of in-switch reduction (0: none). dispatch_node, dispatch_nic: of token dispatch kernels;
    dispatch_across: inside a node where some tokens come from other nodes.
    congestion, few, ramp: see the hardware keys nic_congestion, nvlink_few and nvlink_ramp_KiB (here bytes).
    spread: all_to_all_spread, in training; else 0.
    deduplicate: whether a token crosses the network once per node (DeepEP) or once per copy (plain all-to-all).
    """

    node: float
    pair: float
    nic: float
    sharp: float
    dispatch_node: float
    dispatch_nic: float
    dispatch_across: float
    node_latency: float
    nic_latency: float
    launch: float
    protocols: tuple[CollectiveProtocol, ...]
    gpus_per_node: int
    deduplicate: bool
    congestion: float
    few: float
    ramp: float
    spread: float

    @classmethod
    def of(cls, hw: DeviceHardware, gpus_per_node: int | None = None) -> LinkFabric:
        """The fabric that a hardware file describes; `gpus_per_node` as a job may override it.

        >>> from cost_models.hardware import load_hardware
        >>> LinkFabric.of(load_hardware("h800-sxm")).nic / 1e9
        47.0
        """
        line, nic = hw.nvlink_GBps * 1e9, hw.nic_Gbps * 1e9 / 8
        tokens, usual = hw.dispatcher, hw.dispatch_nvlink_efficiency
        pair = line if hw.nvlink_pair_GBps is None else min(line, hw.nvlink_pair_GBps * 1e9)
        return cls(
            node=line * hw.nvlink_efficiency,
            pair=pair * hw.nvlink_efficiency,
            nic=nic * hw.nic_efficiency,
            sharp=line * hw.nvlink_sharp_efficiency,
            dispatch_node=line * ((tokens and tokens.inside) or usual),
            dispatch_nic=nic * ((tokens and tokens.network) or hw.dispatch_nic_efficiency),
            dispatch_across=line * ((tokens and tokens.across) or usual),
            node_latency=hw.nvlink_latency_us * 1e-6,
            nic_latency=hw.nic_latency_us * 1e-6,
            launch=hw.collective_launch_us * 1e-6,
            protocols=protocols(hw.collectives),
            gpus_per_node=gpus_per_node or hw.gpus_per_node,
            deduplicate=tokens is None or tokens.deduplicate,
            congestion=hw.nic_congestion,
            few=hw.nvlink_few,
            ramp=hw.nvlink_ramp_KiB * 1024,
            spread=hw.all_to_all_spread if hw.training else 0.0,
        )

    def rings_across(self, nodes: int) -> LinkFabric:
        """As rings over so many nodes find it: they are as slow as their slowest hop, and know no tree."""
        if not self.congestion or nodes <= 2:
            return self
        left = (2 / nodes) ** self.congestion
        return replace(self, nic=self.nic * left)


def message_seconds(
    message: Message,
    ranks: int,
    per_node: int,
    fabric: LinkFabric,
    nodes: int | None = None,
) -> float:
    """Seconds from the last member's start to the end, on an idle fabric.

    ranks: size of the group; per_node: its members on one node (for p2p, 2 if both ends share a node, else 1).
    Bytes count as in `Message`.
    nodes: on how many it lies, where unevenly. per_node is then the fewest on any: the scarcest node bounds what
    crosses between nodes, by its NICs; inside nodes members count as if spread evenly.
    """
    if ranks < 1 or per_node < 1:
        raise ValueError(f"a group needs ranks and per_node from 1 up, not {ranks} and {per_node}")
    if ranks == 1 or message.bytes <= 0:
        return 0.0
    per_node = min(per_node, ranks)
    if nodes is None:
        nodes = -(-ranks // per_node)
    elif nodes * per_node > ranks:
        raise ValueError(f"{ranks} ranks cannot be at least {per_node} on each of {nodes} nodes")
    exact = ranks if nodes * per_node < ranks else 0
    match message.kind:
        case MessageKind.P2P:
            return p2p_seconds(message.bytes, per_node > 1, fabric)
        case MessageKind.ALL_REDUCE:
            return all_reduce_seconds(message.bytes, per_node, nodes, fabric, exact)
        case MessageKind.REDUCE_SCATTER | MessageKind.ALL_GATHER:
            return gather_seconds(message.bytes, per_node, nodes, fabric.rings_across(nodes), exact)
        case MessageKind.ALL_TO_ALL:
            return all_to_all_seconds(message, ranks, per_node, nodes, fabric)


def p2p_seconds(nbytes: int, same_node: bool, fabric: LinkFabric) -> float:
    """One tensor from one GPU to another."""
    if same_node:
        return min(_call(p, fabric, nbytes / (fabric.pair * p.intra_bandwidth), intra=1) for p in fabric.protocols)
    return min(_call(p, fabric, nbytes / (fabric.nic * p.inter_bandwidth), inter=1) for p in fabric.protocols)


def all_reduce_seconds(nbytes: int, per_node: int, nodes: int, fabric: LinkFabric, ranks: int = 0) -> float:
    """The best of ring, tree, in-switch, and reduce-scatter in the node, all-reduce across, all-gather in the node.

    ranks, here and below: how many there are, where that is more than per_node on each node.
    """
    ring = ring_all_reduce(nbytes, per_node, nodes, fabric, ranks)
    flat = min(ring, tree_all_reduce(nbytes, per_node, nodes, fabric, ranks))
    if nodes == 1:
        return min(flat, sharp_all_reduce(nbytes, per_node, fabric))
    if per_node == 1:
        return flat
    inside = gather_seconds(nbytes, _mean(per_node, nodes, ranks), 1, fabric)
    shard = -(-nbytes // per_node)
    across = min(ring_all_reduce(shard, 1, nodes, fabric), tree_all_reduce(shard, 1, nodes, fabric))
    return min(flat, 2 * inside + across)


def gather_seconds(nbytes: int, per_node: int, nodes: int, fabric: LinkFabric, ranks: int = 0) -> float:
    """All-gather of an output (reduce-scatter of an input) of `nbytes`: a flat ring, or across nodes, then inside."""
    flat = ring_gather(nbytes, per_node, nodes, fabric, ranks)
    if nodes == 1:
        return flat
    shard = -(-nbytes // per_node)
    across = min(ring_gather(shard, 1, nodes, fabric), _doubling_gather(shard, nodes, fabric))
    mean = _mean(per_node, nodes, ranks)
    return min(flat, across + (ring_gather(nbytes, mean, 1, fabric) if mean > 1 else 0.0))


def _mean(per_node: int, nodes: int, ranks: int) -> int:
    """Members on a node, spread evenly."""
    return max(per_node, -(-ranks // nodes))


def ring_all_reduce(nbytes: int, per_node: int, nodes: int, fabric: LinkFabric, ranks: int = 0) -> float:
    """2(n-1) steps of S/n each over the ring's narrowest hop."""
    ranks = ranks or per_node * nodes
    wire = 2 * (ranks - 1) / ranks * nbytes
    return _ring(wire, 2 * (ranks - 1), 2 * nodes if nodes > 1 else 0, per_node, nodes, fabric)


def ring_gather(nbytes: int, per_node: int, nodes: int, fabric: LinkFabric, ranks: int = 0) -> float:
    """n-1 steps of S/n each: half an all-reduce."""
    ranks = ranks or per_node * nodes
    return _ring((ranks - 1) / ranks * nbytes, ranks - 1, nodes - 1, per_node, nodes, fabric)


def tree_all_reduce(nbytes: int, per_node: int, nodes: int, fabric: LinkFabric, ranks: int = 0) -> float:
    """Up and down a double binary tree of nodes, a chain inside each: few hops, a little less bandwidth."""
    up_down = 2 * nbytes / TREE_BANDWIDTH
    chain = _mean(per_node, nodes, ranks) - 1

    def seconds(p: CollectiveProtocol) -> float:
        rate = _bus(p, per_node, nodes, fabric)
        hops = 2 * (chain * p.intra_hop * fabric.node_latency)
        hops += 2 * math.ceil(math.log2(nodes)) * p.tree_inter * fabric.nic_latency if nodes > 1 else 0.0
        return p.base * fabric.launch + hops + _moved(up_down, p, nodes, fabric) / rate

    return min(seconds(p) for p in fabric.protocols)


def sharp_all_reduce(nbytes: int, per_node: int, fabric: LinkFabric) -> float:
    """In-switch reduction (NVLS): a GPU sends S for the switch to sum, then S/n of finished sums; inf if absent."""
    if fabric.sharp <= 0 or per_node < 3:
        return math.inf
    return fabric.launch + NVLS_LATENCY_US * 1e-6 + (nbytes * (1 + 1 / per_node) + fabric.ramp) / fabric.sharp


def all_to_all_seconds(message: Message, ranks: int, per_node: int, nodes: int, fabric: LinkFabric) -> float:
    """The slower of what crosses NVLink and what crosses the NIC, which overlap, and a latency per partner.

    With `fanout` > 1 the message is a dispatch of tokens (or the combine, its mirror): a token goes once per node over
    the NIC and once per rank over NVLink, as DeepEP does. Else every byte goes its own way.
    """
    mean = _mean(per_node, nodes, ranks)
    tokens = float(message.bytes) / message.fanout
    if message.fanout > 1 and fabric.deduplicate:
        reached = distinct(message.fanout, nodes, message.nodes_limit)
        over_nic = tokens * reached * (nodes - 1) / nodes
        over_node = tokens * reached * distinct(message.fanout / reached, mean) * (mean - 1) / mean
    else:
        over_nic = tokens * message.fanout * (ranks - per_node) / ranks
        over_node = tokens * message.fanout * (mean - 1) / ranks
    return loaded_all_to_all_seconds(over_node, over_nic, ranks, nodes, fabric, message.fanout > 1, mean)


def loaded_all_to_all_seconds(
    over_node: float,
    over_nic: float,
    ranks: int,
    nodes: int,
    fabric: LinkFabric,
    dispatch: bool = True,
    mean: int = 0,
) -> float:
    """An all-to-all as slow as its most loaded rank; `all_to_all_seconds` where all are equal.

    over_node, over_nic: bytes over the fullest NVLink port and over the fullest NIC, in its busier direction.
    ranks, nodes: of the group; mean: of its members on a node. dispatch: of tokens, to or from their experts, at the
    rates of dispatch kernels.
    """
    if ranks == 1:
        return 0.0
    mean = mean or -(-ranks // nodes)
    fixed = fabric.launch + (mean - 1) * fabric.node_latency + (nodes - 1) * fabric.nic_latency
    last = 1.0 + fabric.spread * latest(ranks)
    if dispatch:
        port = over_node / (fabric.dispatch_across if nodes > 1 else fabric.dispatch_node)
        return fixed + last * max(port, over_nic / fabric.dispatch_nic)
    ports = (_moved(over_node, p, nodes, fabric) / _bus(p, mean, 1, fabric) for p in fabric.protocols)
    return fixed + last * max(min(ports), over_nic / fabric.nic)


@cache
def latest(ranks: int) -> float:
    """By how many standard deviations the last of so many ranks is late, of normal ones (Blom's approximation).

    >>> round(latest(64), 2)
    2.34
    """
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


def distinct(copies: float, places: int, limit: int = 0) -> float:
    """Expected number of different places that `copies` of a token go to, spread evenly over `places`; at most `limit`.

    With DeepSeek-V3's group-limited routing (top-8, 4 of 8 nodes) 3.95 nodes are reached in a simulation of its gate:
    groups are chosen by their two best experts, so a chosen one is hardly ever left empty. Hence the plain minimum.

    >>> round(distinct(8, 8), 2)
    5.25
    >>> distinct(8, 8, limit=4)
    4.0
    """
    reached = places * (1 - math.pow(1 - 1 / places, copies))
    return min(float(limit), reached) if limit else reached


def _doubling_gather(nbytes: int, nodes: int, fabric: LinkFabric) -> float:
    """Across nodes with one member each in log2(n) rounds (NCCL's PAT, 0.75 of the bandwidth)."""
    wire = (nodes - 1) / nodes * nbytes / (fabric.nic * 0.75)
    return min(_call(p, fabric, wire / p.inter_bandwidth, inter=math.ceil(math.log2(nodes))) for p in fabric.protocols)


def _ring(wire: float, steps: int, inter: int, per_node: int, nodes: int, fabric: LinkFabric) -> float:
    inter = min(inter, steps)
    return min(
        _call(p, fabric, _moved(wire, p, nodes, fabric) / _bus(p, per_node, nodes, fabric), steps - inter, inter)
        for p in fabric.protocols
    )


def _moved(wire: float, p: CollectiveProtocol, nodes: int, fabric: LinkFabric) -> float:
    """Bytes that a rank's port carries, with those lost until a protocol of large chunks is under way in a node."""
    return wire + (fabric.ramp * p.ramp if nodes == 1 else 0.0)


def _bus(p: CollectiveProtocol, per_node: int, nodes: int, fabric: LinkFabric) -> float:
    """Bytes/s through each rank of a ring: inside a node NVLink's; across nodes also that of the node's NICs together.

    `per_node` rings run side by side, each crossing at another member's NIC, so a node's NICs add up. Few GPUs of a
    node reach less than many; where no switch joins them, only what their links to each other carry.
    """
    linked = max(per_node - 1, 1) * fabric.pair
    if nodes == 1:
        return min(fabric.node / (1.0 + fabric.few / max(per_node - 1, 1)), linked) * p.intra_bandwidth
    nics = per_node * fabric.nic
    return (min(fabric.node, linked, nics) if per_node > 1 else nics) * p.inter_bandwidth


def _call(p: CollectiveProtocol, fabric: LinkFabric, transfer: float, intra: int = 0, inter: int = 0) -> float:
    hops = intra * p.intra_hop * fabric.node_latency + inter * p.inter_hop * fabric.nic_latency
    return p.base * fabric.launch + hops + transfer
