"""The twin computes what SimPy computes, to the last bit; and a defect in either of them would be seen."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ir.errors import ErrorKind, PiperError
from ir.order import IntArray
from ir.plan import Csr, Plan
from piper_sim.engine import contention, loop
from piper_sim.engine.contention import Interference, run_shared
from piper_sim.engine.loop import Run, Wire, run
from piper_sim.twin import Compiled, choose, event_loop, events, longest_path, net, step_ends
from tests.ir.plans import stage_plan
from tests.twin.cases import LAYERS, SCALES, STAGES, durations, interference, plan_of, same

SEEDS = st.integers(0, 2**32)


def agree(case: tuple[Any, ...], seed: int, scale: str, wire: Wire, steps: int) -> bool:
    plan = plan_of(case)
    duration, table = durations(plan, seed, scale), interference(plan, seed)
    alone = same(run(plan, duration, wire, steps), longest_path(plan, duration, wire, steps))
    return alone and same(run_shared(plan, duration, table, steps=steps), event_loop(plan, duration, table, steps))


@given(
    case=st.one_of(STAGES, LAYERS),
    seed=SEEDS,
    scale=st.sampled_from(SCALES),
    wire=st.sampled_from(Wire),
    steps=st.integers(1, 3),
)
def test_any_plan_runs_as_in_simpy(case: Any, seed: int, scale: str, wire: Wire, steps: int) -> None:
    assert agree(case, seed, scale, wire, steps)


@settings(max_examples=60)
@given(case=STAGES, seed=SEEDS, steps=st.integers(1, 3))
def test_the_event_loop_without_slowdown_is_the_longest_path(case: Any, seed: int, steps: int) -> None:
    plan = plan_of(case)
    duration, t = durations(plan, seed, "seconds"), interference(plan, seed)
    none = Interference(t.kind, t.held * 0, t.moving * 0, t.wire * 0)
    assert same(event_loop(plan, duration, none, steps), longest_path(plan, duration, steps=steps))
    assert same(choose(plan, duration, none, steps=steps), choose(plan, duration, steps=steps))


@settings(max_examples=60)
@given(case=STAGES, seed=SEEDS, wire=st.sampled_from(Wire), steps=st.integers(1, 3))
def test_many_durations_at_once_are_as_many_runs(case: Any, seed: int, wire: Wire, steps: int) -> None:
    plan = plan_of(case)
    many = np.stack([durations(plan, seed + k, SCALES[k]) for k in range(4)])
    found = longest_path(plan, many, wire, steps)
    assert found.end.shape == (4, steps, len(plan))
    for k, duration in enumerate(many):
        assert same(Run(found.start[k], found.end[k]), longest_path(plan, duration, wire, steps))
    assert (step_ends(plan, many, wire, steps) == found.end.max(axis=2)).all()


def test_a_structure_is_built_once_and_forgotten_with_its_plan() -> None:
    plan = replace(stage_plan("1f1b", 2, 3))
    assert Compiled.of(plan) is Compiled.of(plan) is not Compiled.of(plan, Wire.BUFFERED)
    assert same(longest_path(Compiled(plan), np.ones(len(plan))), run(plan, np.ones(len(plan))))
    gone = weakref.ref(Compiled.of(plan))
    del plan
    gc.collect()
    assert gone() is None


def with_waits(plan: Plan, row: int, on: int) -> Plan:
    waits = Csr.of(len(plan), np.append(plan.waits.rows(), row), np.append(plan.waits.items, on))
    return replace(plan, waits=waits)


@pytest.mark.parametrize("wire", Wire)
def test_a_deadlock_is_told_in_the_words_of_simpy(wire: Wire) -> None:
    """A wait that closes a cycle, for every op that could be waited for by the first compute op."""
    found = 0
    for name in ("1f1b", "zbv", "dualpipe"):
        plan = stage_plan(name, 4, 5)
        for on in range(1, len(plan), 7):
            stuck, duration = with_waits(plan, 0, on), np.ones(len(plan))
            try:
                expected = run(stuck, duration, wire, 2)
            except PiperError as e:
                found += 1
                for twin in (longest_path, lambda p, d, *_: event_loop(p, d, interference(p, 0))):
                    if twin is longest_path or wire is Wire.RENDEZVOUS:
                        with pytest.raises(PiperError) as caught:
                            twin(stuck, duration, wire, 2)
                        assert caught.value.kind is ErrorKind.DEADLOCK
                        assert str(caught.value) == str(e)
            else:
                assert same(expected, longest_path(stuck, duration, wire, 2))
    assert found > 20


def test_interference_knows_no_buffered_messages() -> None:
    plan = stage_plan("1f1b", 2, 2)
    table = replace(interference(plan, 0), held=np.ones((1, 1)))
    with pytest.raises(ValueError, match="nothing to share"):
        choose(plan, np.ones(len(plan)), table, Wire.BUFFERED)


def test_without_numba_the_twin_is_slow_and_right() -> None:
    code = """
import sys
sys.modules["numba"] = None
from piper_sim.engine.loop import Wire
from piper_sim.twin.jit import numba
from tests.twin.test_twin import agree
assert numba is None
assert agree(("dualpipe", 4, 8, "cut"), 1, "seconds", Wire.BUFFERED, 2)
assert agree(("zbv", 3, 5, "whole"), 2, "ties", Wire.RENDEZVOUS, 2)
"""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


CONTROLS = [((name, 4, 6, "cut"), seed, SCALES[seed % 4], Wire.RENDEZVOUS, 2) for seed, name in enumerate(
    ("1f1b", "zbv", "dualpipe", "zb1p", "interleaved-1f1b", "dualpipev", "gpipe", "1f1b")
)]  # fmt: skip


def no_moving(old: Callable[..., float]) -> Callable[..., float]:
    def rate_of(self: Any, i: int) -> float:
        were, self.n_moving = self.n_moving, [[0] * len(x) for x in self.n_moving]
        try:
            return old(self, i)
        finally:
            self.n_moving = were

    return rate_of


def fewer_waits(old: Callable[..., net.Net]) -> Callable[..., net.Net]:
    def build(plan: Plan, wire: Wire) -> net.Net:
        row = int(np.flatnonzero(plan.waits.rows() == plan.waits.rows()[-1])[0])
        keep = np.arange(len(plan.waits.items)) != row
        return old(replace(plan, waits=Csr.of(len(plan), plan.waits.rows()[keep], plan.waits.items[keep])), wire)

    return build


def other_rates(old: Callable[..., None]) -> Callable[..., None]:
    def play(n: net.Net, rates: events.Rates, *rest: Any) -> None:
        old(n, rates._replace(wire=rates.wire * (1 + 1e-10)), *rest)

    return play


def no_carry(plan: Plan) -> tuple[IntArray, IntArray]:
    none = np.zeros(0, dtype=np.int64)
    return none, none


DEFECTS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "SimPy forgets moving kernels": (contention._Shared, "_rate_of", no_moving),
    "SimPy rounds to another grid": (contention, "GRID", lambda grid: grid / 2),
    "SimPy settles before it is due": (contention, "SETTLE", lambda late: late - 2),
    "SimPy carries nothing over": (loop, "carried", lambda _: no_carry),
    "the twin carries nothing over": (net, "carried", lambda _: no_carry),
    "the twin misses one wait": (net, "build", fewer_waits),
    "the twin's slowdowns are off by 1e-10": (events, "play", other_rates),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compiled, "_built", weakref.WeakKeyDictionary())
    assert all(agree(*c) for c in CONTROLS)
    monkeypatch.setattr(Compiled, "_built", weakref.WeakKeyDictionary())
    where, what, change = DEFECTS[name]
    monkeypatch.setattr(where, what, change(getattr(where, what)))
    assert not all(agree(*c) for c in CONTROLS)
