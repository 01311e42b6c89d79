"""From start orders to a good one: justify them to the right and to the left in turn, then shake and repeat.

Setting all ops as late as possible, latest first, and then as early as possible, earliest first, never needs more time
and mostly less (forward-backward improvement, known from project scheduling: Tormos & Lova, 2001). Holding memory runs
the same way in both directions: backwards, W takes it and F gives it back.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from random import Random

from ir.schedules.schedule import OpTimes
from ir.schedules.search.blocks import blocks, unroll
from ir.schedules.search.greedy import greedy, paces, rounds, rules
from ir.schedules.search.shop import ROUNDING, ScheduleProblem, Sequences, settle

_SAME = 1e-12  # relative; below, two objectives differ by rounding only
_TRY = 60_000  # ops to set in time while rules are compared
_PACK = 100_000  # ops of all blocks that are packed
_IMPROVE = (300_000, 70)  # the same for improving: in all, and per op of the problem


@dataclass(frozen=True)
class FoundSchedule:
    """A schedule: its objective (the latest end of a rank and its tail), ends of ops, and each rank's ops in order."""

    objective: float
    ends: list[float]
    sequences: Sequences


@dataclass
class ScheduleSearchEffort:
    """How much work is left, counted in ops set in time, so that it does not depend on the machine."""

    left: int

    def spend(self, ops: int) -> bool:
        """Take from what is left; whether there was anything."""
        self.left -= ops
        return self.left + ops > 0


def lower_bound(shop: ScheduleProblem) -> float:
    """No schedule's objective is less: every rank starts late, lacks work before its first I, and ends early.

    >>> from ir.schedules.schedule import OpTimes
    >>> lower_bound(ScheduleProblem(ranks=4, mbs=8, chunks=1, times=OpTimes(), limit=8))
    27.0
    """
    v, w = shop.chunks, shop.times.w_memory
    first_f, first_i, w_time = shop.seconds[0], shop.seconds[v], shop.seconds[-1]
    total, fits = shop.mbs * v, min(shop.mbs * v, int(shop.limit + ROUNDING))
    # Ws a rank may still owe after its last I; that I's microbatch was whole until then.
    owed = min(total, int((shop.limit - 1) / w + ROUNDING) + 1) if w > 0 else total
    alone = shop.eta[-1] + first_i + w_time
    bound = alone + shop.tail[0]
    for rank in range(shop.ranks):
        begin = shop.eta[shop.route.index((rank, 0))]
        input_grad = min(shop.eta[shop.route.index((rank, k))] for k in range(v, 2 * v))
        rest = max(begin + fits * first_f, input_grad) + (total - fits) * first_f + total * first_i
        drain = alone - first_i - shop.eta[shop.route.index((rank, 2 * v - 1))]
        bound = max(
            bound,
            rest + total * w_time + shop.tail[rank],
            rest + (total - owed) * w_time + drain + shop.tail[0],
        )
    return bound


def search(
    shop: ScheduleProblem, more: Sequence[list[int]] = (), breadth: int = 8, shakes: int = 120
) -> list[FoundSchedule]:
    """The best schedules found, best first; at least one.

    more: start orders to try beside those searched for.
    breadth: how many start orders of each family are improved; the best third of that number are then shaken.
    """
    goal = lower_bound(shop) * (1 + _SAME)
    effort = ScheduleSearchEffort(_IMPROVE[0] + _IMPROVE[1] * shop.ops)
    seconds = shop.every(shop.seconds)
    pool: list[FoundSchedule] = []
    for order in chain(_best(shop, more, breadth), start_orders(shop, breadth)):
        pool.append(justify(shop, order, seconds, effort))
        if pool[-1].objective <= goal:
            break
    pool.sort(key=lambda x: x.objective)
    best, random = pool[: max(1, breadth // 3)], Random(0)
    for turn in range(shakes):
        if min(x.objective for x in best) <= goal or effort.left <= 0:
            break
        old = best[turn % len(best)]
        new = justify(shop, shake(shop, old, random), seconds, effort)
        if new.objective <= old.objective * (1 + _SAME):
            best[turn % len(best)] = new
    return sorted(best + pool, key=lambda x: x.objective)


def start_orders(shop: ScheduleProblem, count: int) -> Iterator[list[int]]:
    """The most promising of each family, one family after the other."""
    yield from round_orders(shop, count)
    yield from block_orders(shop, count)
    yield from greedy_orders(shop, count)


def greedy_orders(shop: ScheduleProblem, count: int) -> list[list[int]]:
    """By the rules that do best on fewer microbatches, but enough for a steady state at the limit."""
    trying = rules(shop)
    least = max(shop.ranks, int(1.5 * shop.limit / shop.chunks)) + 2
    mbs = min(shop.mbs, max(least, _TRY // (len(trying) * 3 * shop.chunks * shop.ranks)))
    trial = replace(shop, mbs=mbs)
    trying = trying[: max(20, 20 * _TRY // trial.ops)]
    scored = sorted((_reached(trial, greedy(trial, rule)), number) for number, rule in enumerate(trying))
    return [greedy(shop, trying[number]) for _, number in scored[:count]]


def round_orders(shop: ScheduleProblem, count: int) -> list[list[int]]:
    """F and I in turn, one chunk only."""
    if shop.chunks != 1:
        return []
    return _best(shop, [rounds(shop, ahead, thrifty) for ahead in paces(shop) for thrifty in (True, False)], count)


def block_orders(shop: ScheduleProblem, count: int) -> list[list[int]]:
    """Repeated blocks, as they are and with their ends packed on the blocks' own grid, where nothing is skewed yet."""
    if shop.chunks != 2:
        return []
    grid = ScheduleProblem(shop.ranks, shop.mbs, 2, OpTimes(), shop.limit)
    known = blocks(shop.ranks, shop.limit)
    some = min(len(known), max(6, min(24, _PACK // shop.ops)))
    plain = [unroll(shop, known[i * len(known) // some]) for i in range(some)]
    packed = [justify(grid, order, grid.every(grid.seconds), ScheduleSearchEffort(8 * shop.ops)) for order in plain]
    orders = plain + [shop.by_end(x.ends) for x in packed]
    return _best(shop, orders, count)


def _best(shop: ScheduleProblem, orders: Sequence[list[int]], count: int) -> list[list[int]]:
    scored = sorted((_reached(shop, order), number) for number, order in enumerate(orders))
    return [orders[number] for _, number in scored[:count]]


def _reached(shop: ScheduleProblem, order: Sequence[int]) -> float:
    return shop.objective(settle(shop, order, shop.every(shop.seconds))[0])


def justify(
    shop: ScheduleProblem, order: Sequence[int], seconds: Sequence[float], effort: ScheduleSearchEffort
) -> FoundSchedule:
    """Improve an order until two rounds in a row bring nothing."""
    ends, sequences = settle(shop, order, seconds)
    best = FoundSchedule(shop.objective(ends), ends, sequences)
    idle = 0
    while idle < 2 and effort.spend(2 * shop.ops):
        late, _ = settle(shop, _latest_first(ends), seconds, backward=True)
        ends, sequences = settle(shop, _latest_first(late), seconds)
        found = FoundSchedule(shop.objective(ends), ends, sequences)
        idle = 0 if found.objective < best.objective * (1 - _SAME) else idle + 1
        if not idle:
            best = found
    return best


def _latest_first(ends: Sequence[float]) -> list[int]:
    return sorted(range(len(ends)), key=ends.__getitem__, reverse=True)


def shake(shop: ScheduleProblem, found: FoundSchedule, random: Random) -> list[int]:
    """A neighbouring order: the same ops set in time with durations that are somewhat wrong."""
    wrong = random.choice((0.3, 0.6, 0.9))
    seconds = [x * (1 + wrong * (2 * random.random() - 1)) for x in shop.every(shop.seconds)]
    return shop.by_end(settle(shop, shop.by_end(found.ends), seconds)[0])
