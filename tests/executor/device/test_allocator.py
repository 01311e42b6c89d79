"""What a GPU's allocator counts reaches the object of a run, beside what was predicted; counters are made up here."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.device.memory import allocator_peaks
from executor.device.progress import RankProgress, create
from executor.launch import run as launched
from executor.runtime.given import given_name, given_text
from executor.runtime.rank import train_rank
from executor.runtime.spec import PlanRun
from executor.runtime.worker import RankContext
from ir.job.load import load_job
from ir.job.run_options import JobRunOptions
from piper_sim.app.cli import main
from piper_sim.study.predict import predict
from tests.executor.runs import job_file, judged

GPU = torch.device("cuda", 0)


def _stats(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """torch's counters, of which those are asked for that it has; what was called."""
    called: list[str] = []
    at = {"allocated_bytes.all.current": 7, "allocated_bytes.all.peak": 100, "reserved_bytes.all.peak": 300}
    for owner in (torch.cuda, torch.cuda.memory):
        monkeypatch.setattr(owner, "memory_stats", lambda device: called.append("read") or at)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: called.append("forgotten"))
    return called


def test_peaks_are_those_of_torch_s_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    _stats(monkeypatch)
    found = allocator_peaks(GPU)
    assert found == {"allocated": torch.cuda.max_memory_allocated(GPU), "reserved": torch.cuda.max_memory_reserved(GPU)}
    assert found == {"allocated": 100, "reserved": 300} and allocator_peaks(torch.device("cpu")) is None


@pytest.mark.parametrize(("backend", "counted"), [("gloo", True), ("local", False)])
def test_steps_alone_are_counted_of_ranks_with_a_gpu_of_their_own(
    backend: str, counted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = _stats(monkeypatch)
    for name in ("allocator_peaks", "forget_peaks"):  # as if the rank's device were a GPU
        real = getattr(__import__("executor.device.memory", fromlist=[name]), name)
        monkeypatch.setattr(f"executor.runtime.rank.{name}", lambda _, real=real: real(GPU))
    step = "executor.runtime.interpreter.PlanInterpreter.step"
    whole = __import__("executor.runtime.interpreter", fromlist=["_"]).PlanInterpreter.step
    monkeypatch.setattr(step, lambda self, *given: called.append("step") or whole(self, *given))
    prepared, plan = judged(tmp_path, "parallel.pp=1", "parallel.dp=1")
    create(tmp_path / "progress", 1)
    (tmp_path / given_name(0)).write_text(given_text(prepared, plan), encoding="utf-8")
    context = RankContext(0, 1, tmp_path, RankProgress(tmp_path / "progress", 0))
    found = train_rank(context, **PlanRun(JobRunOptions(1, 2, backend=backend)).told())
    assert found["allocator"] == ({"allocated": 100, "reserved": 300} if counted else None)
    read = ["read"] if counted else []
    assert called == ["forgotten", "step", "step", *read, "step"]  # the last follows storages, and is not counted


def test_run_and_validate_compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = str(job_file(tmp_path))
    memory: Any = predict(load_job(job)).to_dict()["memory"]
    said = {kind: memory[f"peak_{kind}_bytes"] for kind in ("allocated", "reserved")}
    real = launched.launch

    def launch(*given: Any, **more: Any) -> list[dict[str, Any]]:
        """Rank 1 is counted twice as much as predicted."""
        results = real(*given, **more)
        for rank, found in enumerate(results):
            found["allocator"] = {kind: (1 + rank) * ranks[str(rank)] for kind, ranks in said.items()}
        return results

    monkeypatch.setattr(launched, "launch", launch)
    assert main(["run", job, "-n", "2", "--emulate", "0.001", "--json"]) == 0
    ran = json.loads(capsys.readouterr().out)
    assert main(["validate", job, "-n", "2", "--steps", "1", "--emulate", "0.001", "--json"]) in (0, 5)
    for found in (ran, json.loads(capsys.readouterr().out)):
        for kind, ranks in said.items():
            errors = {rank: x["error"] for rank, x in found["allocator"][kind].items()}
            assert errors == {"0": 0.0, "1": -0.5}
            assert found["allocator"][kind]["1"]["predicted_bytes"] == ranks["1"]
    monkeypatch.setattr(launched, "launch", real)
    assert main(["run", job, "-n", "2", "--emulate", "0.001", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["allocator"] is None  # a CPU has no such counters
