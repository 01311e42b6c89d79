"""The engine that the commands choose: which, that both answer in the same bits, and that a step really repeats."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cost_models.compute.host import HostCosts
from ir.core.errors import ErrorKind
from ir.core.order import FloatArray
from ir.plan.plan import OpKind, Plan
from piper_sim import compiled, engine
from piper_sim.compiled import choose
from piper_sim.engine import EngineRun, EngineScenario
from piper_sim.pricing.hosts import ahead, inline
from piper_sim.pricing.scenario import scenario_of
from piper_sim.study.predict import step_of
from piper_sim.study.prediction import Prediction
from tests.ir.plans import stage_plan
from tests.piper_sim.pricing.prediction_cases import RICH, answered, asked, drawn, table
from tests.refusals import refusal

Play = Callable[..., EngineRun]


# --- which one ---


@pytest.mark.parametrize("loaded", [False, True])
def test_small_plans_stay_with_simpy_and_large_ones_pay_for_the_twin(
    monkeypatch: pytest.MonkeyPatch, loaded: bool
) -> None:
    monkeypatch.setattr(choose, "_loaded", lambda: loaded)
    for shared, cost in ((False, choose.SIMPY_S), (True, choose.SIMPY_SHARED_S)):
        turn = (choose.TWIN_LOADED_S if loaded else choose.TWIN_LOAD_S) / cost
        assert not choose.twin_pays(int(turn * 0.99), shared) and choose.twin_pays(int(turn * 1.01), shared)
    assert choose.twin_pays(100_000, shared=True) and choose.twin_pays(100_000, shared=False) is loaded


def test_without_numba_nothing_pays_for_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose.twin_pays(10**9, shared=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    assert not choose.twin_pays(10**9, shared=True)


@pytest.mark.parametrize("large", [False, True])
def test_a_scenario_goes_where_it_pays(monkeypatch: pytest.MonkeyPatch, large: bool) -> None:
    went: list[str] = []

    def seen(name: str, real: Play) -> Play:
        def play(*args: Any) -> EngineRun:
            went.append(name)
            return real(*args)

        return play

    monkeypatch.setattr(engine, "play", seen("simpy", engine.play))
    monkeypatch.setattr(compiled, "play", seen("twin", compiled.play))
    for name in ("TWIN_LOAD_S", "TWIN_LOADED_S"):
        monkeypatch.setattr(choose, name, 1e-9 if large else 1e9)
    asked(table())
    assert set(went) == {"twin" if large else "simpy"}


# --- the same bits ---


def told(monkeypatch: pytest.MonkeyPatch, wanted: Any, play: Play) -> str | None:
    monkeypatch.setattr(choose, "play", play)
    found = answered(wanted)
    return None if found is None else json.dumps(found[1])


@pytest.mark.parametrize("seed", range(16))
def test_both_engines_print_the_same_object(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    wanted = drawn(seed)
    assert told(monkeypatch, wanted, engine.play) == told(monkeypatch, wanted, compiled.play)


@pytest.mark.parametrize("name", ["1f1b", "looped-bfs", "zb1p", "zbv", "dualpipe"])
def test_with_every_option_on_too(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    wanted = {**RICH, "schedule": {**RICH["schedule"], "name": name}}
    one = told(monkeypatch, wanted, engine.play)
    assert one is not None and one == told(monkeypatch, wanted, compiled.play)


def test_times_beyond_the_grid_s_exact_sums_agree_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = table(costs={"stage_times": {"F": 1e5 / 3, "B": 7e4, "p2p": 0.1}, "interference": "maxmin"})
    one = told(monkeypatch, wanted, engine.play)
    assert one is not None and one == told(monkeypatch, wanted, compiled.play)


def test_a_defect_of_one_bit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the tests above: the last update ends one tick of the grid late."""

    def late(scenario: EngineScenario, duration: FloatArray, steps: int = 1) -> EngineRun:
        ran = compiled.play(scenario, duration, steps)
        ran.end[-1, scenario.plan.bounds[1:] - 1] += 2.0**-40
        return ran

    assert told(monkeypatch, RICH, late) != told(monkeypatch, RICH, engine.play)


# --- the step that repeats ---


def periods(p: Prediction, steps: int) -> FloatArray:
    """[step] seconds between the last computes of two steps, of the slowest rank, as a long run has them."""
    scenario = scenario_of(p.planned.model, p.plan, p.planned.classes, p.costs.duration)
    ran = choose.play(scenario, p.costs.duration, steps)
    compute = np.flatnonzero(scenario.plan.kind == OpKind.COMPUTE)
    program = scenario.plan.program[compute]
    closing = compute[np.searchsorted(program, np.arange(scenario.plan.programs), side="right") - 1]
    return np.asarray(np.diff(ran.end[:, closing], axis=0).max(axis=1))


@pytest.mark.parametrize("host", ["ahead", "inline"])
@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("zero", range(4))
def test_what_is_told_is_what_a_long_run_settles_to(host: str, clip: float, zero: int) -> None:
    seen = 0
    for seed in range(2):
        fixed: Any = {"costs": {"host_model": host}, "optimizer": {"clip_norm": clip}, "parallel": {"zero": zero}}
        wanted = drawn(1000 * zero + seed)
        found = answered({**wanted, **{k: {**wanted.get(k, {}), **v} for k, v in fixed.items()}})
        if found is not None and len(found[0].plan) * found[0].planned.classes.count < 4000:
            late = periods(found[0], 30)[-8:]
            assert (late == found[1]["iteration_s"]).all() or found[0].steps >= choose.TRIED[-1]
            assert step_of(found[0].planned) == found[1]["iteration_s"], "the step alone, of two steps where those do"
            seen += 1
    assert seen


def test_the_first_step_is_not_yet_the_one_that_repeats() -> None:
    """Else the test above could not fail: a host that runs ahead starts a step while the one before still computes."""
    p, found = asked(table(schedule={"name": "zb1p"}, parallel={"pp": 4, "dp": 1, "ep": 1}))
    scenario = scenario_of(p.planned.model, p.plan, p.planned.classes, p.costs.duration)
    ran = choose.play(scenario, p.costs.duration, 3)
    assert ran.end[0].max() > found["iteration_s"] * 1.01


DRIFT = table(
    model={"seq_len": 512, "num_hidden_layers": 8},
    parallel={"tp": 2, "dp": 1, "ep": 1, "zero": 3},
    schedule={"name": "dualpipe", "microbatches": 5},
    costs={"interference": "none"},
)


def test_a_host_that_slowly_falls_behind_is_told_within_a_step_s_drift() -> None:
    """A device a little quicker than its host uses up its lead over many steps, more than are simulated."""
    p, found = asked(DRIFT)
    late = periods(p, 120)
    assert p.steps == choose.TRIED[-1] and np.ptp(late[-20:]) == 0
    assert late[-1] * (1 - 1 / choose.TRIED[-1]) < found["iteration_s"] <= late[-1]


def test_two_steps_are_the_period_only_where_the_second_leaves_what_the_first_did() -> None:
    """DRIFT's first two are not its period: the step alone, taken from them unasked, would be another."""
    p, found = asked(DRIFT)
    assert periods(p, 2)[-1] != found["iteration_s"] == step_of(p.planned)


def test_a_host_that_slowly_falls_behind_is_told_exactly() -> None:
    p, found = asked(DRIFT)
    assert found["iteration_s"] == periods(p, 120)[-1]


# --- deadlocks ---


def reversed_on(plan: Plan, program: int) -> Plan:
    """The plan with a program's first compute op waiting for its last."""
    first, last = (int(x) for x in np.flatnonzero((plan.program == program) & (plan.kind == OpKind.COMPUTE))[[0, -1]])
    rows = [plan.waits.row(i).tolist() for i in range(len(plan))]
    rows[first] = sorted({*rows[first], last})
    count = np.repeat(np.arange(len(plan)), [len(r) for r in rows])
    return replace(plan, waits=type(plan.waits).of(len(plan), count, np.array([x for r in rows for x in r])))


@pytest.mark.parametrize("play", [engine.play, compiled.play])
@pytest.mark.parametrize("kind", ["none", "inline", "ahead"])
def test_a_plan_by_hand_that_hangs_is_told_by_rank_and_op(play: Play, kind: str) -> None:
    plan = reversed_on(stage_plan("1f1b", 2, 2), 1)
    hosts = {"none": None, "inline": inline(plan), "ahead": ahead(plan, HostCosts(0.0, 0.0))}
    caught = refusal(play, EngineScenario.of(plan, host=hosts[kind]), np.ones(len(plan)), 2)
    assert caught.kind is ErrorKind.DEADLOCK
    assert "rank 1 compute stands at 1F0, which waits for 1B1" in str(caught)
    assert "rank 0 compute stands at 0B0, which waits for 0RECV_B0" in str(caught)
    assert ("rank 0 host stands at " in str(caught)) is (kind != "none")
    play(EngineScenario.of(stage_plan("1f1b", 2, 2), host=hosts[kind]), np.ones(len(plan)), 2)
