"""Measured slowdowns of a kernel and a message side by side, which go before those that a hardware file implies."""

from dataclasses import dataclass

from cost_models.hardware.schema import COMM_KINDS, NonNegative

BOUNDS = ("arithmetic", "memory")  # what a kernel is bound by


@dataclass(frozen=True, slots=True)
class KernelPair:
    """Added slowdowns: 0.2 makes what is slowed take 1.2 times as long.

    held: of the kernel, while the message's kernel holds its SMs; moving: beside that, while its bytes move. wire: of
    the message, while the kernel runs.
    """

    held: NonNegative = 0.0
    moving: NonNegative = 0.0
    wire: NonNegative = 0.0


def pair_key(bound: str, kind: str) -> str:
    """What a pair is kept under.

    >>> pair_key("arithmetic", "all_to_all")
    'arithmetic all_to_all'
    """
    return f"{bound} {kind}"


def pair_keys() -> tuple[str, ...]:
    """All that there are."""
    return tuple(pair_key(b, k) for b in BOUNDS for k in COMM_KINDS)
