"""Which chunks stand on which stage: decoder layers by count, embedding first, head and MTP last."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from ir.core.errors import PiperError, job_error
from ir.workload.part import Chunk, Part

Costs = Callable[[Chunk], float] | Sequence[float]
Stages = tuple[tuple[Chunk, ...], ...]
Goal = tuple[float, float, float, float]
_KEY = "parallel.layers"
_FORMS = "even | balanced | a list of decoder-layer counts, one per stage"


def partition(
    chunks: Sequence[Chunk],
    stages: int,
    layers: str | Sequence[int],
    costs: Costs | None = None,
    ranks: Sequence[int] | None = None,
    most: int | None = None,
) -> Stages:
    """Group chunks into stages, in order.

    ranks: the rank of each stage; "balanced" then evens out ranks first, stages second, giving no
    stage more than `most` layers.

    layers: "even", "balanced" (the most expensive stage as cheap as possible), or decoder-layer counts per stage.
    costs: of a chunk, or one number per chunk, for "balanced"; by default a layer costs 1 and all else nothing.

    >>> from ir.workload import load_config, model_chunks
    >>> four = model_chunks(load_config("tiny-moe"))
    >>> [[c.name for c in stage] for stage in partition(four, 2, "even")]
    [['embed', 'l0', 'l1'], ['l2', 'l3', 'head']]
    >>> [len(stage) for stage in partition(four, 3, "balanced", [0, 1, 1, 1, 1, 2])]
    [2, 2, 2]

    Raises PiperError (job) where the counts do not fit the model or the stages, naming the nearest that do.
    """
    decoders = sum(_is_layer(c) for c in chunks)
    if stages < 1:
        raise job_error("parallel.pp", f"{stages} stages", "1", "1 or more")
    match layers:
        case "even":
            counts = _even(stages, decoders)
        case "balanced":
            if decoders < stages:
                raise _too_few(stages, decoders)
            at = tuple(i for i, c in enumerate(chunks) if _is_layer(c))
            given = None if ranks is None else tuple(ranks)
            counts = list(_balance(at, stages, tuple(_raw_costs(chunks, costs)), given, most))
        case str():
            raise job_error(_KEY, f"unknown layers {layers!r}", "balanced", _FORMS)
        case _:
            counts = _listed(layers, stages, decoders)
    return _cut(chunks, counts)


def _is_layer(chunk: Chunk) -> bool:
    return "L" in chunk.tags


@lru_cache(maxsize=1024)  # a search asks for the same cuts under many schedules
def _balance(
    at: tuple[int, ...], stages: int, raw: tuple[float, ...], ranks: tuple[int, ...] | None, most: int | None
) -> list[int]:
    counts = _balanced(_stage_costs(raw, at), stages)
    if ranks is None:
        return counts
    ends = (sum(raw[: at[0]]), sum(raw[at[-1] + 1 :]))
    return by_rank(counts, [raw[i] for i in at], ends, ranks, most)


def _even(stages: int, decoders: int) -> list[int]:
    if decoders % stages == 0:
        return [decoders // stages] * stages
    if (decoders + 2) % stages == 0 and stages > 1:
        # Embedding and head count as a layer each, so the ends hold one decoder layer fewer.
        each = (decoders + 2) // stages
        return [each - 1, *[each] * (stages - 2), each - 1]
    if decoders < stages:
        raise _too_few(stages, decoders)
    message = f"{decoders} layers, or {decoders + 2} with embedding and head, do not divide evenly by {stages} stages"
    near = [n for n in range(1, decoders + 1) if decoders % n == 0 or (decoders + 2) % n == 0]
    best = min(near, key=lambda n: (abs(n - stages), n))
    allowed = f"stages dividing {decoders} or {decoders + 2}; {_FORMS}"
    raise job_error(_KEY, message, f"layers = 'balanced', or {best} stages", allowed)


def _too_few(stages: int, decoders: int) -> PiperError:
    message = f"{decoders} layers on {stages} stages leave some stage empty"
    allowed = f"at most {decoders} stages; or list the counts, zeros included"
    return job_error(_KEY, message, f"{decoders} stages or fewer", allowed)


def _listed(layers: Sequence[int], stages: int, decoders: int) -> list[int]:
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in layers):
        raise job_error(_KEY, f"not layer counts: {list(layers)}", allowed="integers, 0 or more")
    if len(layers) != stages:
        message, fix = f"{len(layers)} layer counts for {stages} stages", f"{stages} counts that sum to {decoders}"
        raise job_error(_KEY, message, fix, "one count per stage")
    if sum(layers) != decoders:
        message = f"layer counts sum to {sum(layers)}, the model has {decoders}"
        fix = f"add {decoders - sum(layers):+d} somewhere, or layers = 'balanced'"
        raise job_error(_KEY, message, fix, f"a sum of {decoders}")
    return list(layers)


def _stage_costs(raw: Sequence[float], at: Sequence[int]) -> list[int]:
    """One integer per decoder layer, the ends' costs added to the first and last layer: sums are then exact."""
    unit = max(raw) or 1.0
    scaled = [round(x / unit * 2**30) for x in raw]
    middle = [scaled[i] for i in at]
    middle[0] += sum(scaled[: at[0]])
    middle[-1] += sum(scaled[at[-1] + 1 :])
    return middle


def _raw_costs(chunks: Sequence[Chunk], costs: Costs | None) -> list[float]:
    if costs is None:
        raw = [float(_is_layer(c)) for c in chunks]
    else:
        raw = [float(costs(c)) for c in chunks] if callable(costs) else [float(x) for x in costs]
    if len(raw) != len(chunks) or not all(0 <= x < float("inf") for x in raw):
        raise job_error(_KEY, f"{len(raw)} costs for {len(chunks)} chunks, each to be finite and 0 or more")
    return raw


def _balanced(costs: Sequence[int], stages: int) -> list[int]:
    """Counts, each at least 1, with the least maximum; among those the least sum of squares, then the earliest cuts."""
    limits = range(max(costs), sum(costs) + 1)
    limit = limits[bisect_left(limits, True, key=lambda most: _fewest(costs, most) <= stages)]
    cuts = _most_even([0, *accumulate(costs)], stages, limit)
    return [b - a for a, b in pairwise(cuts)]


def _fewest(costs: Sequence[int], limit: int) -> int:
    """Stages that the layers need where none may cost more than the limit, each filled before the next begins."""
    count, load = 1, 0
    for cost in costs:
        fits = load + cost <= limit
        count, load = (count, load + cost) if fits else (count + 1, cost)
    return count


def _most_even(total: Sequence[int], stages: int, limit: int) -> list[int]:
    """Cut positions, 0 and n among them, with no stage above `limit` and the least sum of squared stage costs."""
    n = len(total) - 1
    best: list[tuple[int, tuple[int, ...]] | None] = [(0, (0,)), *[None] * n]
    for s in range(1, stages + 1):
        after: list[tuple[int, tuple[int, ...]] | None] = [None] * (n + 1)
        for j in range(s, n - (stages - s) + 1):
            for i in range(j - 1, s - 2, -1):
                last, head = total[j] - total[i], best[i]
                if last > limit:
                    break
                if head is not None:
                    option = (head[0] + last**2, (*head[1], j))
                    current = after[j]
                    after[j] = option if current is None else min(current, option)
        best = after
    found = best[n]
    assert found is not None, "the least maximum is attained"
    return list(found[1])


def _cut(chunks: Sequence[Chunk], counts: Sequence[int]) -> Stages:
    at = [i for i, c in enumerate(chunks) if _is_layer(c)]
    ends = list(accumulate(counts))
    # The stage of the k-th decoder layer; what stands before the first or behind the last goes to the outer stages.
    stage_of = [bisect_right(ends, k) for k in range(len(at))]
    out: list[list[Chunk]] = [[] for _ in counts]
    for i, chunk in enumerate(chunks):
        if i < at[0]:
            out[0].append(chunk)
        elif i > at[-1]:
            out[-1].append(chunk)
        else:
            out[stage_of[i - at[0]]].append(chunk)
    # A stage left without a chunk hands its input on: microbatches still pass through its rank.
    return tuple(tuple(stage) or (Chunk(f"skip{n}", (Part("skip"),)),) for n, stage in enumerate(out))


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
        load = {s: _goal(_moved(out, s, None), costs, ends, ranks)[0] for s in free}
        out = _moved(out, min(free, key=lambda s: (load[s], s)), None)
    return out


def _least(stage: int, stages: int) -> int:
    return 0 if stages > 1 and stage in (0, stages - 1) else 1


def _moved(counts: list[int], giver: int, taker: int | None) -> list[int]:
    """One layer from a stage to another, or to none."""
    return [n - (s == giver) + (s == taker) for s, n in enumerate(counts)]


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
