"""What the doctor asks of schedules, exchanges, a GPU's rules and predictions: green here, red for what is planted."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from executor.launch.forkserver import RankForkServer
from ir.core.errors import ErrorKind
from ir.schedules.registry import NAMES
from piper_sim.app.cli import main
from piper_sim.app.doctor import command, forecast, gpu_rules, runs
from tests.executor.threads import one_core
from tests.refusals import refusal

HERE = runs.MachineRanks()


@pytest.fixture
def threads() -> Iterator[None]:
    """Ranks are threads, on one core."""
    with one_core(RankForkServer.get().process.pid):
        yield


@pytest.fixture
def curve(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Real runs, but those of a schedule, or of every job on gloo ("gloo"), train something else."""
    real, wrong = runs.curve, list[str]()

    def made(prepared: Any, backend: str, *more: Any, **at: Any) -> list[float]:
        off = 1e-11 if {prepared.schedule, backend} & set(wrong) else 0.0
        return [x * (1 + off) for x in real(prepared, backend, *more, **at)]

    monkeypatch.setattr(runs, "curve", made)
    return wrong.append


def test_each_schedule_is_asked_and_one_that_trains_something_else_is_named(
    curve: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert runs.schedules(HERE)["schedules"] == len(NAMES)
    curve("dualpipev")
    monkeypatch.setattr(runs, "NAMES", NAMES[-2:])
    assert "dualpipev on gloo" in refusal(lambda: runs.schedules(HERE)).message


def test_exchanges_are_uneven_and_some_are_empty(curve: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    found = runs.exchanges(HERE)
    assert found["least"] == 0 and found["most"] == 16 * 2  # all of a sequence's tokens, twice
    curve("gloo")
    assert "uneven exchanges on gloo" in refusal(lambda: runs.exchanges(HERE)).message
    monkeypatch.setattr(runs, "FULL", {"routing": {"kind": "balanced", "forced": True}})
    assert "none uneven or empty" in refusal(lambda: runs.exchanges(HERE)).message


@pytest.mark.usefixtures("threads")
def test_nothing_races_and_a_detector_that_is_blind_or_finds_something_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    found = gpu_rules.races()
    assert found["races"] == 0 and found["without_marks"] > found["of_freed_memory"] > 0
    monkeypatch.setattr(gpu_rules, "deaf_rank", "executor.runtime.rank:train_rank")  # it hears: no race to see
    assert "sees too little" in refusal(gpu_rules.races).message
    monkeypatch.setattr("executor.launch.run.RANK", "piper_sim.app.doctor.gpu_rules:deaf_rank")
    assert refusal(gpu_rules.races).kind is ErrorKind.ILLEGAL_PLAN


@pytest.mark.usefixtures("threads")
def test_the_host_waits_where_it_is_said_to_and_elsewhere_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_rules.host_waits()["ops"]
    real = gpu_rules.host_reads
    monkeypatch.setattr(gpu_rules, "host_reads", lambda plan: (real(plan)[0][1:], real(plan)[1][1:]))
    assert "the host waits at" in refusal(gpu_rules.host_waits).message
    monkeypatch.setattr(gpu_rules, "EXPERTS", {})  # no experts: the model has the host wait nowhere
    assert "and somewhere" in (refusal(gpu_rules.host_waits).allowed or "")


def _validated(predicted_s: float, *steps_s: float) -> Any:
    run = SimpleNamespace(step_s=np.array(steps_s), usual=lambda: 0)
    iteration = {"predicted_s": predicted_s, "measured_s": steps_s[0], "error": predicted_s / steps_s[0] - 1}
    return SimpleNamespace(found={"iteration": iteration}, run=run, calibration=SimpleNamespace(run=run))


def test_a_prediction_is_judged_where_steps_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as m:
        m.setattr(forecast, "apart_from_median", lambda r: 9.0)  # a busy machine turns no test red
        assert forecast.forecast(HERE).keys() >= {"predicted_s", "measured_s", "error", "spread"}

    def found(*seconds: float) -> Any:
        monkeypatch.setattr(forecast, "validate", lambda *of: _validated(*seconds))
        return forecast.forecast(HERE)

    assert "undecided" not in found(1.04, 1.0, 1.01) and "undecided" not in found(0.96, 1.0, 1.5)
    assert "busy" in found(1.06, 1.0, 1.06)["undecided"] and "busy" in found(0.94, 1.0, 0.9)["undecided"]
    for seconds in ((1.06, 1.0, 1.04), (0.94, 1.0, 0.96)):
        assert "is predicted" in refusal(lambda seconds=seconds: found(*seconds)).message


def test_a_run_whose_ops_take_twice_as_long_as_measured_is_far_from_its_prediction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = runs.run

    def slow(prepared: Any, plan: Any, options: Any, saving: Any) -> Any:
        twice = prepared.schedule == "zb1p"  # the judged one
        return real(prepared, plan, replace(options, emulate=options.emulate * (1 + twice)))

    monkeypatch.setattr(runs, "run", slow)
    monkeypatch.setattr(forecast, "apart_from_median", lambda r: 0.0)
    assert "is predicted -" in refusal(lambda: forecast.forecast(HERE)).message


def test_what_is_undecided_is_listed_as_not_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "questions", lambda job: [("a", lambda: {"undecided": "busy"})])
    assert main(["doctor", "--json"]) == 0
    assert "a: busy" in json.loads(capsys.readouterr().out)["not_checked"]
