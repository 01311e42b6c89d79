"""What the ranks of a doctor's run can do wrong, in their own processes."""

from typing import Any

from torch import Tensor

from executor.measure.peak_bytes import DONE
from executor.runtime.worker import RankContext
from executor.transport.base import TransportHandle
from executor.transport.groups import GlooTransport
from piper_sim.app.doctor.collectives import collectives_rank


def _nothing(self: GlooTransport, *args: Any, **kwargs: Any) -> TransportHandle:
    return DONE


def _swapped(self: GlooTransport, group: str, into: Tensor, tensor: Tensor, *sizes: Any) -> TransportHandle:
    into.copy_(tensor.flip(0))
    return DONE


def without(ctx: RankContext, kind: str, **args: Any) -> Any:
    """Every rank leaves out what one kind of message does."""
    for method in ("send", "recv") if kind == "p2p" else (kind,):
        setattr(GlooTransport, method, _swapped if kind == "all_to_all" else _nothing)
    return collectives_rank(ctx, **args)
