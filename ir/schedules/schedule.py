"""A schedule as a value: where stages live and what each rank does, in order."""

from dataclasses import dataclass

from ir.core.order import Order


@dataclass(frozen=True)
class OpTimes:
    """Durations of one chunk's passes, in any one unit. Only the searched schedules depend on them.

    F, I, W: forward, input gradient, weight gradient of one chunk and microbatch.
    p2p: latency between neighbouring stages on different ranks.
    w_memory: share of a chunk-microbatch's activations that lives on from I to W.
    """

    F: float = 1.0
    I: float = 1.0
    W: float = 1.0
    p2p: float = 0.0
    w_memory: float = 1.0


@dataclass(frozen=True)
class StagePlacement:
    """For some microbatches, the rank of each stage. DualPipe has two placements, all others have one."""

    mbs: range
    rank_of_stage: tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule: `orders[rank]` is what a rank does, `placements` say which stages it holds.

    chunks: stages per rank, as on the command line. DualPipe's two copies are not chunks.
    order_depends_on_times: the order was searched for the given op times.
    """

    name: str
    ranks: int
    microbatches: int
    chunks: int
    placements: tuple[StagePlacement, ...]
    orders: tuple[Order, ...]
    order_depends_on_times: bool = False

    @property
    def stages(self) -> int:
        """How many stages the model is cut into."""
        return self.ranks * self.chunks
