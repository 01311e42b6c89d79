"""The twin computes what SimPy computes, to the last bit; and a defect in either of them would be seen."""

import gc
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piper_sim import compiled, engine
from piper_sim.compiled import CompiledEngine, event_loop, longest_path
from piper_sim.compiled.heap import pop, put
from piper_sim.engine import EngineScenario, HostModel, KernelInterference, MessageMode
from tests.ir.plans import stage_plan, with_waits
from tests.piper_sim.compiled import scenario_cases as cases
from tests.piper_sim.compiled.scenario_cases import (
    HOSTS,
    LAYERS,
    SCALES,
    SEEDS,
    STAGES,
    durations,
    outcome,
    plan_of,
    same,
    scenarios,
)

# The issue asks for 2,000 plans in `make test` (PIPER_EXAMPLES=160) and 20,000 in `make test-all` (4000).
many = settings(max_examples=min(20_000, 25 * settings.default.max_examples // 2))  # type: ignore[union-attr]
few = settings(max_examples=60)
ANY = {
    "case": st.one_of(STAGES, LAYERS),
    "seed": SEEDS,
    "scale": st.sampled_from(SCALES),
    "wire": st.sampled_from(MessageMode),
    "kind": st.sampled_from(HOSTS),
    "linked": st.booleans(),
    "steps": st.integers(1, 3),
}


def agree(case: Any, seed: int, scale: str, wire: MessageMode, kind: str, linked: bool, steps: int) -> bool:
    """Both engines on a plan where nothing is shared, and with interference."""
    plan = plan_of(case)
    duration = durations(plan, seed, scale)
    both = scenarios(plan, seed, scale, wire, kind, linked)
    return all(same(*(outcome(play, s, duration, steps) for play in (engine.play, compiled.play))) for s in both)


@many
@given(**ANY)
def test_any_plan_runs_as_in_simpy(**drawn: Any) -> None:
    assert agree(**drawn)


@few
@given(case=STAGES, seed=SEEDS, kind=st.sampled_from(HOSTS), steps=st.integers(1, 3))
def test_the_event_loop_without_slowdown_is_the_longest_path(case: Any, seed: int, kind: str, steps: int) -> None:
    plan = plan_of(case)
    duration, (_, s) = (
        durations(plan, seed, "seconds"),
        scenarios(plan, seed, "ties", MessageMode.RENDEZVOUS, kind, True),
    )
    t = cases.interference(plan, seed)
    none = KernelInterference(t.kind, t.held * 0, t.moving * 0, t.wire * 0)
    assert s.links is not None
    nobody = replace(s.links, row=np.full(len(plan), -1))
    path = outcome(longest_path, replace(s, slow=None, links=None), duration, steps)
    for slow in (None, none):
        for links in (None, nobody):
            assert same(outcome(event_loop, replace(s, slow=slow, links=links), duration, steps), path)
    assert same(outcome(compiled.play, replace(s, slow=none, links=None), duration, steps), path)


def test_a_structure_is_built_once_and_forgotten_with_its_plan() -> None:
    plan = replace(stage_plan("1f1b", 2, 3))
    host, ones = cases.inline(plan), np.ones(len(plan))
    bare, hosted = EngineScenario.of(plan), EngineScenario.of(plan, host=host)
    carried = replace(bare, late=np.array([0]), before=np.array([len(plan) - 1]))
    assert CompiledEngine.of(bare) is CompiledEngine.of(EngineScenario.of(plan))
    assert (
        len({CompiledEngine.of(s) for s in (bare, hosted, carried, EngineScenario.of(plan, MessageMode.BUFFERED))}) == 4
    )
    slower = replace(hosted, host=HostModel(ones, host.hold))
    assert CompiledEngine.of(slower) is CompiledEngine.of(hosted)
    assert same(compiled.play(slower, ones), engine.play(slower, ones))
    gone, held = weakref.ref(CompiledEngine.of(bare)), weakref.ref(CompiledEngine.of(hosted))
    del hosted, slower, host
    gc.collect()
    assert held() is None and gone() is not None
    del plan, bare, carried
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("wire", "kind"), [(w, h) for w in MessageMode for h in HOSTS if w is MessageMode.RENDEZVOUS or h == "none"]
)
def test_a_deadlock_is_told_in_the_words_of_simpy(wire: MessageMode, kind: str) -> None:
    """A wait that closes a cycle, for every op that could be waited for by the first compute op."""
    found = 0
    for name in ("1f1b", "zbv", "dualpipe"):
        plan = stage_plan(name, 4, 5)
        for on in range(1, len(plan), 7):
            stuck, duration = with_waits(plan, 0, on), np.ones(len(plan))
            bare, shared = scenarios(stuck, on, "ties", wire, kind, True)
            for scenario in (bare, shared) if wire is MessageMode.RENDEZVOUS else (bare,):
                expected = outcome(engine.play, scenario, duration, 2)
                found += isinstance(expected, str)
                assert same(outcome(compiled.play, scenario, duration, 2), expected)
    assert found > 20


def test_without_numba_the_twin_is_slow_and_right() -> None:
    code = """
import sys
sys.modules["numba"] = None
from piper_sim.engine import MessageMode
from cost_models.jit import numba
from tests.piper_sim.compiled.test_twin import agree
assert numba is None
assert agree(("dualpipe", 4, 8, "cut"), 1, "seconds", MessageMode.BUFFERED, "none", True, 2)
assert agree(("zbv", 3, 5, "whole"), 2, "ties", MessageMode.RENDEZVOUS, "inline", False, 2)
assert agree(("1f1b", 3, 5, "cut"), 3, "minutes", MessageMode.RENDEZVOUS, "ahead", True, 2)
"""
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), max_size=80))
def test_the_heap_gives_out_the_least_whatever_has_moved(moves: list[tuple[int, int]]) -> None:
    heap, where, key, there = np.full(10, -1), np.full(10, -1), np.zeros(10), dict[int, int]()
    for item, at in moves:
        if at % 3 == 0 and there:
            out = pop(heap, where, key, len(there))
            assert there.pop(out) == min([key[out], *there.values()])
        key[item] = there[item] = at
        assert put(heap, where, key, len(there) - (where[item] < 0), item) == len(there)
        assert set(np.flatnonzero(where >= 0)) == there.keys() and all(heap[where[i]] == i for i in there)
    assert [key[pop(heap, where, key, n)] for n in range(len(there), 0, -1)] == sorted(there.values())
