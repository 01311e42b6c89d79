"""`piper-sim validate` and `[costs] profile` where no process is started."""

import json
from pathlib import Path
from typing import Any

import pytest

from cost_models.profile.file import profile_text
from cost_models.profile.profile import MeasuredCost, OpEntry, Profile, ProfileMachine, plan_keys
from ir.job import load_job
from piper_sim.app import cli as command_line
from piper_sim.pricing.prepare import hardware_of, prepare_priced


def test_without_torch_it_says_how_to_install_it(cli: Any, job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "_has", lambda module: False)
    result = cli("validate", job(), "-n", 2)
    assert result.code == 2 and result.error["kind"] == "missing_dependency"
    assert result.error["message"] == "validate needs PyTorch" and "piper-sim[exec]" in result.error["suggestion"]


def _profile(path: str, tmp_path: Path, seconds: float, part: str = "") -> str:
    """A profile in which everything, or all that starts so, takes so long."""
    job = load_job(path)
    keys = plan_keys(prepare_priced(job, hardware_of(job)).plan())
    machine, took = ProfileMachine("x", 1, "", 0, {}, "2026-01-01T00:00:00Z"), MeasuredCost(seconds, 0.0, 1)
    wanted = [k for k in keys if k.startswith(part)]
    links = {k: took for k in wanted if k.rpartition(" ")[2].isdecimal() and "/" not in k and not k.startswith("UPD")}
    ops = {k: OpEntry(took) for k in wanted if k not in links}
    file = tmp_path / "profile.json"
    file.write_text(profile_text(Profile.of(machine, ops, links, 0.001)))
    return str(file)


def test_measured_seconds_go_before_modelled_ones(cli: Any, job: Any, tmp_path: Path) -> None:
    path = job(parallel={"dp": 1, "ep": 1})
    plain = ["simulate", path, "--set", "costs.interference=none", "--set", "costs.host_model=inline"]
    modelled = cli(*plain).json
    assert modelled["cost_source"] == "modelled" and modelled["iteration_s"] < 0.1
    everything = cli(*plain, "--set", f"costs.profile={_profile(path, tmp_path, 0.5)}").json
    assert everything["cost_source"] == "measured" and everything["iteration_s"] > 10
    assert everything["plan_digest"] == modelled["plan_digest"] and everything["cost_digest"] != modelled["cost_digest"]
    rows = everything["time_breakdown"].values()
    assert all(sum(row.values()) == pytest.approx(everything["iteration_s"]) for row in rows)
    forward = cli(*plain, "--set", f"costs.profile={_profile(path, tmp_path, 0.5, 'F/')}").json
    assert forward["cost_source"] == "mixed" and 1 < forward["iteration_s"] < everything["iteration_s"]


def test_the_hosts_seconds_count_where_it_computes_itself(cli: Any, job: Any, tmp_path: Path) -> None:
    path = job(parallel={"dp": 1, "ep": 1})
    profile = ["--set", f"costs.profile={_profile(path, tmp_path, 0.0)}", "--set", "costs.interference=none"]
    inline = cli("simulate", path, *profile, "--set", "costs.host_model=inline").json
    assert inline["iteration_s"] > 0.01  # a millisecond for each of a rank's ops, and nothing else
    assert cli("simulate", path, *profile).json["iteration_s"] < 0.01


def test_a_profile_that_cannot_be_used_is_refused(cli: Any, job: Any, tmp_path: Path) -> None:
    path = job()
    error = cli("simulate", path, "--set", "costs.profile=nothing.json")
    assert error.code == 2 and error.error["kind"] == "io" and "calibrate" in error.error["suggestion"]
    (tmp_path / "bad.json").write_text(json.dumps({"profile_version": 2, "machin": {}}))
    error = cli("plan", path, "--set", "costs.profile=bad.json")
    assert error.code == 2 and error.error["key"] == "machin" and error.error["suggestion"] == "machine"
    file = _profile(path, tmp_path, 0.5)
    both = ["--set", f"costs.profile={file}", "--set", "costs.stage_times={F=1,B=2}"]
    error = cli("simulate", path, *both)
    assert error.code == 2 and error.error["key"] == "costs.profile" and "stage_times" in error.error["message"]
