"""A schedule's orders walked with the least times and bytes of its stages: compiled, a millisecond each."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cost_models.jit import jit
from ir.core.ops import OpToken
from ir.core.order import FloatArray, IntArray, Order
from ir.schedules.registry import build, flushed

_F, _I, _W, _B = (int(t) for t in OpToken)


@dataclass(frozen=True, eq=False)
class ScheduleCells:
    """All ranks' orders in one table: rows of `at[r]:at[r + 1]` are rank r's, a fused pair two rows of one unit.

    home: [stage, microbatch] rank. rank: of each row. passes: [rank, stage] microbatches. fused: it holds pairs.
    """

    at: IntArray
    token: IntArray
    stage: IntArray
    mb: IntArray
    unit: IntArray
    home: IntArray
    rank: IntArray
    passes: IntArray
    fused: bool

    @property
    def both_ways(self) -> bool:
        """Whether a stage is on more than one rank."""
        return bool((self.home != self.home[:, :1]).any())


@lru_cache(maxsize=512)
def schedule_cells(name: str, ranks: int, mbs: int, chunks: int, flushes: int = 1) -> ScheduleCells:
    """Of a schedule whose order depends on no times. Raises PiperError (job): mbs are no multiple of flushes."""
    made = flushed(lambda m: build(name, ranks, m, chunks), mbs, flushes)
    home = np.empty((made.stages, mbs), dtype=np.int64)
    for p in made.placements:
        home[:, p.mbs.start : p.mbs.stop] = np.array(p.rank_of_stage)[:, None]
    orders = [_pairs_backward_first(o) for o in made.orders]
    at = np.cumsum([0, *(len(o) for o in orders)])
    token, stage, mb, unit = (np.concatenate([getattr(o, c) for o in orders]) for c in ("token", "stage", "mb", "unit"))
    rank = np.repeat(np.arange(ranks), np.diff(at))
    passes = np.stack([(home == r).sum(axis=1) for r in range(ranks)])
    fused = any(len(o) > int(o.unit.max(initial=-1)) + 1 for o in orders)
    return ScheduleCells(at, token, stage, mb, unit, home, rank, passes, fused)


def _pairs_backward_first(o: Order) -> Order:
    """In a fused pair, layer by layer, the backward may free before the forward allocates."""
    by = np.lexsort((-o.token, o.unit))
    return Order(o.stage[by], o.token[by], o.mb[by], o.unit[by])


def least_peaks(cells: ScheduleCells, saved: FloatArray) -> FloatArray:
    """[rank] the most bytes of activations alive at once. saved: [stage, 3] from F to I, from F to W, from I to W."""
    early, late, stash = saved.T
    change = np.stack([early + late, stash - early, -late - stash, -early - late])
    total = np.cumsum(change[cells.token, cells.stage])
    before = np.concatenate([[0.0], total])[cells.at[:-1]]
    peaks = [float(total[a:b].max(initial=0.0)) for a, b in zip(cells.at[:-1], cells.at[1:], strict=True)]
    return np.asarray(np.maximum(0.0, np.array(peaks) - before))


def least_makespan(
    cells: ScheduleCells, times: FloatArray, busy: FloatArray, start: FloatArray, p2p: float
) -> FloatArray:
    """[rank] when its last op ends, at the earliest. times, busy: of stage and token; start: of each rank."""
    ends = start.copy()
    done = np.full((2, *cells.home.shape), -np.inf)
    columns = (cells.at, cells.token, cells.stage, cells.mb, cells.unit)
    if not walk(*columns, cells.home, times, busy, p2p, ends, done, cells.at[:-1].copy()):
        raise AssertionError("a schedule's order is stuck")
    return ends


def compose(steps: Sequence[FloatArray]) -> FloatArray:
    """One after the other, in max and plus."""
    out = np.array([[0.0, -1e18], [-1e18, 0.0]])
    for m in steps:
        out = (m[:, :, None] + out[None, :, :]).max(axis=1)
    return out


@jit
def walk(
    at: IntArray,
    token: IntArray,
    stage: IntArray,
    mb: IntArray,
    unit: IntArray,
    home: IntArray,
    times: FloatArray,
    busy: FloatArray,
    p2p: float,
    ends: FloatArray,
    done: FloatArray,
    here: IntArray,
) -> bool:
    """Run every rank as far as its inputs are there, round by round; whether all came to their end."""
    ranks, stages, left, moved = len(ends), len(home), len(token), True
    while moved:
        moved = False
        for r in range(ranks):
            while here[r] < at[r + 1]:
                first = here[r]
                last = first
                while last + 1 < at[r + 1] and unit[last + 1] == unit[first]:
                    last += 1
                ready = True
                for k in range(first, last + 1):
                    s, m, t = stage[k], mb[k], token[k]
                    if (t == 0 and s > 0 and done[0, s - 1, m] == -np.inf) or (
                        (t == 1 or t == 3) and s < stages - 1 and done[1, s + 1, m] == -np.inf
                    ):
                        ready = False
                if not ready:
                    break
                free, end, work = ends[r], ends[r], 0.0
                for k in range(first, last + 1):
                    s, m, t = stage[k], mb[k], token[k]
                    x = -1e18
                    if t == 0 and s > 0:
                        x = done[0, s - 1, m] + (p2p if home[s - 1, m] != r else 0.0)
                    elif (t == 1 or t == 3) and s < stages - 1:
                        x = done[1, s + 1, m] + (p2p if home[s + 1, m] != r else 0.0)
                    u = 1 if t == 3 and last > first else t  # a pair may put its weight gradients anywhere
                    end = max(end, max(free + times[s, u, 0, 0], x + times[s, u, 0, 1]))
                    there = max(free + times[s, u, 1, 0], x + times[s, u, 1, 1])
                    if t == 0:
                        done[0, s, m] = there
                    elif t != 2:
                        done[1, s, m] = there
                    work += busy[s, t]
                ends[r] = max(end, free + work)
                left -= last + 1 - first
                here[r] = last + 1
                moved = True
    return left == 0
