"""`piper-sim calibrate` from outside: measure on one schedule, simulate another; what it prints, writes, refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from cost_models.profile.file import load_profile
from executor.launch import run as cli
from executor.measure import calibrate as stopwatch
from executor.measure import ops as calibrate_watch
from ir.core.errors import PiperError
from ir.job import load_job
from ir.job.build import PreparedJob
from ir.job.run_options import JobRunOptions
from ir.plan.plan import Plan
from ir.plan.text import plan_digest
from piper_sim.study.calibrate import ProfileOptions, calibrate
from tests.executor.launch.test_run_command import command
from tests.executor.runs import job_file, judged

SMALL = ("model.num_hidden_layers=4", "precision.compute=fp32")
QUICK = ["--repeats", "3"]


def sets(*overrides: str) -> list[str]:
    return [x for s in overrides for x in ("--set", s)]


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict | list):
        return [x for v in (value.values() if isinstance(value, dict) else value) for x in numbers(v)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def test_a_profile_of_one_schedule_predicts_another(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job, out = str(job_file(tmp_path)), tmp_path / "out"
    there = sets(*SMALL, "schedule.name=gpipe", "schedule.microbatches=3")
    found = command(capfd, "calibrate", job, "-n", "2", *QUICK, *there, "--out", str(out))
    assert found["profile"] == str(out / "profile.json") and [p.name for p in out.iterdir()] == ["profile.json"]
    assert (found["by"], found["processes"], found["cost_source"], found["missing"]) == ("modules", 2, "measured", [])
    assert found["ops"] > 10 and found["links"] >= 2 and found["host_s"] > 0 and found["fit_error"] >= 0
    assert "torch" in found["fingerprint"] and "thread" in found["fingerprint"]
    assert all(math.isfinite(x) for x in numbers(found))
    text = (out / "profile.json").read_text()
    assert str(tmp_path) not in text, "no path in it"
    again = command(capfd, "calibrate", job, "-n", "2", *QUICK, *there, "--out", str(out), code=2)["error"]
    assert again["kind"] == "io" and "--force" in again["suggestion"] and (out / "profile.json").read_text() == text

    here = [*sets(*SMALL, "schedule.name=zb1p", "schedule.microbatches=5", "costs.host_model=inline")]
    profile = ["--set", "costs.profile=out/profile.json"]
    plain, timed = command(capfd, "simulate", job, *here), command(capfd, "simulate", job, *here, *profile)
    assert timed["cost_source"] == "measured" and plain["cost_source"] == "modelled"
    assert timed["cost_shares"]["measured"] == pytest.approx(1.0) and timed["cost_shares"]["spread"] > 0
    assert plain["cost_shares"] == {"measured": 0, "interpolated": 0, "extrapolated": 0, "modelled": 1,
                                    "spread": None, "edited": False}  # fmt: skip
    assert all(math.isfinite(x) for x in numbers(timed)) and timed["iteration_s"] > 0
    assert timed["plan_digest"] == plain["plan_digest"] and timed["cost_digest"] != plain["cost_digest"]
    busy = [row["compute"] + row["optimizer"] for row in timed["time_breakdown"].values()]
    profile_s = load_profile(out / "profile.json")
    attn = next(e.time for k, e in profile_s.ops.items() if k.startswith("F/attn"))
    assert attn is not None and min(busy) > 5 * 2 * attn.median_s, "five microbatches of two layers, and more"

    table = json.loads(text)
    key = next(k for k in table["ops"] if k.startswith("F/attn"))
    table["ops"][key]["median_s"] /= 2
    (out / "profile.json").write_text(json.dumps(table))
    error = command(capfd, "simulate", job, *here, *profile, code=2)["error"]
    assert error["key"] == "digest" and "changed after it was measured" in error["message"]
    (out / "profile.json").write_text(json.dumps({**table, "digest": None}))
    assert command(capfd, "simulate", job, *here, *profile)["cost_shares"]["edited"] is True


def test_the_jobs_own_plan_is_never_run(tmp_path: Path) -> None:
    run: list[str] = []

    class Watched:
        check = staticmethod(cli.check)

        @staticmethod
        def run(prepared: PreparedJob, plan: Plan, options: JobRunOptions) -> Any:
            run.append(plan_digest(plan))
            assert options.emulate == 0.0, "and the other one without arithmetic"
            return cli.run(prepared, plan, options)

    _, plan = judged(tmp_path, *SMALL)
    job = load_job(str(tmp_path / "job.toml"), SMALL)
    found = calibrate(job, SMALL, ProfileOptions(processes=2, repeats=1), stopwatch, Watched())
    assert len(run) == 1 and plan_digest(plan) not in run and found.profile.host_s
    found = calibrate(job, SMALL, ProfileOptions(processes=1, repeats=1), stopwatch, Watched())
    assert len(run) == 1 and found.profile.host_s is None and not found.profile.links
    assert found.covers.word == "mixed", "one process has nobody to send to"


def test_other_sizes_are_read_between_those_measured(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = str(job_file(tmp_path))
    more = ["-n", "1", *QUICK, *sets(*SMALL, "model.seq_len=64"), "--seq-len", "16,256", "--out", str(tmp_path)]
    found = command(capfd, "calibrate", job, *more)
    assert found["ops"] == 3 * 17
    words = {}
    for tokens in (64, 32, 512):
        flags = sets(*SMALL, f"model.seq_len={tokens}", "costs.profile=profile.json", "costs.interference=none")
        words[tokens] = command(capfd, "simulate", job, *flags)["cost_shares"]
    assert words[64]["measured"] > 0.9
    assert words[32]["interpolated"] > 0.2 and words[512]["extrapolated"] > 0.2, "all but the update, which is the same"
    assert words[32]["extrapolated"] < 0.01 and words[512]["interpolated"] < 0.01 and words[512]["spread"] > 0


def test_layouts_are_timed_by_their_kernels_on_one_process(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = str(job_file(tmp_path))
    found = command(capfd, "calibrate", job, "-n", "1", *QUICK, *sets(*SMALL), "--tp", "2", "--out", str(tmp_path))
    assert found["by"] == "kernels" and found["ops"] == 2 * 15 and found["host_s"] is None
    flags = sets(*SMALL, "parallel.tp=2", "costs.profile=profile.json")
    shares = command(capfd, "simulate", job, *flags)["cost_shares"]
    assert shares["measured"] > 0.5 and shares["modelled"] > 0, "messages are not timed by one process"
    error = command(capfd, "calibrate", job, "-n", "1", *sets(*SMALL), "--tp", "2", "--by", "modules", code=2)["error"]
    assert error["key"] == "parallel.tp" and "kernels" in error["suggestion"]


@pytest.mark.parametrize(
    ("flags", "kind", "key"),
    [
        (["-n", "3"], "usage", "-n"),
        (["-n", "0"], "usage", "-n"),
        (["--repeats", "0"], "usage", "--repeats"),
        (["--backend", "nccl"], "usage", "--backend"),
        (["--seq-len", "64,no"], "usage", "--seq-len"),
        (["--tp", "3"], "job", "--tp 3"),
        (["--onto", "none.json"], "io", "--onto"),
        (["-n", "2", "--from-nccl-tests", "x.txt"], "usage", "-n"),
        (["--from-nccl-tests", "x.txt"], "io", "--from-nccl-tests"),
        (["--by", "magic"], "usage", "--by"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_any_process(
    flags: list[str], kind: str, key: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if "nccl" in flags and torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    error = command(capfd, "calibrate", str(job_file(tmp_path)), *flags, code=2)["error"]
    assert (error["kind"], error["key"]) == (kind, key) and (error["suggestion"] or error["allowed"])


def test_a_rank_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopwatch, "RANK", "tests.executor.faults:nobody_there")
    job = load_job(str(job_file(tmp_path)), SMALL)
    with pytest.raises(PiperError) as caught:
        calibrate(job, SMALL, ProfileOptions(processes=1, repeats=1), stopwatch, cli)
    assert str(caught.value.kind) == "rank_failed"


def test_work_on_a_gpu_stands_between_events_behind_a_flush_and_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("event")

        def synchronize(self) -> None:
            done.append("wait")

        def elapsed_time(self, end: Event) -> float:
            return 3.0

    class Flush:
        def zero_(self) -> None:
            done.append("flush")

    cuda = calibrate_watch.torch.cuda
    monkeypatch.setattr(cuda, "Event", Event)
    monkeypatch.setattr(cuda, "synchronize", lambda device: done.append("idle"))
    monkeypatch.setattr(cuda, "_sleep", lambda cycles: done.append("hold"))
    watch = calibrate_watch.CudaDeviceTimer.__new__(calibrate_watch.CudaDeviceTimer)
    watch._flush, watch._hold_s, watch._device = Flush(), 0.001, torch.device("cpu")  # type: ignore[assignment]
    assert watch(lambda: done.append("work")) == 0.003
    assert done == ["idle", "flush", "hold", "event", "work", "event", "wait"]


def test_classes_are_those_of_the_framework_that_the_job_names(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job, one = str(job_file(tmp_path)), ["-n", "1", "--repeats", "1", "--out", str(tmp_path), "--force"]
    for software in ("megatron", "llm-foundry"):
        for by in ("modules", "kernels"):
            flags = sets(*SMALL, f"costs.software={software}")
            found = command(capfd, "calibrate", job, *one, *flags, "--by", by)
            assert all("@" in name for name in found["missing"]), "messages alone: one process has nobody to send to"
    profile = calibrate(
        load_job(job, flags[1::2]), flags[1::2], ProfileOptions(processes=2, repeats=1), stopwatch, cli
    ).profile
    assert profile.host_s is not None, "the host's cost is not a framework's"
