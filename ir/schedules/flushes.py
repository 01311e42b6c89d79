"""Several fillings and drainings of the pipeline in one step: less in flight, and a bubble each."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ir.core.errors import job_error
from ir.core.order import Order
from ir.schedules.schedule import Schedule, StagePlacement


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
