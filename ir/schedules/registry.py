"""Schedules by name: aliases, legal shapes, and one way to build them all.

>>> build("1F1B", ranks=2, microbatches=3).orders[1].cells()
['1F0', '1B0', '1F1', '1B1', '1F2', '1B2']
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from ir.core.errors import PiperError, job_error, nearest, usage_error
from ir.core.order import Order
from ir.schedules import fixed
from ir.schedules.schedule import OpTimes, Schedule, StagePlacement

Orders = tuple[Order, ...]
Builder = Callable[[int, int, int, OpTimes], Orders]  # ranks, microbatches, chunks, op times
Places = Callable[[int, int, int], tuple[StagePlacement, ...]]  # ranks, microbatches, chunks


def _looped(ranks: int, mbs: int, chunks: int) -> tuple[StagePlacement, ...]:
    return (StagePlacement(range(mbs), tuple(range(ranks)) * chunks),)


def _v(ranks: int, mbs: int, chunks: int) -> tuple[StagePlacement, ...]:
    return (StagePlacement(range(mbs), (*range(ranks), *reversed(range(ranks)))),)


def _both_ways(ranks: int, mbs: int, chunks: int) -> tuple[StagePlacement, ...]:
    half = (mbs + 1) // 2
    forth = tuple(range(ranks))
    return (StagePlacement(range(half), forth), StagePlacement(range(half, mbs), forth[::-1]))


def _searched(name: str) -> Builder:
    """By a search, imported where it is used: it is not needed to emit a table. A large one takes half a minute."""

    def orders(ranks: int, mbs: int, chunks: int, times: OpTimes) -> Orders:
        from ir.schedules.search.searched import ORDERS

        return ORDERS[name](ranks, mbs, times)

    return orders


@dataclass(frozen=True)
class _Family:
    builder: Builder
    places: Places = _looped
    least_chunks: int = 1
    most_chunks: int | None = 1
    default_chunks: int = 1
    searched: bool = False


_FAMILIES = {
    "gpipe": _Family(lambda p, m, v, t: fixed.gpipe(p, m)),
    "1f1b": _Family(lambda p, m, v, t: fixed.one_f_one_b(p, m)),
    "interleaved-1f1b": _Family(lambda p, m, v, t: fixed.interleaved(p, m, v), _looped, 2, None, 2),
    "1f1b-overlap": _Family(lambda p, m, v, t: fixed.overlapped(p, m)),
    "interleaved-1f1b-overlap": _Family(lambda p, m, v, t: fixed.overlapped(p, m, v), _looped, 2, None, 2),
    "looped-bfs": _Family(lambda p, m, v, t: fixed.looped_bfs(p, m, v), _looped, 2, None, 2),
    "zb1p": _Family(lambda p, m, v, t: fixed.zb1p(p, m, v), _looped, 1, None, 1),
    "zb2p": _Family(_searched("zb2p"), searched=True),
    "zbv": _Family(lambda p, m, v, t: fixed.zbv(p, m), _v, 2, 2, 2),
    "v-half": _Family(_searched("v-half"), _v, 2, 2, 2, searched=True),
    "v-min": _Family(_searched("v-min"), _v, 2, 2, 2, searched=True),
    "dualpipe": _Family(lambda p, m, v, t: fixed.dualpipe(p, m), _both_ways),
    "dualpipev": _Family(lambda p, m, v, t: fixed.dualpipev(p, m), _v, 2, 2, 2),
}
NAMES = tuple(_FAMILIES)

_ALIASES = {
    "interleaved": "interleaved-1f1b",
    "vpp": "interleaved-1f1b",
    "virtualpipeline": "interleaved-1f1b",
    "combined1f1b": "1f1b-overlap",
    "interleavedoverlap": "interleaved-1f1b-overlap",
    "bfs": "looped-bfs",
    "breadthfirst": "looped-bfs",
    "zbh1": "zb1p",
    "interleavedzerobubble": "zb1p",
    "zbh2": "zb2p",
    "zerobubblev": "zbv",
    "zbvzerobubble": "zbv",
} | {re.sub(r"[^a-z0-9]", "", name): name for name in NAMES}


def canonical(name: str) -> str:
    """The name a schedule goes by here, from any case, punctuation and common alias.

    Raises PiperError (usage): no schedule goes by that name.

    >>> canonical("ZB-H1"), canonical("ScheduleZBVZeroBubble"), canonical("DualPipe-V")
    ('zb1p', 'zbv', 'dualpipev')
    """
    word = re.sub(r"[^a-z0-9]", "", str(name).lower()).removeprefix("schedule")  # the library may be given anything
    if found := _ALIASES.get(word):
        return found
    close = nearest(word, _ALIASES, coded=False)
    raise usage_error("schedule.name", f"unknown schedule {name!r}", _ALIASES[close] if close else None, NAMES)


def default_chunks(name: str) -> int:
    """Stages per rank where none are asked for.

    >>> default_chunks("vpp"), default_chunks("dualpipe")
    (2, 1)
    """
    return _FAMILIES[canonical(name)].default_chunks


def order_depends_on_times(name: str) -> bool:
    """Whether a schedule's order is searched for given op times.

    >>> order_depends_on_times("zb2p"), order_depends_on_times("zbv")
    (True, False)
    """
    return _FAMILIES[canonical(name)].searched


def legal_chunks(name: str, chunks: int) -> bool:
    """Whether a schedule exists with that many stages per rank.

    >>> [v for v in range(5) if legal_chunks("interleaved-1f1b", v)], legal_chunks("zbv", 1)
    ([2, 3, 4], False)
    """
    family = _FAMILIES[canonical(name)]
    return family.least_chunks <= chunks and (family.most_chunks is None or chunks <= family.most_chunks)


def build(name: str, ranks: int, microbatches: int, chunks: int | None = None, times: OpTimes = OpTimes()) -> Schedule:
    """A schedule's orders and placements, or a refusal that says what would do.

    times: used by the schedules searched for given op times; the others are the same for all.
    """
    name = canonical(name)
    family = _FAMILIES[name]
    if chunks is None:
        chunks = family.default_chunks
    check_shape(name, ranks, microbatches, chunks)
    return Schedule(
        name=name,
        ranks=ranks,
        microbatches=microbatches,
        chunks=chunks,
        placements=family.places(ranks, microbatches, chunks),
        orders=_orders(name, ranks, microbatches, chunks, times if family.searched else OpTimes()),
        order_depends_on_times=family.searched,
    )


@lru_cache(maxsize=32)
def _orders(name: str, ranks: int, mbs: int, chunks: int, times: OpTimes) -> Orders:
    """One object for one table: jobs that differ in costs alone, or in what a stage holds, share it."""
    return _FAMILIES[name].builder(ranks, mbs, chunks, times)


def check_shape(name: str, ranks: int, microbatches: int, chunks: int) -> None:
    """Refuse a shape the schedule does not have.

    >>> check_shape("dualpipe", 3, 12, 1)
    Traceback (most recent call last):
    ...
    ir.core.errors.PiperError: parallel.pp: dualpipe needs an even number of ranks to pair them, not 3
    allowed: an even number
    fix: 4 ranks, or dualpipev, which takes any number
    """
    name = canonical(name)
    least = 2 if name == "dualpipe" else 1
    if ranks < 1:
        ask = f"{name} needs at least {least} rank{'s' * (least > 1)}, not {ranks}"
        raise usage_error("parallel.pp", ask, str(least), f">= {least}")
    if microbatches < 1:
        message = f"{name} needs at least 1 microbatch, not {microbatches}"
        raise usage_error("schedule.microbatches", message, str(ranks), ">= 1")
    if not legal_chunks(name, chunks):
        raise _wrong_chunks(name, chunks)
    if name == "dualpipe" and ranks % 2:
        message = f"dualpipe needs an even number of ranks to pair them, not {ranks}"
        fix = f"{ranks + 1} ranks, or dualpipev, which takes any number"
        raise usage_error("parallel.pp", message, fix, "an even number")


# One schedule each, that changes its name with the number of chunks.
_TWINS = {"1f1b": "interleaved-1f1b", "1f1b-overlap": "interleaved-1f1b-overlap", "gpipe": "looped-bfs"}
_TWINS |= {many: one for one, many in _TWINS.items()}


def _wrong_chunks(name: str, chunks: int) -> PiperError:
    family = _FAMILIES[name]
    exact = family.most_chunks is not None
    need = f"{'' if exact else 'at least '}{family.least_chunks} stage{'s' * (family.least_chunks > 1)} per rank"
    why = "; its two copies are not chunks" if name == "dualpipe" else ""
    twin = _TWINS.get(name)
    also = f", or {twin}" if twin and legal_chunks(twin, chunks) else ""
    message, fix = f"{name} needs {need}, not {chunks}{why}", f"{family.default_chunks}{also}"
    return usage_error("schedule.stages_per_rank", message, fix, f"{'' if exact else '>= '}{family.least_chunks}")


def flushed(build: Callable[[int], Schedule], microbatches: int, flushes: int) -> Schedule:
    """The schedule of `microbatches / flushes`, as often, one behind the other. No rank waits for the others between.

    build: from a number of microbatches. Raises PiperError (job): microbatches are no multiple of flushes.

    >>> from ir.schedules.registry import build
    >>> two = flushed(lambda m: build("gpipe", 2, m), 4, 2)
    >>> for order in two.orders:
    ...     print(*order.cells())
    0F0 0F1 0B0 0B1 0F2 0F3 0B2 0B3
    1F0 1F1 1B0 1B1 1F2 1F3 1B2 1B3
    """
    each, over = divmod(microbatches, flushes)
    if over:
        fix, allowed = f"microbatches = {(each + 1) * flushes}", f"a multiple of flushes = {flushes}"
        raise job_error("schedule.microbatches", f"{microbatches} microbatches in {flushes} flushes", fix, allowed)
    one = build(each)
    if flushes == 1:
        return one
    starts = range(0, microbatches, each)
    later = (replace(p, mbs=range(p.mbs.start + m, p.mbs.stop + m)) for m in starts for p in one.placements)
    placements: tuple[StagePlacement, ...] = (
        tuple(later) if len(one.placements) > 1 else (replace(one.placements[0], mbs=range(microbatches)),)
    )
    orders = tuple(_repeated(order, each, flushes) for order in one.orders)
    return replace(one, microbatches=microbatches, placements=placements, orders=orders)


def _repeated(order: Order, each: int, flushes: int) -> Order:
    units = int(order.unit.max(initial=-1)) + 1
    k = np.repeat(np.arange(flushes), len(order))
    stage, token, mb, unit = (np.tile(c, flushes) for c in (order.stage, order.token, order.mb, order.unit))
    return Order(stage, token, mb + k * each, unit + k * units)
