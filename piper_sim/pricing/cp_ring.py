"""Keys and values that go around a ring of context-parallel ranks, beside the pieces of attention that need them."""

from dataclasses import replace

from cost_models.compute.roofline import work_seconds
from cost_models.hardware import DeviceHardware
from ir.core.work import Kernel, KernelKind, MessageKind, Work
from ir.graph.graph import GraphNode

_RING = (MessageKind.ALL_GATHER, MessageKind.REDUCE_SCATTER)
_QUERIES = 0.75  # of a rank's queries see a piece of keys, where each rank has an early and a late part of a sequence


def ring_messages(n: GraphNode) -> bool:
    """Whether a node has fused attention, and gathers keys and values for it."""
    gathers = any("cp" in m.axes and m.kind in _RING for m in n.inline)
    return gathers and any(k.kind is KernelKind.ATTENTION for k in n.work)


def around_ring(work: Work, messages: float, ranks: int, hw: DeviceHardware) -> tuple[float, float]:
    """(seconds that a node's kernels take longer, exposed messages) where its keys and values go around a ring.

    There are as many pieces of attention as ranks, all of one length, and a message under each but the last, which
    takes its SMs while it lasts. Pieces are shorter, hence slower, and each one's output (in backward its gradient of
    queries) is added to those before it.
    """
    cores = [k for k in work if k.kind is KernelKind.ATTENTION]
    pieces = [made for k in cores for made in (_piece(k, ranks), _sum(k, ranks))]
    left = hw.sms - int(hw.comm_sms.get("p2p", 0))
    whole, alone = work_seconds(tuple(cores), hw), work_seconds(tuple(pieces), hw)
    beside = work_seconds(tuple(pieces), hw, left)
    room = (1 - 1 / ranks) * beside
    slowed = min(1.0, messages / room) * (1 - 1 / ranks) * (beside - alone)
    return alone + slowed - whole, max(0.0, messages - room)


def _piece(k: Kernel, ranks: int) -> Kernel:
    """Attention as equal pieces of its keys, one launch each."""
    batch, heads, q, kv, qk_dim, v_dim = k.shape
    shape = (batch, heads, q, -(-kv // ranks), qk_dim, v_dim)
    return replace(k, flops=k.flops // ranks, bytes=k.bytes // ranks, shape=shape, count=k.count * ranks)


def _sum(k: Kernel, ranks: int) -> Kernel:
    """Add a piece's output to the others': both are read, one is written."""
    batch, heads, q, _, _, v_dim = k.shape
    moved = int(3 * _QUERIES * batch * heads * q * v_dim * k.dtype.bytes)
    return Kernel(KernelKind.MEMORY, 0, moved, k.dtype, label="ring.sum", count=k.count * ranks)
