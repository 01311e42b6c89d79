"""`piper-sim doctor`: green here, and red for each thing that can be wrong."""

import json
import shutil
import signal
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest

from piper_sim.app.cli import main
from piper_sim.app.doctor import checks, machine, runs
from piper_sim.app.doctor import command as doctor
from tests.refusals import refusal

FP64 = {"fp64": 1e-12}


def test_the_machine_by_itself_is_green() -> None:
    assert {"python", "torch"} <= machine.versions().keys()
    assert machine.files()["free_bytes"] and machine.clock()["resolution_s"]


def _no_package(name: str) -> str:
    raise PackageNotFoundError(name)


def _broken(name: str) -> None:
    raise ImportError(f"libtorch.so: undefined symbol of {name}")


@pytest.mark.parametrize(
    ("ask", "where", "value", "says"),
    [
        (machine.versions, "piper_sim.app.doctor.machine.version", _no_package, "is not installed"),
        (machine.versions, "piper_sim.app.doctor.machine.version", lambda name: "0.9", "torch 0.9 is too old"),
        (machine.versions, "piper_sim.app.doctor.machine.import_module", _broken, "cannot be loaded: libtorch.so"),
        (machine.files, "shutil.disk_usage", lambda folder: SimpleNamespace(free=2**20), "1 MiB free"),
        (machine.clock, "piper_sim.app.doctor.machine.LATE_S", -1.0, "overloaded"),
    ],
)
def test_what_is_wrong_with_a_machine_is_said(
    ask: Callable[[], object], where: str, value: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, value)
    error = refusal(ask)
    assert says in error.message and error.suggestion


def test_one_hardware_queue_is_refused_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert machine.devices()["gpus"] == []  # nothing to queue on
    gpu = SimpleNamespace(name="H100", total_memory=80 * 2**30, multi_processor_count=132)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda k: gpu)
    assert refusal(machine.devices).key == "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    assert machine.devices()["gpus"] == [{"name": "H100", "memory_bytes": 80 * 2**30, "sms": 132}]


@pytest.fixture
def curve(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, str], float]:
    """Runs that train nothing: the same numbers, off by what is asked for (ranks, backend)."""
    wrong = dict[tuple[int, str], float]()

    def made(prepared: Any, backend: str, steps: int = 3, saving: Any = None, at: Any = None) -> list[float]:
        off = wrong.get((prepared.ranks, backend), 0.0) + (0.5 if prepared.job.model.seed else 0.0)
        first = 1 if saving is not None and saving.resume else 0
        return [x * (1 + off) for x in (*range(1 + first, steps + 1), *range(11 + first, steps + 11))]

    monkeypatch.setattr(runs, "curve", made)
    return wrong


def test_comparisons_see_what_differs(curve: dict[tuple[int, str], float], monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs.equality() and runs.processes("gloo") and runs.restart()
    curve[4, "local"] = 1e-11
    assert "dualpipe" in refusal(runs.equality).message and "resumed" in refusal(runs.restart).message
    curve[4, "local"], curve[2, "gloo"] = float("nan"), 1e-11
    assert "nan" in refusal(runs.equality).message and "two threads" in refusal(lambda: runs.processes("gloo")).message
    curve.clear()
    monkeypatch.setattr(runs, "prepared_of", lambda plan, compute, seed=0, real=runs.prepared_of: real(plan, compute))
    assert "sees nothing" in refusal(runs.equality).message


def test_memory_is_what_was_predicted_and_another_figure_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs.memory()["peak_bytes"]
    real = runs.peak_bytes
    monkeypatch.setattr(runs, "peak_bytes", lambda *of: tuple(b + 1 for b in real(*of) or ()))
    assert "as predicted" in (refusal(runs.memory).allowed or "")


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_the_touched_rank_is_named_and_another_is_not_taken_for_it(
    sign: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert runs.failure(sign)["rank"] == runs.TOUCHED
    monkeypatch.setattr(runs, "_touch", lambda sign, rank, *of, real=runs._touch: real(sign, 0, *of))
    assert "rank 0 blamed" in refusal(lambda: runs.failure(sign)).message
    monkeypatch.setattr(runs, "run", lambda *of: None)  # nobody says anything
    monkeypatch.setattr(runs, "_touch", lambda *of: None)
    assert sign.name in refusal(lambda: runs.failure(sign)).message


def test_saved_here_and_resumed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "TOLERANCE", FP64)
    assert isinstance(runs.restart()["off"], float) and runs.equality()


def test_the_first_red_check_ends_the_list(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*checks.questions()][:3]
    monkeypatch.setattr(doctor, "questions", lambda job: asked)
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] and len(found["checks"]) == 3 and found["not_checked"]
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    assert main(["doctor", "--json"]) == 4
    found = json.loads(capsys.readouterr().out)
    assert not found["passed"] and [c["colour"] for c in found["checks"]] == ["green", "red"]
    assert found["checks"][1]["error"]["suggestion"]
    assert main(["doctor"]) == 4 and "not fit" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_a_variable_of_the_launcher_that_is_no_number_is_named(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(key, str(value))
    monkeypatch.setenv(name, "x")
    code, found = main(["doctor", "--json"]), json.loads(capsys.readouterr().out)
    error = found.get("error") or found["checks"][0]["error"]
    assert code in (2, 4) and (error["key"], error["message"]) == (name, "'x' is no number")
