"""Is a run predicted from another run? Emulated ops within the gate, and controls that must miss it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cost_models.profile.profile import plan_keys
from executor.launch import run as cli
from executor.runtime.interpreter import PlanInterpreter
from ir.job import load_job
from ir.job.build import PreparedJob
from ir.job.run_options import JobRunOptions
from ir.plan.plan import Plan
from ir.plan.text import plan_digest
from piper_sim.study import predict
from piper_sim.study.validate import PlanTools, validate
from piper_sim.study.validate.verdict import predicted
from tests.executor.measure.validations import TOOLS, TWO, F, classes, judged_again, scaled, validation, without_wait
from tests.executor.runs import job_file

REAL = ("model.seq_len=256", "schedule.name=zbv", "schedule.microbatches=3")
COPIES = ("parallel.pp=1", "parallel.dp=2")
SHARDED = ("model.seq_len=64", "schedule.microbatches=3", *COPIES, "parallel.zero=3")


@pytest.mark.parametrize(
    "sets",
    [
        ("schedule.name=1f1b",),
        ("schedule.name=dualpipe",),
        (*COPIES, "parallel.zero=3"),
        pytest.param((*COPIES, "parallel.zero=0"), marks=pytest.mark.slow),
        pytest.param((*COPIES, "parallel.zero=2"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_a_step_of_emulated_ops_is_predicted_within_the_gate(sets: tuple[str, ...]) -> None:
    found = validation(*TWO, *sets).found
    assert found["passed"] and all(g["passed"] is not False for g in found["gates"].values())
    assert abs(found["iteration"]["error"]) <= 0.05
    assert found["iteration"]["error"] > found["without_communication"]["error"]
    assert abs(found["replay"]["error"]) <= 0.03
    assert found["memory"] is None and found["gates"]["memory"]["passed"] is None
    assert found["cost_source"] == "measured" and found["emulate_s"] == F
    passes = classes(found, ("F/attn", "F/mlp", "I/attn", "I/mlp", "W/attn", "W/mlp"))
    assert len(passes) == 6 and np.median(np.abs(passes)) <= 0.05


def test_the_judged_plan_is_run_last_and_only_then(tmp_path: Path) -> None:
    digests: list[str] = []

    class Watched:
        check = staticmethod(cli.check)

        @staticmethod
        def run(prepared: PreparedJob, plan: Plan, options: JobRunOptions) -> Any:
            digests.append(plan_digest(plan))
            return cli.run(prepared, plan, options)

    sets = ("schedule.name=dualpipe",)
    job = load_job(str(job_file(tmp_path)), sets)
    tools = PlanTools(Watched(), TOOLS.peak_bytes)
    found = validate(job, tools, JobRunOptions(2, 1, emulate=0.0)).found
    assert digests == [found["calibrated_on"]["plan_digest"], found["plan_digest"]] and len(set(digests)) == 2
    assert found["replay"] is None and found["steps"] == 1


# -- controls: each makes the same run miss the gate ------------------------------------------------------------------


def test_ops_that_were_measured_too_long_miss_the_gates() -> None:
    v = validation(*TWO, "schedule.name=1f1b")
    profile = scaled(v.calibration.profile, 1.2)
    found = judged_again(v, profile=profile, prediction=predicted(v.prediction.planned, profile, inline=True))
    assert not found["passed"] and found["iteration"]["error"] > 0.1
    assert found["gates"]["iteration"]["passed"] is found["gates"]["op_median"]["passed"] is False


@pytest.mark.parametrize(("op", "on"), [("1F0", "1RECV_F0"), ("0B1", "0RECV_B1")])
def test_an_edge_too_few_in_the_simulated_plan_misses_the_gate(
    op: str, on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    v = validation(*TWO, "schedule.name=1f1b")
    scenario_of = predict.scenario_of
    monkeypatch.setattr(predict, "scenario_of", lambda *given: without_wait(scenario_of(*given), op, on))
    found = judged_again(v, prediction=predicted(v.prediction.planned, v.calibration.profile, inline=True))
    assert not found["passed"] and -0.3 < found["iteration"]["error"] < -0.06


def test_a_reduction_that_nobody_waits_for_misses_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    v = validation(*TWO, *COPIES, "parallel.zero=2", "parallel.prefetch=0", comm=2 * F)
    assert abs(v.found["iteration"]["error"]) <= 0.05
    scenario_of = predict.scenario_of
    wait = ("0B0/l1.mlp..l0.mlp", "0RS0/head.dense")  # whose room the next layer's gradients take
    monkeypatch.setattr(predict, "scenario_of", lambda *given: without_wait(scenario_of(*given), *wait))
    found = judged_again(v, prediction=predicted(v.prediction.planned, v.calibration.profile, inline=True))
    assert not found["passed"] and -0.3 < found["iteration"]["error"] < -0.06


def test_messages_that_take_no_time_are_seen_in_the_prediction() -> None:
    found = validation(*TWO, "schedule.name=1f1b").found
    assert found["without_communication"]["predicted_s"] < found["iteration"]["predicted_s"]
    assert found["links"] and all(x["measured_s"] > 0 for x in found["links"].values())


# -- arithmetic -------------------------------------------------------------------------------------------------------


def test_peak_bytes_of_a_real_run_are_predicted_to_the_byte_and_it_replays() -> None:
    found = validation(*REAL, emulate=None, steps=4, within=10.0).found
    assert set(found["memory"]) == {"0", "1"} and found["gates"]["memory"]["passed"]
    assert all(x["predicted_bytes"] == x["measured_bytes"] > 0 and x["error"] == 0 for x in found["memory"].values())
    assert found["calibrated_on"]["schedule"] == "dualpipev" and found["calibrated_on"]["microbatches"] != 3
    assert abs(found["replay"]["error"]) <= 0.1  # 3 % where nothing else runs
    assert {"F/embed", "F/head", "I/norm", "W/mlp", "UPDATE"} <= {k.split(" ")[0] for k in found["ops"]}


def test_of_replicas_too_everything_is_predicted() -> None:
    v = validation(*SHARDED, emulate=None, steps=2, within=10.0)
    found = v.found
    assert all(x["predicted_bytes"] == x["measured_bytes"] > 0 for x in found["memory"].values())
    assert set(found["memory"]) == {"0", "1"} and found["cost_source"] == "measured"
    assert plan_keys(v.run.plan).keys() == found["ops"].keys() | found["links"].keys()
    assert {k.split(" ")[0] for k in found["links"]} == {"all_gather", "reduce_scatter", "all_reduce"}


def test_bytes_that_are_held_too_long_miss_the_memory_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    v = validation(*REAL, emulate=None, steps=4, within=10.0)
    monkeypatch.setattr(PlanInterpreter, "_frees", lambda self, i, cover: ())
    peaks = TOOLS.peak_bytes(v.prediction.prepared, v.prediction.plan)
    found = judged_again(v, peaks=peaks)
    assert found["gates"]["memory"]["passed"] is False and not found["passed"]
