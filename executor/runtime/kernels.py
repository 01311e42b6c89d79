"""How the work of compute ops is done: with arithmetic, or without it in a time that is given."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from executor.autograd.stage import Stage
from executor.device import clock
from executor.optim.sync import BucketSync, Start
from executor.parallel.collective import Collective
from executor.parallel.expert_all_to_all import ExpertRoute, ExpertTransfer, even, exchanges, travel
from executor.transport.base import Transport
from ir.core.ops import Pass
from ir.core.order import FloatArray
from ir.core.work import MessageKind
from ir.graph.sync import Bucket

CPU = torch.device("cpu")  # where what has no meaning is
SMALL = 2**18  # elements of a bucket that an emulated collective moves at most


@dataclass(frozen=True)
class RealKernels:
    """Arithmetic, which takes as long as it takes. extras: by unit, what it reads of "ids", "labels", "scale"."""

    stages: Mapping[int, Stage]
    extras: Mapping[str, tuple[str, ...]]
    sync: BucketSync

    def hold(self, step: int, op: int, since_s: float, tick: Callable[[], None]) -> None:
        """Behind a compute op's work, which began at since_s: its time is over, as it is done."""


class BlankStage:
    """A stage without arithmetic: what leaves it has the right shape, and no meaning. last: its output is the loss.

    routes: (chunk, microbatch) → the rows that exchanges of its layer carry, each as the boundary has them.
    """

    in_flight = 0

    def __init__(
        self,
        units: Sequence[str],
        boundary: Callable[[], Tensor],
        *,
        last: bool,
        routes: Callable[[str, int], ExpertRoute] | None = None,
    ) -> None:
        self.units: dict[str, None] = dict.fromkeys(units)
        self._out = torch.tensor(float("nan"), device=CPU) if last else boundary().zero_()
        self._grad = boundary().zero_()
        self._routes = routes

    def feed(self, *_: object) -> None:
        """Nobody reads it, or works on it."""

    feed_extra = feed_grad = work = feed

    def exchange(self, pass_: Pass, mb: int, name: str) -> ExpertTransfer:
        """Rows as planned, of zeros."""
        assert self._routes is not None
        chunk, _, _ = name.rpartition(".")
        route, hidden = self._routes(chunk, mb), self._grad.shape[-1]
        wire = exchanges(chunk, route.group)[name]
        if not wire.counts:
            return even(wire, torch.tensor(route.sent, device=CPU).flatten())
        leaving = route.sent if wire.back == (pass_ is Pass.I) else route.got
        return travel(wire, route, [self._grad.new_zeros(sum(map(sum, leaving)), hidden)], gradients=pass_ is Pass.I)

    def take_output(self, mb: int) -> tuple[Tensor, ...]:
        return (self._out,)

    def take_input_grad(self, mb: int) -> tuple[Tensor | None, ...]:
        return (self._grad,)


class BlankBucketSync:
    """The collectives of a step on buckets cut down to 1 MiB or so, and no update. params: how many the model has.

    found: the buckets with the index of this rank among the ranks that share each.
    """

    norm: float | None = None
    frozen = False

    def __init__(
        self,
        found: Sequence[tuple[Bucket, int]],
        params: int,
        reduce: torch.dtype,
        weights: torch.dtype,
        gather: torch.dtype,
    ) -> None:
        self._sums = torch.zeros(params, dtype=torch.float64, device=CPU)
        self._buckets: dict[str, tuple[Tensor, Tensor, slice]] = {}
        for b, index in found:
            shard = min(b.shard, -(-SMALL // b.ranks))
            own = slice(index * shard, (index + 1) * shard)
            formats = reduce, gather if b.replica.zero == 3 else weights
            sums, whole = (torch.zeros(shard * b.ranks, dtype=d, device=CPU) for d in formats)
            self._buckets[b.key] = sums, whole, own

    def begin(self, *_: object) -> None:
        """No gradients, no parameters, and nobody reads any."""

    open = reads = close = update = begin

    def start(self, meeting: Collective, transport: Transport) -> Start:
        group = meeting.group
        if not meeting.bucket:
            return lambda: transport.all_reduce(group, self._sums), None
        sums, whole, own = self._buckets[meeting.bucket]
        match meeting.kind:
            case MessageKind.REDUCE_SCATTER:
                return lambda: transport.reduce_scatter(group, sums[own], sums), None
            case MessageKind.ALL_REDUCE:
                return lambda: transport.all_reduce(group, sums), None
            case MessageKind.ALL_GATHER:
                return lambda: transport.all_gather(group, whole, whole[own]), None
            case _:
                raise AssertionError(f"{meeting} has no bucket")

    def squares(self) -> Tensor:
        return torch.zeros(0, device=CPU)


@dataclass(frozen=True)
class TimedKernels:
    """No arithmetic: ops take the seconds given, [step, op]; after the last step given come the first ones again."""

    stages: Mapping[int, BlankStage]
    sync: BlankBucketSync
    seconds: FloatArray
    extras: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # nobody reads a batch

    def hold(self, step: int, op: int, since_s: float, tick: Callable[[], None]) -> None:
        """Sleep, which leaves the processor to other ranks: each op runs as on a device of its own."""
        clock.sleep_until(since_s + float(self.seconds[step % len(self.seconds), op]), tick)


Kernels = RealKernels | TimedKernels  # all compute of one rank
RankStage = Stage | BlankStage
