"""The options of lowering: how interleave groups merge, what coalesces, how transfers queue."""

from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256


class PassMerge(StrEnum):
    """How the members of an interleave group become one order.

    alternate: turns at each communication. fused: one op. template: DeepSeek's and Megatron's cycle, layer by layer.
    profile: a list schedule on given seconds, or what is quicker by them.
    """

    ALTERNATE = "alternate"
    FUSED = "fused"
    TEMPLATE = "template"
    PROFILE = "profile"


class MessageQueue(StrEnum):
    """How transfers between programs queue.

    channels: one stream per ordered pair of programs, in the sender's order.
    single: all transfers of a program in one queue, in the joint order.
    use: one stream per ordered pair, in the receiver's order of use (`schedule --p2p-mode rendezvous`).
    """

    CHANNELS = "channels"
    SINGLE = "single"
    USE = "use"


class ExpertOverlap(StrEnum):
    """What a microbatch computes beside the all-to-alls of its own experts.

    overlapped: whatever does not need them: weight gradients, shared experts. shared: shared experts alone; weight
    gradients come before. serial: nothing. Of two microbatches that run in turns each is beside the other's, whatever
    this says.
    """

    OVERLAPPED = "overlapped"
    SHARED = "shared"
    SERIAL = "serial"


_LATE = ("delay_wgrad", "blocking", "gather_on_demand", "reduce_behind")


@dataclass(frozen=True, slots=True)
class PlanPolicy:
    """What a plan's structure depends on beside graph and orders.

    whole_backward: B stays one op, sends go behind it. lookahead: compute ops by which a receive is dispatched early
    on its channel. clip: gradients are clipped, hence their norm is summed over all programs. delay_wgrad: in groups,
    weight gradients behind the communication that their I feeds. blocking: no compute beside a transfer: an op waits
    for the sends dispatched before it. gather_on_demand: ZeRO-3 gathers weights where they are needed, not ahead.
    reduce_behind: gradients that are reduced once a step are so behind a program's last pass, not beside it.
    experts: what is computed beside their all-to-alls.
    seconds: of nodes by their text, for `profile`.
    """

    merge: PassMerge = PassMerge.ALTERNATE
    whole_backward: bool = False
    p2p: MessageQueue = MessageQueue.CHANNELS
    lookahead: int = 1
    clip: bool = True
    delay_wgrad: bool = False
    blocking: bool = False
    gather_on_demand: bool = False
    reduce_behind: bool = False
    experts: ExpertOverlap = ExpertOverlap.OVERLAPPED
    seconds: tuple[tuple[str, float], ...] = ()

    def header(self) -> dict[str, str]:
        """As in the plan's text."""
        late = {key: "on" for key in _LATE if getattr(self, key)}
        if self.experts is not ExpertOverlap.OVERLAPPED:
            late["experts"] = str(self.experts)
        on = f" {sha256(repr(self.seconds).encode()).hexdigest()[:16]}" if self.merge is PassMerge.PROFILE else ""
        return {
            "merge": f"{self.merge}{on}",
            **late,
            "backward": "whole" if self.whole_backward else "cut",
            "p2p": str(self.p2p),
            "lookahead": str(self.lookahead),
            "clip": "on" if self.clip else "off",
        }
