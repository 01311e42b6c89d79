"""How a run ends that is told to, or has no room: exit codes, nothing left running, nothing left lying about."""

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from executor.device.progress import RankProgress, create
from executor.launch import forkserver, launch, step_log
from executor.launch.forkserver import RankForkServer, RankServer
from executor.launch.watch.verdict import _exit_reason
from executor.runtime import worker
from executor.runtime.target import NO_ROOM, describe
from executor.runtime.worker import RankContext
from ir.core.errors import PiperError
from tests.executor.launch.events import until
from tests.executor.launch.processes import COMMAND, pids, started
from tests.executor.launch.test_run_command import command
from tests.executor.runs import job_file, judged

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


def _removing(ctx: RankContext) -> None:
    shutil.rmtree(ctx.dir)
    threading.Event().wait()


def test_temporary_files_that_somebody_removes_or_that_have_no_place_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PiperError, match="somebody has removed it") as info:
        launch.launch(_removing, 1)
    assert info.value.kind.value == "io" and "piper-run-" in str(info.value.file) and "TMPDIR" in str(info.value)
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", None)
        patch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
        with pytest.raises(PiperError, match="No usable temporary directory") as info, launch.scratch("piper-"):
            pass
    assert info.value.kind.value == "io" and info.value.key == "TMPDIR"


def test_what_is_left_among_temporary_files_does_not_take_the_losses_along(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rmtree = shutil.rmtree

    def busy(path: Any, *args: Any, onerror: Any = None, **more: Any) -> None:  # as NFS says of files that are open
        if onerror is None or not Path(path).name.startswith("piper-"):
            return rmtree(path, *args, onerror=onerror, **more)
        error = OSError(errno.ENOTEMPTY, "Directory not empty", path)
        onerror(os.rmdir, path, (OSError, error, None))

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile._shutil, "rmtree", busy)  # type: ignore[attr-defined]
    found = command(capfd, "run", str(job_file(tmp_path)), "-n", "2")
    assert len(found["losses"]) == 1 and list(tmp_path.glob("piper-run-*"))


@pytest.mark.parametrize(("closed", "where"), [(False, 2), (True, subprocess.DEVNULL)])
def test_the_ranks_server_can_say_something_whatever_its_launcher_had_closed(
    closed: bool, where: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    class Begun:
        def __init__(self, *_: Any, **how: Any) -> None:
            asked.extend((how["stdout"], how["stderr"]))

        def wait(self, timeout: float) -> None:
            pass

        def kill(self) -> None:
            pass

    fstat = os.fstat

    def shut(fd: int) -> os.stat_result:
        if fd == 2:
            raise OSError(errno.EBADF, "Bad file descriptor")
        return fstat(fd)

    monkeypatch.setattr(subprocess, "Popen", Begun)
    if closed:
        monkeypatch.setattr(forkserver.os, "fstat", shut)
    RankForkServer().close()
    assert asked == [where, where]


def test_a_server_that_nobody_has_asked_is_not_waited_for() -> None:
    server, other = RankForkServer(), RankForkServer()
    server.close()
    assert server.process.returncode == -signal.SIGKILL, "it has not come to its imports' end"
    other.send(ask=[])
    other.close()
    assert other.process.returncode == 0


@contextmanager
def _server(lines: bytes) -> Iterator[RankServer]:
    """The ranks' server, in this process, for a launcher that says this and is killed."""
    ours, theirs = socket.socketpair()
    server = RankServer.__new__(RankServer)
    server.children, server.folders, server.lines = {}, set(), forkserver.RankServerLines(theirs)
    server.wake, server._waker = os.pipe()
    os.set_blocking(server._waker, False)
    kept = {number: signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGINT)}
    ours.sendall(lines)
    ours.close()
    try:
        yield server
    finally:
        signal.set_wakeup_fd(-1)
        for number, was in kept.items():
            signal.signal(number, was)
        for fd in (server.wake, server._waker):
            os.close(fd)
        theirs.close()


@pytest.mark.parametrize("wrong", [False, True])
def test_the_ranks_server_removes_folders_only_where_nobody_else_will(wrong: bool, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lines = json.dumps({"owns": str(tmp_path / "run")}) + "\n" + ('{"what": 1}\n' if wrong else "")
    with _server(lines.encode()) as server, pytest.raises(KeyError) if wrong else nullcontext():
        server.serve()
    assert (tmp_path / "run").exists() is wrong


def test_the_steps_folder_of_a_launcher_that_is_killed_is_the_server_s_to_remove(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    owned: list[str] = []

    class Told:
        def send(self, owns: str) -> None:
            owned.append(owns)

    monkeypatch.setattr(step_log.RankForkServer, "get", Told)
    prepared, _ = judged(tmp_path)
    with step_log.told_steps(prepared, 1, []) as folder:
        assert owned == [str(folder)] and folder.is_dir()
    assert not folder.exists()


def _done(_: RankContext) -> int:
    return 7


@pytest.mark.parametrize(("left", "flight"), [(0, False), (1, False), (1, True)])
def test_a_rank_without_room_for_its_result_says_where_or_its_exit_code_does(
    left: int, flight: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(tmp_path / "progress", 1)
    pen, room, writing = RankProgress(tmp_path / "progress", 0), [False, True][: left + 1], worker.write_whole

    def write(path: Path, text: str) -> None:
        if not room or not room.pop(0):
            _full()
        writing(path, text)

    monkeypatch.setattr(worker, "write_whole", write)
    spec = {"world": 1, "target": describe(_done), "args": {}, "flight": flight}
    code = worker._rank(spec, tmp_path, 0, pen, worker.LocalRanks())
    said = (tmp_path / "failure-0").read_text() if left else _exit_reason(code)
    assert code == (1 if left else NO_ROOM) and tempfile.gettempdir() in said and "TMPDIR" in said
    pen.close()
