"""The options of lowering: how interleave groups merge, what coalesces, how transfers queue."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class PassMerge(StrEnum):
    """How the members of an interleave group become one order."""

    ALTERNATE = "alternate"
    FUSED = "fused"


class MessageQueue(StrEnum):
    """How transfers between programs queue.

    channels: one stream per ordered pair of programs, in the sender's order.
    single: all transfers of a program in one queue, in the joint order.
    use: one stream per ordered pair, in the receiver's order of use (`schedule --p2p-mode rendezvous`).
    """

    CHANNELS = "channels"
    SINGLE = "single"
    USE = "use"


@dataclass(frozen=True, slots=True)
class PlanPolicy:
    """What a plan's structure depends on beside graph and orders.

    whole_backward: B stays one op, sends go behind it. lookahead: compute ops by which a receive is dispatched early
    on its channel. clip: gradients are clipped, hence their norm is summed over all programs.
    """

    merge: PassMerge = PassMerge.ALTERNATE
    whole_backward: bool = False
    p2p: MessageQueue = MessageQueue.CHANNELS
    lookahead: int = 1
    clip: bool = True

    def header(self) -> dict[str, str]:
        """As in the plan's text."""
        return {
            "merge": str(self.merge),
            "backward": "whole" if self.whole_backward else "cut",
            "p2p": str(self.p2p),
            "lookahead": str(self.lookahead),
            "clip": "on" if self.clip else "off",
        }
