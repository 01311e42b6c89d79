"""The search's picture of a pipeline: numbered ops, what each waits for, and one routine that sets them in time.

Stages zigzag over the ranks (0 … P-1, then back P-1 … 0), so one chunk is a plain pipeline and two are a V. A rank has
3V kinds of op, numbered in the order one microbatch meets them: F of each chunk, I of each chunk backwards, W likewise.
Within a kind, microbatches stay in order: sends and receives of one kind never overtake each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ir.schedules.schedule import OpTimes

Link = tuple[int, float]  # another op, and the latency between the two
Sequences = list[list[int]]  # per rank, its ops in order
ROUNDING = 1e-9  # of a chunk-microbatch's activations


@dataclass(eq=False)
class ScheduleProblem:
    """One search problem.

    limit: most activations a rank may hold, in chunk-microbatches; F takes 1, I gives back 1 - w_memory, W the rest.
    tail: per rank, what the objective adds to the end of its last op.

    >>> shop = ScheduleProblem(ranks=2, mbs=3, chunks=2, times=OpTimes(), limit=4)
    >>> [shop.text(op) for op in range(shop.ops) if shop.mb(op) == 0]
    ['0F0', '3F0', '3I0', '0I0', '3W0', '0W0', '1F0', '2F0', '2I0', '1I0', '2W0', '1W0']
    >>> [shop.text(op) for op, _ in shop.waits[shop.op(rank=0, kind=1, mb=2)]]
    ['3F1', '2F2']
    """

    ranks: int
    mbs: int
    chunks: int
    times: OpTimes
    limit: float
    tail: tuple[float, ...] = ()
    route: list[tuple[int, int]] = field(init=False)  # (rank, kind) of a microbatch's F and I, first to last
    eta: list[float] = field(init=False)  # when a lone microbatch starts each of these
    seconds: list[float] = field(init=False)  # per kind
    grows: list[float] = field(init=False)  # per kind, the change of activations held
    waits: list[tuple[Link, ...]] = field(init=False)
    feeds: list[tuple[Link, ...]] = field(init=False)
    home: list[int] = field(init=False)

    def __post_init__(self) -> None:
        p, v, t = self.ranks, self.chunks, self.times
        self.tail = self.tail or (0.0,) * p
        # Ops are ordered by when they end; ops that take no time would have no order.
        longest = max(t.F, t.I, t.W, t.p2p) or 1.0
        self.seconds = [max(x, 1e-7 * longest) for x in (t.F, t.I, t.W) for _ in range(v)]
        self.grows = [1.0] * v + [t.w_memory - 1.0] * v + [-t.w_memory] * v
        stages = [(r, c) for c in range(v) for r in (range(p) if c % 2 == 0 else reversed(range(p)))]
        self.route = stages + [(r, 2 * v - 1 - c) for r, c in reversed(stages)]
        self.home = [op // self.mbs // (3 * v) for op in range(self.ops)]
        self._link()

    def _link(self) -> None:
        self.eta = [0.0]
        before: dict[tuple[int, int], tuple[int, int, float]] = {}
        for (a, i), (b, k) in zip(self.route, self.route[1:], strict=False):
            lag = self.times.p2p if a != b else 0.0
            before[b, k] = (a, i, lag)
            self.eta.append(self.eta[-1] + self.seconds[i] + lag)
        for r in range(self.ranks):
            for k in range(2 * self.chunks, 3 * self.chunks):
                before[r, k] = (r, k - self.chunks, 0.0)
        feeds: list[list[Link]] = [[] for _ in range(self.ops)]
        self.waits = []
        for op in range(self.ops):
            links = [(op - 1, 0.0)] if self.mb(op) else []
            if found := before.get((self.home[op], self.kind(op))):
                links.append((self.op(found[0], found[1], self.mb(op)), found[2]))
            self.waits.append(tuple(links))
            for other, lag in links:
                feeds[other].append((op, lag))
        self.feeds = [tuple(x) for x in feeds]

    @property
    def ops(self) -> int:
        """How many ops there are; they are numbered from 0."""
        return self.ranks * 3 * self.chunks * self.mbs

    def op(self, rank: int, kind: int, mb: int) -> int:
        """The number of an op."""
        return (rank * 3 * self.chunks + kind) * self.mbs + mb

    def kind(self, op: int) -> int:
        """Which of its rank's 3V kinds an op is."""
        return op // self.mbs % (3 * self.chunks)

    def mb(self, op: int) -> int:
        """An op's microbatch."""
        return op % self.mbs

    def row(self, op: int) -> tuple[int, int, int]:
        """Stage, token and microbatch, as an order has them."""
        token, place = divmod(self.kind(op), self.chunks)
        chunk = place if token == 0 else self.chunks - 1 - place
        rank = self.home[op]
        stage = chunk * self.ranks + (rank if chunk % 2 == 0 else self.ranks - 1 - rank)
        return stage, token, self.mb(op)

    def text(self, op: int) -> str:
        """An op's text, for people."""
        stage, token, mb = self.row(op)
        return f"{stage}{'FIW'[token]}{mb}"

    def objective(self, ends: Sequence[float]) -> float:
        """The latest end of a rank's last op, plus that rank's tail."""
        each = 3 * self.chunks * self.mbs
        return max(max(ends[r * each : (r + 1) * each]) + self.tail[r] for r in range(self.ranks))

    def by_end(self, ends: Sequence[float]) -> list[int]:
        """All ops, first ended first."""
        return sorted(range(self.ops), key=ends.__getitem__)

    def every(self, seconds_of_kind: Sequence[float]) -> list[float]:
        """A duration for every op, from one for every kind."""
        return [x for _ in range(self.ranks) for x in seconds_of_kind for _ in range(self.mbs)]


def settle(
    shop: ScheduleProblem, order: Sequence[int], seconds: Sequence[float], backward: bool = False
) -> tuple[list[float], Sequences]:
    """Set ops in time one after another, each in the first gap of its rank that its inputs and the limit allow.

    order: all ops, inputs first, and such that following it never breaks the limit; then no op is ever stuck, since
        the place after its rank's last op is free.
    backward: time runs from the end to the beginning: `order` has consumers first, W takes memory and F gives it back.

    Returns when each op ends, and each rank's ops in order; both on the running direction's clock.

    >>> shop = ScheduleProblem(ranks=1, mbs=2, chunks=1, times=OpTimes(), limit=1)
    >>> settle(shop, [0, 2, 4, 1, 3, 5], shop.every(shop.seconds))
    ([1.0, 4.0, 2.0, 5.0, 3.0, 6.0], [[0, 2, 4, 1, 3, 5]])
    """
    links, sign = (shop.feeds, -1.0) if backward else (shop.waits, 1.0)
    grows = shop.every([sign * x for x in shop.grows])
    home, limit = shop.home, shop.limit + ROUNDING
    heads = shop.tail if backward else (0.0,) * shop.ranks
    starts: list[list[float]] = [[] for _ in range(shop.ranks)]
    ends = [[head] for head in heads]  # one longer than `starts`: its first is when the rank is free
    held = [[0.0] for _ in range(shop.ranks)]  # after as many ops
    sequences: Sequences = [[] for _ in range(shop.ranks)]
    done = [0.0] * shop.ops
    for op in order:
        rank, took, grow = home[op], seconds[op], grows[op]
        ready = 0.0
        for other, lag in links[op]:
            if (arrives := done[other] + lag) > ready:
                ready = arrives
        start_of, end_of, held_after = starts[rank], ends[rank], held[rank]
        last = at = best = len(start_of)
        end = end_of[at]
        begin = end if end > ready else ready
        while at and end > ready:
            at -= 1
            if grow > 0 and held_after[at] + grow > limit:
                break
            end = end_of[at]
            earliest = end if end > ready else ready
            if earliest + took <= start_of[at]:
                best, begin = at, earliest
        start_of.insert(best, begin)
        end_of.insert(best + 1, begin + took)
        sequences[rank].insert(best, op)
        held_after.insert(best + 1, held_after[best] + grow)
        if grow and best < last:
            for later in range(best + 2, last + 2):
                held_after[later] += grow
        done[op] = begin + took
    return done, sequences
