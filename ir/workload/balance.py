"""Balancing layers over ranks, not stages: a rank that holds the head should hold fewer layers elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

Goal = tuple[float, float, float, float]


def by_rank(
    counts: Sequence[int],
    costs: Sequence[float],
    ends: tuple[float, float],
    ranks: Sequence[int],
    most: int | None = None,
) -> list[int]:
    """Layer counts per stage, improved from `counts` by moving one layer at a time while the goal falls.

    costs: one per layer. ends: what embedding adds to the first stage, head and MTP to the last; those two stages may
    end up without a layer. ranks: the rank of each stage. most: no stage takes more layers than this (memory follows
    layers). The goal: the dearest rank, then evenness of ranks, then the dearest stage, then evenness of stages.

    >>> by_rank([2, 2, 2, 2], [1.0] * 8, (0.0, 2.0), (0, 1, 1, 0))  # V shape: rank 0 holds the head
    [2, 3, 2, 1]
    """
    best = list(counts)
    limit = len(costs) if most is None else most
    best = _under(best, costs, ends, ranks, limit)
    goal, load = _goal(best, costs, ends, ranks)
    while True:
        worst = max(range(len(load)), key=lambda r: load[r])
        givers = [s for s in range(len(best)) if ranks[s] == worst and best[s] > _least(s, len(best))]
        moves = [(i, j) for i in givers for j in range(len(best)) if i != j and best[j] < limit]
        options = [(_goal(_moved(best, i, j), costs, ends, ranks)[0], i, j) for i, j in moves]
        if not options or min(options)[0] >= goal:
            return best
        _, i, j = min(options)
        best = _moved(best, i, j)
        goal, load = _goal(best, costs, ends, ranks)


def _under(
    counts: list[int], costs: Sequence[float], ends: tuple[float, float], ranks: Sequence[int], limit: int
) -> list[int]:
    """Counts with no stage above the limit: from all full, layers leave the dearest ranks' stages."""
    if max(counts) <= limit:
        return counts
    out = [limit] * len(counts)
    for _ in range(limit * len(counts) - len(costs)):
        free = [s for s in range(len(out)) if out[s] > _least(s, len(out))]
        load = {s: _goal(_less(out, s), costs, ends, ranks)[0] for s in free}
        out = _less(out, min(free, key=lambda s: (load[s], s)))
    return out


def _less(counts: list[int], stage: int) -> list[int]:
    return [n - (s == stage) for s, n in enumerate(counts)]


def _least(stage: int, stages: int) -> int:
    return 0 if stages > 1 and stage in (0, stages - 1) else 1


def _moved(counts: list[int], giver: int, taker: int) -> list[int]:
    out = list(counts)
    out[giver] -= 1
    out[taker] += 1
    return out


def _goal(
    counts: Sequence[int], costs: Sequence[float], ends: tuple[float, float], ranks: Sequence[int]
) -> tuple[Goal, list[float]]:
    total = [0.0, *accumulate(costs)]
    cuts = [min(c, len(costs)) for c in (0, *accumulate(counts))]
    stage = [total[b] - total[a] for a, b in pairwise(cuts)]
    stage[0] += ends[0]
    stage[-1] += ends[1]
    load = [0.0] * (1 + max(ranks))
    for s, r in enumerate(ranks):
        load[r] += stage[s]
    # Rounded, so that the order of sums decides no tie.
    spread = (max(load), sum(x * x for x in load), max(stage), sum(x * x for x in stage))
    a, b, c, d = (float(f"{x:.9e}") for x in spread)
    return (a, b, c, d), load
