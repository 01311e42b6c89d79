"""A seeded campaign of faults: every two of kind, op, schedule and rank meet at least once."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np

from ir.graph.graph import PerStepOp
from ir.plan.plan import OpKind, Plan

KINDS = ("kill", "raise", "stop")
OPS = ("F", "backward", "send", "recv", "collective", "update")
SCHEDULES = ("1f1b", "gpipe", "zb1p", "interleaved-1f1b", "zbv", "dualpipe")
RANKS = ("first", "second", "last")
Case = tuple[str, str, str, str]


@dataclass(frozen=True)
class Fault:
    """One run and what goes wrong in it. At op `index` of the plan, in the second step."""

    kind: str
    rank: int
    index: int
    text: str


def campaign(count: int, seed: int = 4) -> list[Case]:
    """Rows that cover all pairs, those that cover most first, filled up at random.

    >>> rows = campaign(50); len(set(rows)), len(uncovered(rows)), len(uncovered(rows[:35])) > 0
    (50, 0, True)
    """
    draw = random.Random(seed)
    rest = list(product(KINDS, OPS, SCHEDULES, RANKS))
    draw.shuffle(rest)
    missing, out = uncovered([]), list[Case]()
    while missing:
        best = max(rest, key=lambda row: len(missing & _pairs(row)))
        out.append(best)
        rest.remove(best)
        missing -= _pairs(best)
    return [*out, *rest][:count]


def uncovered(rows: Sequence[Case]) -> set[tuple[int, str, int, str]]:
    """The pairs of values that no row has."""
    everything = product(KINDS, OPS, SCHEDULES, RANKS)
    return {p for row in everything for p in _pairs(row)} - {p for row in rows for p in _pairs(row)}


def _pairs(row: Case) -> set[tuple[int, str, int, str]]:
    return {(a, row[a], b, row[b]) for a, b in combinations(range(4), 2)}


def place(case: Case, plan: Plan, seed: int) -> Fault:
    """Choose one of the plan's ops of that kind on that rank."""
    kind, op, _, where = case
    rank = {"first": 0, "second": 1, "last": plan.programs - 1}[where]
    fits = [i for i in np.flatnonzero(plan.program == rank).tolist() if _fits(plan, i, op)]
    index = random.Random(f"{seed}:{case}").choice(fits)
    return Fault(kind, rank, index, plan.text(index))


def _fits(plan: Plan, i: int, op: str) -> bool:
    shape = plan.shapes[int(plan.shape[i])]
    kinds = {plan.graph.nodes[n].kind for n, _ in shape.covers}
    match op:
        case "send" | "recv" | "collective":
            return shape.kind is OpKind[op.upper()]
        case "update":
            return PerStepOp.UPDATE in kinds
        case "F":
            return shape.kind is OpKind.COMPUTE and {str(k) for k in kinds} == {"F"}
        case _:
            return (
                shape.kind is OpKind.COMPUTE and not kinds & {PerStepOp.UPDATE} and "F" not in {str(k) for k in kinds}
            )
