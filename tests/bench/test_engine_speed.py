"""What parts of a prediction cost, as ratios to a bare heapq loop on the same machine at the same time."""

import numpy as np
import pytest

from experiments.engine_speed import heapq_loop, loop_of, measure, stage_case
from piper_sim.engine import MessageMode, run

MOST = 8.0  # build + check + simulate, in heapq loops


@pytest.mark.parametrize(("ranks", "mbs"), [(1, 3), (2, 1), (4, 2), (5, 9)])
def test_the_yardstick_does_the_same_work(ranks: int, mbs: int) -> None:
    case = stage_case(ranks, mbs)
    for duration in (case.costs.duration, np.arange(float(len(case.plan)))):
        assert heapq_loop(*loop_of(case.plan, duration)) == run(case.plan, duration, MessageMode.BUFFERED).end.max()


def test_parts_of_a_prediction_cost_few_heapq_loops() -> None:
    found = measure(stage_case(32, 256), rounds=3)
    assert found["build, check, simulate"] <= MOST
    assert found["twin: longest path"] <= 1 / 20
    assert found["twin: interference"] <= 1


@pytest.mark.slow
def test_the_largest_published_case_costs_few_heapq_loops() -> None:
    assert measure(stage_case(64, 1024), rounds=3)["build, check, simulate"] <= MOST
