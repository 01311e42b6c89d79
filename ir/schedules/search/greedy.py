"""Start orders by rule: every rank, when it is free, does the op it prefers, or two passes in turn with W as a filler.

Both keep the limit and cannot deadlock.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import permutations, product
from math import ceil, inf

from ir.schedules.search.shop import ROUNDING, ScheduleProblem


@dataclass(frozen=True)
class GreedyOrderRule:
    """How a greedy rank chooses.

    preferred: the kinds of F and I, most preferred first.
    ahead: per rank, how many microbatches of its first chunk may be between F and I.
    patience: a W may delay the next op known to come by this share of its own length.
    thrifty: a W may delay it by more once this rank, waiting, would idle more than any did yet (by that share of a W).
    """

    preferred: tuple[int, ...]
    ahead: tuple[float, ...]
    patience: float
    thrifty: bool = False


def rules(shop: ScheduleProblem) -> list[GreedyOrderRule]:
    """All rules worth a try: the F of a later chunk always goes first."""
    v = shop.chunks
    orders = [x for x in permutations(range(2 * v)) if v == 1 or x.index(1) < x.index(0)]
    manners = ((0.0, False), (1.0, False), (0.0, True), (0.5, False), (0.25, True))
    return [GreedyOrderRule(order, ahead, *manner) for manner, ahead, order in product(manners, paces(shop), orders)]


def paces(shop: ScheduleProblem) -> list[tuple[float, ...]]:
    """Ways to bound how far a rank's F may run ahead of its I."""
    p, v = shop.ranks, shop.chunks
    trip = [shop.eta[shop.route.index((r, 2 * v - 1))] - shop.eta[shop.route.index((r, 0))] for r in range(p)]
    if v == 1:
        # As many F as fit before the first I comes, or as two per rank; perhaps one more on the first ranks.
        fit = [max(1, int(x / shop.seconds[0] + 1e-9)) for x in trip]
        two = [2 * (p - r) - 1 for r in range(p)]
        steps = sorted({0, p // 4, p // 2, 3 * p // 4, p - 1})
        found = [tuple(x + float(r < step) for r, x in enumerate(row)) for row in (two, fit) for step in steps]
    else:
        share = [(x + shop.seconds[-1]) / sum(shop.seconds) for x in trip]
        found = [tuple(float(ceil(more * x)) for x in share) for more in (1.0, 1.2, 1.5, 2.0)]
    return [*dict.fromkeys(found), (inf,) * p]


def greedy(shop: ScheduleProblem, rule: GreedyOrderRule) -> list[int]:
    """All ops by start time, chosen by a rule.

    It never deadlocks: kinds stay in microbatch order, and the oldest open microbatch always finds room, because the
    F of an early chunk leaves one place for each later one.

    >>> from ir.schedules.schedule import OpTimes
    >>> shop = ScheduleProblem(ranks=2, mbs=2, chunks=1, times=OpTimes(), limit=2)
    >>> [shop.text(op) for op in greedy(shop, GreedyOrderRule((1, 0), (2, 1), 0.0))]
    ['0F0', '0F1', '1F0', '1I0', '0I0', '1F1', '0W0', '1I1', '0I1', '1W0', '0W1', '1W1']
    """
    ranks = [_Rank(shop, rule, r) for r in range(shop.ranks)]
    ranks[0].ready[0] = [0.0] * shop.mbs
    after = {a: b for a, b in zip(shop.route, shop.route[1:], strict=False)}
    order: list[int] = []
    wakes = [(0.0, 0)]
    while wakes:
        now, r = heappop(wakes)
        rank = ranks[r]
        if now < rank.free:
            continue
        kind, then = rank.choose(now, ranks)
        if then < inf:
            heappush(wakes, (then, r))
        if kind is None:
            continue
        order.append(shop.op(r, kind, rank.do(kind, now, then)))
        if next_ := after.get((r, kind)):
            other = ranks[next_[0]]
            arrives = then if next_[0] == r else then + shop.times.p2p
            other.ready[next_[1]].append(arrives)
            if next_[0] != r:
                heappush(wakes, (max(arrives, other.free), next_[0]))
    return order


class _Rank:
    """What a greedy rank knows: what has arrived, what it holds, what it has done."""

    def __init__(self, shop: ScheduleProblem, rule: GreedyOrderRule, rank: int) -> None:
        self.mbs, self.chunks, self.seconds, self.grows = shop.mbs, shop.chunks, shop.seconds, shop.grows
        self.preferred, self.ahead = rule.preferred, rule.ahead[rank]
        self.spare, self.thrifty = rule.patience * shop.seconds[-1], rule.thrifty
        self.limit = shop.limit + ROUNDING
        self.free = 0.0
        self.idle = 0.0  # since its first op
        self.held = 0.0
        self.alive = [0.0] * shop.chunks  # of `held`
        self.done = [0] * (3 * shop.chunks)
        self.ready: list[list[float]] = [[] for _ in range(2 * shop.chunks)]
        self.pending: deque[int] = deque()  # kinds of W

    def choose(self, now: float, ranks: Sequence["_Rank"]) -> tuple[int | None, float]:
        """The op to start now and its end; or no op and when to look again. ranks: all, as they are now."""
        soon, full = inf, False
        for kind in self.preferred:
            at = self.done[kind]
            if at >= len(self.ready[kind]):
                continue
            comes = self.ready[kind][at]
            if kind < self.chunks:
                if kind == 0 and at - self.done[2 * self.chunks - 1] >= self.ahead:
                    continue
                if not self._room(kind):
                    full = full or comes <= now
                    continue
            if comes <= now:
                return kind, now + self.seconds[kind]
            soon = min(soon, comes)
        if self.pending and (full or self._fills(soon - now, ranks)):
            return self.pending[0], now + self.seconds[-1]
        return None, soon

    def _fills(self, gap: float, ranks: Sequence["_Rank"]) -> bool:
        if self.thrifty:
            return gap >= self.seconds[-1] or self.idle + gap > max(x.idle for x in ranks) + self.spare
        return gap + self.spare >= self.seconds[-1]

    def _room(self, kind: int) -> bool:
        later = self.chunks - 1 - kind
        return self.held + 1 <= self.limit and sum(self.alive[: kind + 1]) + 1 + later <= self.limit

    def do(self, kind: int, start: float, end: float) -> int:
        """Note an op as done; its microbatch."""
        mb = self.done[kind]
        self.idle += start - self.free if any(self.done) else 0.0
        self.done[kind] += 1
        self.free = end
        self.held += self.grows[kind]
        token, place = divmod(kind, self.chunks)
        self.alive[place if token == 0 else self.chunks - 1 - place] += self.grows[kind]
        if token == 1:
            self.pending.append(kind + self.chunks)
        elif token == 2:
            self.pending.popleft()
        return mb


def rounds(shop: ScheduleProblem, ahead: Sequence[float], thrifty: bool) -> list[int]:
    """One chunk: first `ahead` Fs, then I and F in turn; W fills a wait, or makes room where the limit asks for it.

    A W longer than the wait is started nevertheless, unless `thrifty` and this rank idled less than the worst did.
    This is the heuristic of "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241, section 3.1).

    >>> from ir.schedules.schedule import OpTimes
    >>> shop = ScheduleProblem(ranks=2, mbs=3, chunks=1, times=OpTimes(), limit=4)
    >>> [shop.text(op) for op in rounds(shop, (3, 1), True) if shop.home[op] == 1]
    ['1F0', '1I0', '1F1', '1I1', '1F2', '1I2', '1W0', '1W1', '1W2']
    """
    fill = [int(max(1, min(x, shop.limit, shop.mbs))) for x in ahead]
    f_at = [(r, m) for r in range(shop.ranks) for m in range(fill[r])]
    order = [shop.op(r, 0, m) for r, m in f_at]
    for turn in range(shop.mbs):
        order += [shop.op(r, 1, turn) for r in reversed(range(shop.ranks))]
        order += [shop.op(r, 0, fill[r] + turn) for r in range(shop.ranks) if fill[r] + turn < shop.mbs]
    return _weave(shop, order, thrifty)


def _weave(shop: ScheduleProblem, order: Sequence[int], thrifty: bool) -> list[int]:
    """Add the Ws to an order of Fs and Is."""
    shift, w_time, p = shop.chunks * shop.mbs, shop.seconds[-1], shop.ranks
    done, free, idle, held = [0.0] * shop.ops, [0.0] * p, [0.0] * p, [0.0] * p
    pending: list[deque[int]] = [deque() for _ in range(p)]
    woven: list[int] = []

    def put(r: int, op: int, start: float) -> None:
        woven.append(op)
        kind = shop.kind(op)
        free[r] = done[op] = start + shop.seconds[kind]
        held[r] += shop.grows[kind]

    for op in order:
        r, grow = shop.home[op], shop.grows[shop.kind(op)]
        ready = max((done[other] + lag for other, lag in shop.waits[op]), default=0.0)
        while pending[r]:
            gap = ready - free[r]
            full = held[r] + grow > shop.limit + ROUNDING
            if not (full or gap >= w_time or (gap > 0 and not (thrifty and idle[r] + gap <= max(idle)))):
                break
            put(r, pending[r].popleft(), free[r])
        if shop.kind(op) or shop.mb(op):
            idle[r] += max(0.0, ready - free[r])
        put(r, op, max(ready, free[r]))
        if shop.kind(op) >= shop.chunks:
            pending[r].append(op + shift)
    return woven + [op for row in pending for op in row]
