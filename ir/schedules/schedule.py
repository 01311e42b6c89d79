"""A schedule as a value: where stages live, what each rank does, in order, once and all of it; and as directives."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ir.core.errors import ErrorKind, PiperError
from ir.core.filters import parse_filter
from ir.core.ops import OpToken
from ir.core.order import IntArray, Order
from ir.directives import Directive
from ir.directives.place import OrderDirective, PlaceDirective, SplitDirective


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


def check_complete(orders: Sequence[Order], placements: Sequence[StagePlacement]) -> None:
    """Refuse orders that do not do every pass of every stage and microbatch exactly once, on the stage's rank."""
    home = homes(placements)
    seen = np.zeros((len(OpToken), *home.shape), dtype=np.int64)
    for rank, order in enumerate(orders):
        known = (order.stage < home.shape[0]) & (order.mb < home.shape[1])
        stray = ~known
        stray[known] = home[order.stage[known], order.mb[known]] != rank
        if stray.any():
            raise _illegal(f"{order.actions()[int(stray.argmax())]} is not rank {rank}'s to do")
        np.add.at(seen, (order.token, order.stage, order.mb), 1)
    for name, count in (
        ("F", seen[OpToken.F]),
        ("I or B", seen[OpToken.I] + seen[OpToken.B]),
        ("W or B", seen[OpToken.W] + seen[OpToken.B]),
    ):
        if (count != 1).any():
            stage, mb = np.argwhere(count != 1)[0].tolist()
            raise _illegal(f"stage {stage} does {name} of microbatch {mb} {count[stage, mb]} times, not once")


def homes(placements: Sequence[StagePlacement]) -> IntArray:
    """home[stage, mb] -> rank."""
    stages, mbs = len(placements[0].rank_of_stage), max(p.mbs.stop for p in placements)
    home = np.full((stages, mbs), -1, dtype=np.int64)
    for p in placements:
        home[:, p.mbs.start : p.mbs.stop] = np.array(p.rank_of_stage)[:, None]
    return home


def _illegal(message: str) -> PiperError:
    return PiperError(ErrorKind.ILLEGAL_PLAN, message)


DIM = "MB"


def placing(schedule: Schedule) -> tuple[Directive, ...]:
    """The split and the places.

    >>> from ir.schedules.registry import build
    >>> [str(d) for d in placing(build("dualpipe", 2, 4))][1]
    'place({"PP": 0, "MB": "0..1"}, group=0)'
    """
    return _placing(schedule.microbatches, schedule.placements)


@lru_cache(maxsize=64)  # schedules of one shape, and jobs that differ in costs alone, stand alike
def _placing(microbatches: int, placements: tuple[StagePlacement, ...]) -> tuple[Directive, ...]:
    out: list[Directive] = [SplitDirective(parse_filter({}), DIM, microbatches)]
    where: dict[tuple[int, ...], list[str]] = {}
    for p in placements:
        if p.mbs:  # a single microbatch leaves DualPipe's second direction empty
            where.setdefault(p.rank_of_stage, []).append(f"{p.mbs.start}..{p.mbs.stop - 1}")
    for ranks, mbs in where.items():
        for stage, rank in enumerate(ranks):
            tags: dict[str, object] = {"PP": stage}
            if len(placements) > 1:
                tags[DIM] = ",".join(mbs)
            out.append(PlaceDirective(parse_filter(tags), rank))
    return tuple(out)


def ordering(schedule: Schedule) -> Directive:
    """The order table of every rank."""
    return OrderDirective(table=tuple(enumerate(schedule.orders)))
