"""One rank's order from a table: how often, which ops. The tables are in `fixed.py`; this file numbers microbatches.

A table says which slot works, never which microbatch: those follow from counting.

    F0  B0  I0  W0    the next microbatch of slot 0
    F   B   I         the slot whose turn it is
    W                 the weight gradient of the oldest I that has none yet
    (F0;B1)           a fused pair

>>> rows = ((1, "F0"), (2, "F0 B0"), (1, "B0"))
>>> emit(rows, [ScheduleSlot(stage=7, mbs=range(3))]).cells()
['7F0', '7F1', '7B0', '7F2', '7B1', '7B2']

Microbatches a slot does not have are dropped, so a table that needs many of them serves for few: what is left of a
legal order is legal, because ops depend on ops of their own microbatch only.

>>> emit(rows, [ScheduleSlot(stage=7, mbs=range(5, 6))]).cells()
['7F5', '7B5']
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ir.core.ops import OpToken
from ir.core.order import BoolArray, IntArray, Order

Phase = tuple[int, str]
_TURN = -1  # a token that names no slot

_TOKEN = re.compile(r"([FBIW])(\d*)")


@dataclass(frozen=True, slots=True)
class ScheduleSlot:
    """What a table's slot number stands for on one rank: a stage and the microbatches it sees."""

    stage: int
    mbs: range


@dataclass(frozen=True, slots=True)
class ScheduleTurns:
    """For tokens that name no slot: the slots in the order of their forwards, and of their backwards."""

    forward: IntArray
    backward: IntArray


@lru_cache(maxsize=1024)
def _parse(ops: str) -> IntArray:
    """One row per token: its code, its slot, and 1 where a new unit begins."""
    rows = []
    for cell in ops.split():
        for i, text in enumerate(cell.strip("()").split(";")):
            m = _TOKEN.fullmatch(text)
            assert m, f"not a table token: {text!r} in {ops!r}"
            rows.append((OpToken[m[1]], int(m[2]) if m[2] else _TURN, i == 0))
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def emit(phases: Sequence[Phase], slots: Sequence[ScheduleSlot], turns: ScheduleTurns | None = None) -> Order:
    """Number the microbatches of one rank's table."""
    table = np.concatenate([np.tile(_parse(ops), (times, 1)) for times, ops in phases])
    token, slot, begins = np.ascontiguousarray(table.T)
    back = (token == OpToken.B) | (token == OpToken.I)
    if turns:
        slot[token == OpToken.F] = turns.forward
        slot[back] = turns.backward
    mb = _count(token, back, slot, len(slots))
    _answer(token, slot, mb)

    has = np.array([len(s.mbs) for s in slots])[slot]
    first = np.array([s.mbs.start for s in slots])[slot]
    stage = np.array([s.stage for s in slots])[slot]
    unit = np.cumsum(begins)
    keep = np.flatnonzero(mb < has)
    unit = np.cumsum(np.diff(unit[keep], prepend=unit[keep][:1]) > 0)  # without gaps
    return Order(stage[keep], token[keep], (mb + first)[keep], unit)


def _count(token: IntArray, back: BoolArray, slot: IntArray, slots: int) -> IntArray:
    """The microbatch of every token that has a slot: its running number among the slot's forwards, backwards, Ws."""
    mb = np.zeros(len(token), dtype=np.int64)
    passes = (token == OpToken.F, back, token == OpToken.W)
    for s in range(slots):
        here = slot == s
        for which in passes:
            rows = np.flatnonzero(which & here)
            mb[rows] = np.arange(len(rows))
    return mb


def _answer(token: IntArray, slot: IntArray, mb: IntArray) -> None:
    """Give the k-th W without a slot the slot and microbatch of the k-th I."""
    w = np.flatnonzero((token == OpToken.W) & (slot == _TURN))
    i = np.flatnonzero(token == OpToken.I)[: len(w)]
    slot[w], mb[w] = slot[i], mb[i]
