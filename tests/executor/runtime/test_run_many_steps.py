"""Twenty steps of every schedule, a few of every second choice: gradients and parameters are those of one process.

PIPER_TWENTY=300 draws that many of the slow cases, PIPER_TWENTY=all takes the whole cross product (about an hour).
"""

import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.executor.runs import Ran, alone, distance, error, far, merged, run
from tests.executor.runtime.pipeline_cases import (
    CLIP,
    STEPS,
    Case,
    covering,
    drawn,
    everything,
    random_rows,
    shape,
    training,
)

ROUNDING = 1e-10
FIRST = covering()[:24]
LONG = {case.schedule: case for case in reversed(FIRST)}.values()  # the first of each schedule
FEW = 2
MANY = os.environ.get("PIPER_TWENTY", "60")
ZIGZAG = (1, 0, 2, 2, 0, 1)
EIGHT = [
    Case("1f1b", 8, 5),
    Case("zbv", 8, 3, optimizer="sgd", clip=True),
    Case("interleaved-1f1b", 8, 9, uneven=True),
    Case("dualpipe", 8, 7, tied=True, clip=True),
]


def check(sets: tuple[str, ...], *, exact: bool, steps: int = STEPS) -> Ran:
    """Run it; it must have trained, and as one process does."""
    ran, one = run(*sets, steps=steps), alone(*sets, steps=steps)
    found = error(ran, one)
    assert found == 0.0 if exact else found <= ROUNDING
    assert len(ran.object["losses"]) == steps and distance(alone(*sets, steps=0).params, one.params) > 1e-3
    return ran


def check_case(case: Case, steps: int = STEPS) -> None:
    """Copies of a parameter are the same to the bit, or `merged` refuses them; here: that there are copies at all."""
    ran = check(case.sets, exact=case.exact, steps=steps)
    assert not case.clip or min(ran.object["grad_norms"]) > CLIP
    held = Counter(name for params in ran.params for name in params)
    embedding = held.pop("model.embed_tokens.weight")
    assert set(held.values()) == {case.copies}
    assert embedding == (2 if case.tied and not case.ends_meet else case.copies)


@pytest.mark.parametrize("case", FIRST, ids=str)
def test_steps_are_those_of_one_process(case: Case) -> None:
    check_case(case, STEPS if case in LONG else FEW)


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in covering() if c not in LONG], ids=str)
def test_the_rest_of_a_set_in_which_all_pairs_meet(case: Case) -> None:
    check_case(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", everything() if MANY == "all" else drawn(int(MANY), seed=20), ids=str)
def test_more_of_the_cross_product(case: Case) -> None:
    check_case(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", EIGHT, ids=str)
def test_twenty_steps_on_eight_ranks(case: Case) -> None:
    check_case(case)


@pytest.mark.parametrize(
    "case", [Case("dualpipe", 4, 3, tied=True, clip=True), Case("zbv", 3, 2, tied=True, optimizer="sgd")], ids=str
)
def test_the_same_plan_twice_is_the_same_to_the_bit(case: Case) -> None:
    first, second = run(*case.sets, steps=4), run(*case.sets, steps=4)
    for a, b in zip((*first.grads, *first.params), (*second.grads, *second.params), strict=True):
        assert a.keys() == b.keys() and all(np.array_equal(a[n], b[n], equal_nan=True) for n in a)
    for key in ("losses", "grad_norms", "plan_digest"):
        assert first.object[key] == second.object[key]


@pytest.mark.parametrize(("seed", "optimizer"), [(1, "adamw"), (2, "sgd")])
def test_a_csv_of_ones_own_trains_as_one_process(seed: int, optimizer: str, tmp_path: Path) -> None:
    """Stages anywhere, neighbours on ranks that are none, any legal order."""
    rows = random_rows([ZIGZAG] * 5, seed, in_order=True)
    (tmp_path / "mine.csv").write_text("".join(",".join(row) + "\n" for row in rows))
    sets = (*shape(3, 5, [1, 1, 2, 1, 1, 0]), *training(optimizer, clip=seed == 1))
    check((*sets, f"schedule.csv={tmp_path / 'mine.csv'}"), exact=True)


def test_a_directives_file_of_ones_own_trains_as_one_process(tmp_path: Path) -> None:
    """Two directions over four stages on two ranks, two copies of everything, weight gradients in any order."""
    ways = {"0..2": (0, 1, 1, 0), "3..4": (1, 0, 0, 1)}
    rows = random_rows([ways["0..2"]] * 3 + [ways["3..4"]] * 2, 3, in_order=False)
    places = [
        {"op": "place", "filter": {"PP": stage, "MB": mbs}, "group": group}
        for mbs, homes in ways.items()
        for stage, group in enumerate(homes)
    ]
    strategy = [
        {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": 5},
        *places,
        {"op": "replicate", "filter": {}, "zero": 0},
        *({"op": "order", "group": group, "cells": row} for group, row in enumerate(rows)),
    ]
    (tmp_path / "mine.json").write_text(json.dumps(strategy))
    sets = (*shape(2, 5, [1, 1, 2, 1]), *training("adamw", clip=True))
    ran = check((*sets, f"schedule.directives={tmp_path / 'mine.json'}"), exact=False)
    assert sum(map(len, ran.params)) == 2 * len(merged(ran.params))


@pytest.mark.parametrize(
    "more",
    [
        "schedule.p2p=blocking schedule.microbatches=5",
        "schedule.name=gpipe schedule.flushes=2 schedule.microbatches=4",
        "schedule.name=dualpipe schedule.flushes=2 schedule.microbatches=8",
    ],
)
def test_blocking_transfers_and_flushes_train_as_one_process(more: str) -> None:
    assert far(*more.split(), steps=2) <= 1e-10
