"""Constants of the collective libraries: what a call and a hop cost under each of their protocols.

Source: NVIDIA/nccl src/graph/tuning.cc (5067397c), base and hop latencies of ring, tree and NVLS. There they choose an
algorithm; here they also predict, which is a model, not a measurement. Hops are multiples of the hardware file's
low-latency hop (0.6 us over NVLink, 2.7 us over the network), bases of its `collective_launch_us` (6.6 us).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CollectiveProtocol:
    """How a library moves chunks.

    base: of collective_launch_us. intra_hop, inter_hop: of the link's latency. tree_inter: the same for a tree's hop.
    intra_bandwidth, inter_bandwidth: share of the link's busbw, inside a node and as soon as nodes are crossed.
    ramp: of the hardware file's nvlink_ramp_KiB.
    """

    name: str
    base: float
    intra_hop: float
    inter_hop: float
    tree_inter: float
    intra_bandwidth: float
    inter_bandwidth: float
    ramp: float = 0.0


# LL: 141 GB/s of 370 on one Hopper node, 45 of 370 on two. LL128: 0.92. The ring's constants, but for tree_inter.
NCCL = (
    CollectiveProtocol("LL", 1.0, 1.0, 1.0, 1.85, 0.38, 0.12),
    CollectiveProtocol("LL128", 2.1, 3.2, 1.5, 3.1, 0.92, 0.92),
    CollectiveProtocol("Simple", 1.27, 5.7, 5.2, 5.2, 1.0, 1.0, 1.0),
)
GLOO = (CollectiveProtocol("tcp", 1.0, 1.0, 1.0, 1.0, 1.0, 1.0),)

TREE_BANDWIDTH = 0.92
NVLS_LATENCY_US = 25.0


def protocols(library: str) -> tuple[CollectiveProtocol, ...]:
    """The protocols a library chooses from.

    >>> [p.name for p in protocols("gloo")]
    ['tcp']
    """
    return {"nccl": NCCL, "gloo": GLOO}[library]
