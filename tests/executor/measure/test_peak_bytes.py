"""Ranks run by themselves need what alloc lists spliced in plan order say, to the byte; those are held against runs."""

from __future__ import annotations

import pytest

from executor.measure.alloc import take_lists
from executor.measure.peak_bytes import peak_bytes, peaks
from piper_sim.memory import splice
from tests.executor.measure.alloc_runs import lists_from_elsewhere, planned
from tests.executor.measure.test_alloc import CASES
from tests.executor.measure.test_alloc_spread import CASES as SPREAD
from tests.executor.measure.test_alloc_spread import TWO


@pytest.mark.parametrize("name", CASES)
def test_ranks_by_themselves_need_what_lists_say(name: str) -> None:
    sets = CASES[name].split()
    prepared, plan = planned(*sets)
    assert peak_bytes(prepared, plan) == splice.peaks(prepared, plan, lists_from_elsewhere(*sets))


@pytest.mark.parametrize("name", SPREAD)
def test_where_experts_are_spread_too(name: str) -> None:
    prepared, plan = planned(*SPREAD[name].split())
    assert peak_bytes(prepared, plan) == splice.peaks(prepared, plan, take_lists(prepared, plan))


@pytest.mark.slow
@pytest.mark.parametrize("sets", [CASES["1f1b"], CASES["ZeRO-3"], CASES["recompute, two copies"], TWO])
def test_tensors_without_values_live_as_long(sets: str) -> None:
    prepared, plan = planned(*sets.split())
    assert peaks(prepared, plan, real=False) == peaks(prepared, plan, real=True)
