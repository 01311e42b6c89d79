"""What a run writes beside training may fail, or have no number to write; the training goes on to its end."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from piper_sim.app.cli import main
from tests.executor.runs import job_file

ONE = ("-n", "1", "--set", "parallel.pp=1", "--backend", "local", "--json")
WILD = ("--set", "optimizer.name=sgd", "--set", "optimizer.lr=1e18", "--set", "optimizer.clip_norm=0")


def _strict(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_losses_that_are_no_numbers_are_null(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["run", str(job_file(tmp_path)), "--steps", "9", "--out", str(out), *WILD, *ONE]) == 0
    found = _strict(capfd.readouterr().out)
    lines = [_strict(x) for x in (out / "log.jsonl").read_text().splitlines()]
    assert found["losses"][0] > 0 and found["losses"][-1] is None is found["grad_norms"][-1]
    assert [x["loss"] for x in lines] == found["losses"] == _strict((out / "run.json").read_text())["losses"]


@pytest.mark.parametrize("which", ["log.jsonl", "metrics.prom", "tensorboard"])
def test_a_full_disk_under_a_log_is_named_when_all_is_saved(
    which: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flag, out, save = "--tensorboard" if which == "tensorboard" else "--out", tmp_path / "out", tmp_path / "save"

    def full(writer: Any, *_: object) -> None:
        if which == "tensorboard":
            writer._py_recordio_writer.close()
        raise OSError(errno.ENOSPC, "No space left on device")

    where = {
        "log.jsonl": "executor.launch.run.finite",
        "metrics.prom": "piper_sim.report.metrics.prometheus",
        "tensorboard": "tensorboardX.event_file_writer.EventsWriter.flush",
    }[which]
    monkeypatch.setattr(where, full)
    flags = ["--steps", "20", flag, str(out), "--save", str(save)]
    assert main(["run", str(job_file(tmp_path)), *flags, *ONE]) == 2
    error = _strict(capfd.readouterr().out)["error"]
    assert (error["kind"], error["key"], error["message"]) == ("io", flag, "cannot be written: No space left on device")
    assert error["file"] == str(out if which == "tensorboard" else out / which) and error["suggestion"]
    assert (save / "step-000020" / "manifest.json").exists()


def test_a_refused_checkpoint_leaves_the_log_of_the_run_before(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, save, job = tmp_path / "out", tmp_path / "save", str(job_file(tmp_path))
    assert main(["run", job, "--steps", "2", "--out", str(out), "--save", str(save), *ONE]) == 0
    log = (out / "log.jsonl").read_text()
    file = next((save / "step-000002").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\x00")
    assert main(["run", job, "--steps", "3", "--out", str(out), "--resume", str(save), "--force", *ONE]) == 2
    assert "damaged" in capfd.readouterr().out and (out / "log.jsonl").read_text() == log
