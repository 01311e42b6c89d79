"""The schedules that do not depend on op times, each as a table: (how often, which ops), rank by rank.

Orders are PyTorch 2.13's (its runtime's, where runtime and printed order differ) wherever it accepts the shape, and
DeepSeek's for DualPipe. Where they refuse a number of microbatches: interleaving shortens its last rounds, and the V
shapes and DualPipe make the table for the least number they accept and drop the surplus (see `table.py`).

>>> for order in one_f_one_b(ranks=2, mbs=3):
...     print(*order.cells())
0F0 0F1 0B0 0F2 0B1 0B2
1F0 1B0 1F1 1B1 1F2 1B2
"""

from dataclasses import replace

import numpy as np

from ir.core.ops import OpToken
from ir.core.order import IntArray, Order
from ir.schedules.table import Phase, ScheduleSlot, ScheduleTurns, emit


def gpipe(ranks: int, mbs: int) -> tuple[Order, ...]:
    """All forwards, then all backwards (Huang et al., arXiv:1811.06965).

    >>> print(*gpipe(ranks=1, mbs=2)[0].cells())
    0F0 0F1 0B0 0B1
    """
    return tuple(emit(((mbs, "F0"), (mbs, "B0")), [ScheduleSlot(r, range(mbs))]) for r in range(ranks))


def one_f_one_b(ranks: int, mbs: int) -> tuple[Order, ...]:
    """One forward, one backward, after a fill of one forward per rank ahead (PipeDream-Flush, arXiv:2006.09503)."""
    return tuple(emit(_1f1b(min(ranks - 1 - r, mbs), mbs), [ScheduleSlot(r, range(mbs))]) for r in range(ranks))


def _1f1b(fill: int, total: int, f: str = "F0", b: str = "B0", steady: str = "") -> tuple[Phase, ...]:
    return (
        (fill, f),  # fill
        (total - fill, steady or f"{f} {b}"),
        (fill, b),  # drain
    )


def looped_bfs(ranks: int, mbs: int, chunks: int) -> tuple[Order, ...]:
    """GPipe over several chunks, chunk by chunk; backwards take the last microbatch first (arXiv:2211.05953).

    >>> print(*looped_bfs(ranks=1, mbs=2, chunks=2)[0].cells())
    0F0 0F1 1F0 1F1 1B1 1B0 0B1 0B0
    """
    phases = [(mbs, f"F{c}") for c in range(chunks)] + [(mbs, f"B{c}") for c in reversed(range(chunks))]
    orders = [emit(phases, _looped(r, ranks, mbs, chunks)) for r in range(ranks)]
    return tuple(replace(o, mb=np.where(o.token == OpToken.B, mbs - 1 - o.mb, o.mb)) for o in orders)


def interleaved(ranks: int, mbs: int, chunks: int) -> tuple[Order, ...]:
    """1F1B over several chunks, in rounds of P microbatches or a few more (Narayanan et al., arXiv:2104.04473).

    >>> print(*interleaved(ranks=2, mbs=2, chunks=2)[1].cells())
    1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
    return _in_rounds(ranks, mbs, chunks)


def overlapped(ranks: int, mbs: int, chunks: int = 1) -> tuple[Order, ...]:
    """1F1B or interleaved 1F1B with one more microbatch of fill, so that every steady F can be run inside of a B.

    Megatron-LM's overlap_moe_expert_parallel_comm (core v0.14): it fills with 2 (P - r - 1) + (V - 1) P + 1 forwards
    for V > 1 and with one for P = 1; V = 1 is its formula's. A pair hands both results over at its end, hence twice
    1F1B's fill at V = 1: a rank that runs pairs answers each second pair of the rank behind it.

    >>> for order in overlapped(ranks=2, mbs=4):
    ...     print(*order.cells())
    0F0 0F1 0F2 (0F3;0B0)OVERLAP_F_B 0B1 0B2 0B3
    1F0 (1F1;1B0)OVERLAP_F_B (1F2;1B1)OVERLAP_F_B (1F3;1B2)OVERLAP_F_B 1B3
    """
    return _in_rounds(ranks, mbs, chunks, more=1, steady="(F;B)")


def _in_rounds(ranks: int, mbs: int, chunks: int, more: int = 0, steady: str = "F B") -> tuple[Order, ...]:
    rounds, total = _rounds(ranks, mbs), mbs * chunks
    turns = _turns(rounds, chunks)

    def rank(r: int) -> Order:
        fill = min((chunks - 1) * int(rounds[0]) + 2 * (ranks - 1 - r) + more, total)
        return emit(_1f1b(fill, total, "F", "B", steady), _looped(r, ranks, mbs, chunks), turns)

    return tuple(map(rank, range(ranks)))


def zb1p(ranks: int, mbs: int, chunks: int = 1) -> tuple[Order, ...]:
    """Interleaved 1F1B with half the fill, whose W wait r backwards on rank r (ZB-H1, Qi et al., arXiv:2401.10241).

    >>> print(*zb1p(ranks=2, mbs=3)[1].cells())
    1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    rounds, total = _rounds(ranks, mbs), mbs * chunks
    turns = _turns(rounds, chunks)

    def rank(r: int) -> Order:
        fill = min((chunks - 1) * int(rounds[0]) + ranks - 1 - r, total)
        steady = total - fill
        late = min(r, steady)
        phases = (
            (fill, "F"),
            (late, "F I"),
            (steady - late, "F I W"),
            (min(r - late, fill), "I"),
            (fill - min(r - late, fill), "I W"),
            (min(r, total), "W"),
        )
        return emit(phases, _looped(r, ranks, mbs, chunks), turns)

    return tuple(map(rank, range(ranks)))


def _looped(rank: int, ranks: int, mbs: int, chunks: int) -> list[ScheduleSlot]:
    return [ScheduleSlot(c * ranks + rank, range(mbs)) for c in range(chunks)]


def _rounds(ranks: int, mbs: int) -> IntArray:
    """Microbatches per round: as many rounds as hold P each; where M does not divide, the last ones are shorter.

    >>> _rounds(ranks=4, mbs=10).tolist(), _rounds(ranks=4, mbs=14).tolist(), _rounds(ranks=4, mbs=3).tolist()
    ([5, 5], [5, 5, 4], [3])
    """
    # A round of fewer than P behind others can deadlock: its chunk 1 comes up before chunk 0 is through.
    rounds = max(1, mbs // ranks)
    return mbs // rounds + (np.arange(rounds) < mbs % rounds)


def _turns(rounds: IntArray, chunks: int) -> ScheduleTurns:
    """A round takes its microbatches through one chunk after the other, forwards up, backwards down."""
    chunk = np.repeat(np.tile(np.arange(chunks), len(rounds)), np.repeat(rounds, chunks))
    return ScheduleTurns(forward=chunk, backward=chunks - 1 - chunk)


def zbv(ranks: int, mbs: int) -> tuple[Order, ...]:
    """Zero bubble on a V of two chunks per rank, for F = I = W (Qi et al., arXiv:2401.10241, section 6).

    >>> print(*zbv(ranks=1, mbs=2)[0].cells())
    0F0 1F0 1I0 1W0 0F1 0I0 0W0 1F1 1I1 1W1 0I1 0W1
    """
    return tuple(emit(_zbv(r, ranks, max(mbs, 2 * ranks - 1)), _v(r, ranks, mbs)) for r in range(ranks))


def _zbv(rank: int, ranks: int, mbs: int) -> tuple[Phase, ...]:
    ahead, here = ranks - 1 - rank, ranks - rank
    return (
        (ahead + here, "F0"),
        (rank, "F1 F0"),
        (here, "F1 I1 W1"),
        (mbs - ranks - ahead, "F0 I0 W0 F1 I1 W1"),
        (ahead, "I0 W0 F1 I1 W1"),
        (rank, "I0 I1"),
        (here, "I0 W0"),
        (rank, "W1"),
        (rank, "W0"),
    )


def dualpipev(ranks: int, mbs: int) -> tuple[Order, ...]:
    """DualPipe folded into a V: both directions of it are the two arms of one model (github.com/deepseek-ai/DualPipe).

    >>> print(*dualpipev(ranks=1, mbs=2)[0].cells())
    0F0 1F0 0F1 1B0 (1F1;0B0)OVERLAP_F_B 1B1 0I1 0W1
    """
    return tuple(emit(_dualpipev(r, ranks, max(mbs, 2 * ranks)), _v(r, ranks, mbs)) for r in range(ranks))


def _dualpipev(rank: int, ranks: int, mbs: int) -> tuple[Phase, ...]:
    ahead, here = ranks - 1 - rank, rank + 1
    last = int(ahead == 0)
    # The second half of the tail leaves its W for later.
    tail = " ".join(f"{'B' if i < here else 'I'}{(i + 1) % 2}" for i in range(2 * here))
    return (
        (2 * ahead, "F0"),
        (here, "F0 F1"),
        (ahead, "I1 W F1"),
        (last, "F0 B1 (F1;B0)"),  # at the turn B1 needs F1 of just before: a pair would only wait
        (mbs - 2 * ranks + here - last, "(F0;B1) (F1;B0)"),
        (ahead, "B1 (F1;B0)"),
        (1, tail),
        (ahead, "W I0"),
        (here, "W"),
    )


def _v(rank: int, ranks: int, mbs: int) -> list[ScheduleSlot]:
    return [ScheduleSlot(rank, range(mbs)), ScheduleSlot(2 * ranks - 1 - rank, range(mbs))]


def dualpipe(ranks: int, mbs: int) -> tuple[Order, ...]:
    """Two pipelines in opposite directions over the same ranks (DeepSeek-V3, arXiv:2412.19437, figure 5).

    Ranks r and P-1-r do what rank r of DualPipeV on half the ranks does: their early stage is its slot 0, their late
    stage its slot 1. The direction that enters at rank 0 has the first half of the microbatches, rounded up.

    >>> for order in dualpipe(ranks=2, mbs=4):
    ...     print(*order.cells())
    0F0 1F2 0F1 1B2 (1F3;0B0)OVERLAP_F_B 1B3 0I1 0W1
    0F2 1F0 0F3 1B0 (1F1;0B2)OVERLAP_F_B 1B1 0I3 0W3
    """
    half = (mbs + 1) // 2
    directions = range(half), range(half, mbs)

    def rank(r: int) -> Order:
        early = min(r, ranks - 1 - r)
        own, other = directions if r == early else reversed(directions)
        slots = [ScheduleSlot(early, own), ScheduleSlot(ranks - 1 - early, other)]
        return emit(_dualpipev(early, ranks // 2, max(half, ranks)), slots)

    return tuple(map(rank, range(ranks)))
