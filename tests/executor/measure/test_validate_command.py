"""`piper-sim validate` from outside: its object, its files, its exit codes."""

import json
from pathlib import Path
from typing import Any

import pytest

from executor.launch import run as cli
from executor.launch.launch import launch
from ir.plan.text import plan_digest
from tests.executor import faults
from tests.executor.launch.test_run_command import command
from tests.executor.runs import job_file, judged

SMALL = ["--set", "model.num_hidden_layers=2", "--set", "schedule.microbatches=2"]
WIDE = ["--set", "gate.iteration=9", "--set", "gate.op_median=9"]  # the machine of these tests is busy
FILES = {"ranks.json", "validate.json", "profile.json", "plan.txt", "report.html", "predicted.tsv", "trace.tsv"}


def test_the_object_the_files_and_the_profile(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job, out = str(job_file(tmp_path)), tmp_path / "out"
    line = [job, "-n", "2", "--steps", "2", "--emulate", "0.005", *SMALL, *WIDE, "--out", str(out)]
    found = command(capfd, "validate", *line)
    for pair in (found["iteration"], *found["ops"].values()):
        assert set(pair) == {"predicted_s", "measured_s", "error"}
    assert found["iteration"]["error"] == found["iteration"]["predicted_s"] / found["iteration"]["measured_s"] - 1
    assert found["passed"] is True and found["memory"] is None and found["steps"] == 2
    _, plan = judged(tmp_path, *SMALL[1::2])
    assert found["plan_digest"] == plan_digest(plan) != found["calibrated_on"]["plan_digest"]
    assert {p.name for p in out.iterdir()} == FILES
    assert json.loads((out / "validate.json").read_text()) == found
    assert set(json.loads((out / "ranks.json").read_text())["ranks"]) == {"0", "1"}
    page = (out / "report.html").read_text()
    assert 0 < page.index("predicted") < page.rindex("measured")
    before = (out / "ranks.json").read_text()
    error = command(capfd, "validate", *line, code=2)["error"]
    assert error["kind"] == "io" and "--force" in error["suggestion"] and (out / "ranks.json").read_text() == before
    again = ["--set", f"costs.profile={out / 'profile.json'}", "--set", "costs.host_model=inline"]
    simulated = command(capfd, "simulate", job, *SMALL, *again, "--set", "costs.interference=none")
    assert simulated["iteration_s"] == found["iteration"]["predicted_s"]
    assert simulated["cost_source"] == "measured" and simulated["plan_digest"] == found["plan_digest"]


def test_a_gate_that_is_missed_exits_5(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    narrow = ["--set", "gate.iteration=0", "--steps", "1", "--emulate", "0.002"]
    found = command(capfd, "validate", str(job_file(tmp_path)), "-n", "2", *SMALL, *narrow, code=5)
    assert found["passed"] is False and found["gates"]["iteration"]["passed"] is False


def _second(monkeypatch: pytest.MonkeyPatch, target: Any, **more: Any) -> None:
    """The run after the calibration does something wrong."""
    runs = 0

    def launched(fn: object, ranks: int, args: dict[str, Any], **options: Any) -> list[Any]:
        nonlocal runs
        runs += 1
        return launch(*(fn, ranks, args) if runs == 1 else (target, ranks, {**args, **more}), **options)  # type: ignore[arg-type]

    monkeypatch.setattr(cli, "launch", launched)


def test_a_rank_slower_than_it_was_exits_5(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _second(monkeypatch, faults.slow, fault={"rank": 1, "seconds": 0.01})
    flags = ["--emulate", "0.02", "--steps", "2", *SMALL]
    found = command(capfd, "validate", str(job_file(tmp_path)), "-n", "2", *flags, code=5)
    assert found["gates"]["iteration"]["passed"] is False and found["iteration"]["error"] < -0.15


def test_a_run_that_fails_exits_4_and_names_the_rank(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _second(monkeypatch, faults.killed)
    out = tmp_path / "out"
    job = str(job_file(tmp_path))
    error = command(capfd, "validate", job, "-n", "2", "--steps", "1", "--out", str(out), code=4)["error"]
    assert error["kind"] == "rank_failed" and error["rank"] == 1
    assert {p.name for p in out.iterdir()} == {"flight", "ranks.json"}


@pytest.mark.parametrize(
    ("flags", "kind", "key"),
    [
        (["-n", "3"], "usage", "-n"),
        (["-n", "2", "--steps", "0"], "usage", "--steps"),
        (["-n", "2", "--set", "gate.iteraton=1"], "job", "gate.iteraton"),
        (["-n", "2", "--set", "costs.profile=none.json"], "io", "costs.profile"),
        (["-n", "2", "--set", "parallel.tp=2"], "usage", "-n"),
    ],
)
def test_what_cannot_be_validated_is_refused_before_any_process(
    flags: list[str], kind: str, key: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    error = command(capfd, "validate", str(job_file(tmp_path)), *flags, code=2)["error"]
    assert (error["kind"], error["key"]) == (kind, key) and error["suggestion"]


def test_people_get_both_timelines_and_a_verdict(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from piper_sim.app.cli import main

    line = ["validate", str(job_file(tmp_path)), "-n", "2", "--steps", "2", "--emulate", "0.002", *SMALL, *WIDE]
    assert main(line) == 0
    out = capfd.readouterr().out
    assert out.index("predicted") < out.index("measured") < out.index("calibrated on gpipe")
    assert "iteration" in out and out.rstrip().endswith("passed")
