"""The engine's price, as a ratio to a bare heapq loop on the same machine at the same time."""

from __future__ import annotations

import pytest

from experiments.engine_speed import by_stage, one_f_one_b, yardstick
from piper_sim.pipeline import Times, report, run_schedule

MOST = 8.0  # build + check + simulate, in heapq loops


@pytest.mark.parametrize(("ranks", "mbs"), [(1, 3), (2, 1), (4, 2), (5, 9)])
def test_the_yardstick_does_the_same_work(ranks: int, mbs: int) -> None:
    out = run_schedule("1f1b", ranks, mbs, times=Times.parse("F=1,B=2,p2p=0.25"))
    loop = one_f_one_b(ranks, mbs)
    assert len(loop[0]) == len(out.plan)
    assert yardstick(*loop) == report(out)["makespan"]


def test_build_check_and_simulate_cost_few_heapq_loops() -> None:
    assert by_stage(32, 256, rounds=3)["build + check + simulate"] <= MOST


@pytest.mark.slow
def test_the_largest_published_case_costs_few_heapq_loops() -> None:
    assert by_stage(64, 1024, rounds=3)["build + check + simulate"] <= MOST
