"""The schedules whose order depends on op times: ZB-2p, V-Half and V-Min.

All three are searched: start orders (`searched_greedy`, `searched_blocks`) are improved in both directions of time
(`searched_improve`) under a hard limit of activations per rank (`searched_shop`). Every order on the way can run, and
the same question has the same answer on every machine: effort is counted in ops, not in seconds.

ZB-2p is from "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241), V-Half and V-Min are from "Pipeline Parallelism
with Controllable Memory" (arXiv:2405.15362).
"""

from dataclasses import replace

import numpy as np

from ir.core.order import Order
from ir.schedules.schedule import OpTimes
from ir.schedules.search.improve import FoundSchedule, lower_bound, search
from ir.schedules.search.shop import ScheduleProblem


def zb2p(ranks: int, microbatches: int, times: OpTimes) -> tuple[Order, ...]:
    """One stage per rank, at most 2P activations in flight on each.

    Of an activation, I gives back 1 - w_memory. The least makespan comes first, then the least span of a rank from its
    own first start to its last end; where I gives something back, the span comes first: that is what the paper prints.

    >>> for order in zb2p(ranks=2, microbatches=3, times=OpTimes()):
    ...     print(*order.cells())
    0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2
    1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2
    """
    late = [rank * (times.F + times.p2p) for rank in range(ranks)]  # no rank can start earlier
    plain = ScheduleProblem(ranks, microbatches, 1, times, 2.0 * ranks)
    # With this tail, the objective is the worst span, but for the constant late[-1].
    spans = replace(plain, tail=tuple(late[-1] - x for x in late))
    goals = (spans, plain) if times.w_memory < 1 else (plain, spans)
    found = search(goals[0])
    if times.w_memory >= 1 and min(spans.objective(x.ends) for x in found) > lower_bound(spans) * (1 + 1e-12):
        found += search(spans)
    # Both at once, as far as either was reached: rank r ends neither after `end` nor after late[r] + `span`.
    span = min(spans.objective(x.ends) for x in found) - late[-1]
    end = lower_bound(plain) if times.w_memory < 1 else min(plain.objective(x.ends) for x in found)
    both = replace(plain, tail=tuple(max(0.0, end - span - x) for x in late))
    if min(both.objective(x.ends) for x in found) > end * (1 + 1e-12):
        found += search(both, [plain.by_end(x.ends) for x in found])
    # rounded: without the noise of adding up in another order
    return _orders(min(found, key=lambda x: [float(f"{goal.objective(x.ends):.12g}") for goal in goals]), plain)


def v_half(ranks: int, microbatches: int, times: OpTimes) -> tuple[Order, ...]:
    """Two stages per rank in a V, and half of 1F1B's activations: 2 ⌊(P + 2) / 2⌋ chunk-microbatches in flight.

    >>> v_half(ranks=1, microbatches=1, times=OpTimes())[0].cells()
    ['0F0', '1F0', '1I0', '0I0', '1W0', '0W0']
    """
    return _v(ranks, microbatches, times, 2 * ((ranks + 2) // 2))


def v_min(ranks: int, microbatches: int, times: OpTimes) -> tuple[Order, ...]:
    """Two stages per rank in a V, and a third of 1F1B's activations: 2 ⌊(P + 4) / 3⌋ chunk-microbatches in flight."""
    return _v(ranks, microbatches, times, 2 * ((ranks + 4) // 3))


def _v(ranks: int, mbs: int, times: OpTimes, limit: int) -> tuple[Order, ...]:
    shop = ScheduleProblem(ranks, mbs, 2, replace(times, w_memory=1.0), float(limit))
    return _orders(search(shop)[0], shop)


def _orders(found: FoundSchedule, shop: ScheduleProblem) -> tuple[Order, ...]:
    return tuple(_order(shop, ops) for ops in found.sequences)


def _order(shop: ScheduleProblem, ops: list[int]) -> Order:
    if not shop.times.W:  # then it costs nothing to free activations at once
        v = shop.chunks
        pairs = [(op, op + v * shop.mbs) if shop.kind(op) >= v else (op,) for op in ops if shop.kind(op) < 2 * v]
        ops = [op for pair in pairs for op in pair]
    table = np.array([shop.row(op) for op in ops], dtype=np.int64).reshape(-1, 3)
    return Order(table[:, 0], table[:, 1], table[:, 2], np.arange(len(ops), dtype=np.int64))


ORDERS = {"zb2p": zb2p, "v-half": v_half, "v-min": v_min}
