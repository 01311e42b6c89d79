"""Start orders from building blocks, for two chunks: one microbatch's ops at fixed slots, repeated every six slots.

The idea, and the blocks of V-Half and V-Min among those found here, are from "Pipeline Parallelism with Controllable
Memory" (arXiv:2405.15362).
"""

from collections import deque
from itertools import product

from ir.schedules.search.shop import ScheduleProblem

Block = list[tuple[int, int, int, int]]  # per rank, the slots of F, F, I, I of microbatch 0
_PERIOD = 6


def blocks(ranks: int, limit: float) -> list[Block]:
    """The building blocks of a V whose repetition keeps the limit, shortest first.

    Each of the four legs goes from rank to rank in one or two slots, and rests up to five slots at the turns.

    >>> blocks(ranks=2, limit=4)[0]
    [(0, 3, 4, 7), (1, 2, 5, 6)]
    """
    found = []
    for legs in product((1, 2), repeat=4):
        for rests in product(range(_PERIOD), repeat=3):
            block = _block(ranks, legs, (0, *rests))
            if all(len({x % _PERIOD for x in slots}) == 4 for slots in block):
                length = block[0][-1]
                if max(map(_most_alive, block)) <= limit:
                    found.append((length, legs, rests, block))
    return [block for *_, block in sorted(found)]


def _block(ranks: int, legs: tuple[int, ...], rests: tuple[int, ...]) -> Block:
    slot, rows = -1, []
    for leg, (hop, rest) in enumerate(zip(legs, rests, strict=True)):
        slot += 1 + rest
        row = [slot + hop * i for i in range(ranks)]
        slot = row[-1]
        rows.append(row if leg % 2 == 0 else row[::-1])
    return list(zip(*rows, strict=True))


def _most_alive(slots: tuple[int, ...]) -> int:
    alive = most = 0
    for _, kind, _ in _filled(slots, slots[-1] // _PERIOD + 3):
        alive += 1 if kind < 2 else -1 if kind >= 4 else 0
        most = max(most, alive)
    return most


def _filled(slots: tuple[int, ...], mbs: int) -> list[tuple[int, int, int]]:
    """One rank's (slot, kind, microbatch) when its block repeats; W goes to the first empty slot after its I."""
    fixed = {slot + _PERIOD * mb: (kind, mb) for kind, slot in enumerate(slots) for mb in range(mbs)}
    rows: list[tuple[int, int, int]] = []
    pending: deque[tuple[int, int]] = deque()
    slot = 0
    while len(rows) < 6 * mbs:
        now = fixed.get(slot) or (pending.popleft() if pending else None)
        if now:
            rows.append((slot, *now))
            if now[0] in (2, 3):
                pending.append((now[0] + 2, now[1]))
        slot += 1
    return rows


def unroll(shop: ScheduleProblem, block: Block) -> list[int]:
    """All ops by slot, when a block repeats for every microbatch."""
    rows = [(slot, r, kind, mb) for r, slots in enumerate(block) for slot, kind, mb in _filled(slots, shop.mbs)]
    return [shop.op(*row) for _, *row in sorted(rows)]
