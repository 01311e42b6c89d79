"""Tensor-parallel messages and the products around them: one after the other, side by side, or in pieces."""

import math
from collections.abc import Callable
from dataclasses import replace

from cost_models.compute.roofline import kernel_seconds
from cost_models.hardware import DeviceHardware
from ir.core.ops import Pass
from ir.core.work import Kernel, KernelKind, Message, MessageKind, Work

# Of a column-parallel linear's backward: its input's gradient, and its input, gathered again for the weights'.
_BESIDE = {Pass.I: (MessageKind.REDUCE_SCATTER, MessageKind.ALL_REDUCE), Pass.W: (MessageKind.ALL_GATHER,)}


def runs_beside(kind: object, message: Message) -> bool:
    """Whether a product that does not need a message's result can run while it is under way.

    By pass and kind: the sums of norms over all heads, four bytes a token, go with them.

    >>> gather = Message(MessageKind.ALL_GATHER, 1, ("tp",))
    >>> runs_beside(Pass.W, gather), runs_beside(Pass.F, gather)
    (True, False)
    """
    return "tp" in message.axes and isinstance(kind, Pass) and message.kind in _BESIDE.get(kind, ())


def beside_products(work: Work, messages: float, hw: DeviceHardware) -> tuple[float, float]:
    """(seconds that a node's products take longer, exposed messages) where messages run beside them.

    A message takes its SMs from the products while it lasts. An input's gradient travels beside the weights' products,
    which are as long as those that made it: each node is asked for its own. Where a schedule puts weights' products
    off, another's run there.
    """
    products = [k for k in work if k.kind is KernelKind.GEMM]
    alone = math.fsum(kernel_seconds(k, hw) for k in products)
    beside = math.fsum(kernel_seconds(k, hw, hw.sms - int(hw.comm_sms.get("collective", 0))) for k in products)
    if not alone:
        return 0.0, messages
    return min(1.0, messages / beside) * (beside - alone), max(0.0, messages - beside)


def under_products(
    work: Work, alone: float, messages: float, pieces: int, seconds: Callable[[Kernel], float]
) -> tuple[float, float]:
    """(kernels, exposed messages) of a node whose messages run in pieces, each under the product of another piece.

    There are as many pieces as ranks. A product is cut along its rows, so it is slower; one piece's message stays
    exposed, and what all products do not last for. alone: the node's kernels, uncut; seconds: of a kernel.
    """
    products = [k for k in work if k.kind is KernelKind.GEMM and len(k.shape) == 3]
    whole, cut = (sum(map(seconds, found)) for found in (products, [_piece(k, pieces) for k in products]))
    exposed = messages / pieces + (1 - 1 / pieces) * max(0.0, messages - cut)
    return (alone - whole + cut, exposed) if cut + exposed < whole + messages else (alone, messages)


def _piece(k: Kernel, pieces: int) -> Kernel:
    """A product as equal pieces of its rows, one launch each."""
    m, rest, wide = k.shape[0], k.shape[1:], -(-k.shape[0] // pieces)
    share = wide / m
    return replace(
        k, flops=int(k.flops * share), bytes=int(k.bytes * share), shape=(wide, *rest), count=k.count * pieces
    )
