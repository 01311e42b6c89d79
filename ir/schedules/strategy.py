"""A schedule as directives: split, a place per stage and microbatch range, an order table. No schedule is special."""

from ir.core.filters import parse_filter
from ir.directives.place import OrderDirective, PlaceDirective, SplitDirective
from ir.directives.strategy import Directive
from ir.schedules.schedule import Schedule

DIM = "MB"


def placing(schedule: Schedule) -> list[Directive]:
    """The split and the places.

    >>> from ir.schedules.registry import build
    >>> [str(d) for d in placing(build("dualpipe", 2, 4))][1]
    'place({"PP": 0, "MB": "0..1"}, group=0)'
    """
    out: list[Directive] = [SplitDirective(parse_filter({}), DIM, schedule.microbatches)]
    where: dict[tuple[int, ...], list[str]] = {}
    for p in schedule.placements:
        if p.mbs:  # a single microbatch leaves DualPipe's second direction empty
            where.setdefault(p.rank_of_stage, []).append(f"{p.mbs.start}..{p.mbs.stop - 1}")
    for ranks, mbs in where.items():
        for stage, rank in enumerate(ranks):
            tags: dict[str, object] = {"PP": stage}
            if len(schedule.placements) > 1:
                tags[DIM] = ",".join(mbs)
            out.append(PlaceDirective(parse_filter(tags), rank))
    return out


def ordering(schedule: Schedule) -> Directive:
    """The order table of every rank."""
    return OrderDirective(table=tuple(enumerate(schedule.orders)))
