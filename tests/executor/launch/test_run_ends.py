"""How a run ends that is told to, or has no room: exit codes, nothing left running, nothing left lying about."""

import errno
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

from executor.launch import launch
from tests.executor.launch.events import until
from tests.executor.launch.processes import COMMAND, pids, started
from tests.executor.launch.test_run_command import command
from tests.executor.runs import job_file

ENDS_WITHIN_S = 30.0


def _ended(pid: int) -> bool:
    """Gone, or nobody has asked after it since."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_told_to_end_leaves_no_process_and_no_file(number: int, code: int, tmp_path: Path) -> None:
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    scratch.mkdir()
    line = ["run", str(job_file(tmp_path)), "-n", "2", "--out", str(out), "--emulate", "0.05", "--steps", "1000"]
    with started(*COMMAND, *line, TMPDIR=str(scratch)) as process:
        until(lambda: (out / "ranks.json").exists() or process.poll() is not None)
        ranks = pids(out)
        assert not any(map(_ended, ranks)) and any(scratch.iterdir())
        process.send_signal(number)
        assert process.wait(ENDS_WITHIN_S) == code
    until(lambda: all(map(_ended, ranks)), limit_s=ENDS_WITHIN_S)
    assert list(scratch.iterdir()) == []
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
