"""How a run ends that is told to, or has no room: exit codes, nothing left running, nothing left lying about."""

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from executor.launch import launch
from tests.executor.launch.test_run_command import ROOT, command
from tests.executor.runs import job_file

ENDS_WITHIN_S = 30.0


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_told_to_end_leaves_no_process_and_no_file(number: int, code: int, tmp_path: Path) -> None:
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    scratch.mkdir()
    line = [sys.executable, "-m", "piper_sim.app.cli", "run", str(job_file(tmp_path)), "-n", "2", "--out", str(out)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(scratch)}
    process = subprocess.Popen([*line, "--emulate", "0.05", "--steps", "1000"], env=env, start_new_session=True)
    while not (out / "ranks.json").exists():
        assert process.poll() is None
        time.sleep(0.02)
    pids = [r["pid"] for r in json.loads((out / "ranks.json").read_text())["ranks"].values()]
    assert all(map(_alive, pids)) and any(scratch.iterdir())
    process.send_signal(number)
    assert process.wait(ENDS_WITHIN_S) == code
    limit = time.monotonic() + ENDS_WITHIN_S
    while any(map(_alive, pids)) and time.monotonic() < limit:
        time.sleep(0.02)
    assert not any(map(_alive, pids)) and list(scratch.iterdir()) == []
    assert [p.name for p in out.iterdir()] == ["ranks.json"]


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("a process was started")


@pytest.mark.parametrize("name", ["run", "validate"])
def test_a_folder_that_cannot_be_written_is_found_before_any_process(
    name: str, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_start", _never)
    for out in ("/proc/self", "/proc/none", str(job_file(tmp_path)), " "):
        error = command(capfd, name, str(job_file(tmp_path)), "-n", "2", "--out", out, code=2)["error"]
        assert error["kind"] in ("io", "usage") and error["suggestion"], error


def _full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_fills_up_meanwhile_does_not_take_the_losses_along(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from piper_sim.app.cli import main

    monkeypatch.setattr("piper_sim.report.files._sync_folder", _full)
    line = ["run", str(job_file(tmp_path)), "-n", "2", "--out", str(tmp_path / "out")]
    assert main(line) == 2
    said = capfd.readouterr()
    assert "step 0: loss 5." in said.out and "No space left on device" in said.err
    error = command(capfd, *line, "--force", code=2)["error"]
    assert error["kind"] == "io" and "free 1 MB" in error["suggestion"]


def test_no_room_for_temporary_files_is_said_of_them(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "create", _full)
    error = command(capfd, "run", str(job_file(tmp_path)), "-n", "2", code=2)["error"]
    assert error["kind"] == "io" and error["file"] == tempfile.gettempdir() and "TMPDIR" in error["suggestion"]
    monkeypatch.undo()
    monkeypatch.setattr(launch, "write_whole", _full)
    out = tmp_path / "out"
    error = command(capfd, "run", str(job_file(tmp_path)), "-n", "2", "--out", str(out), code=2)["error"]
    assert error["kind"] == "io" and error["file"] == str(out / "ranks.json") and list(out.iterdir()) == []
