"""Ranks that raise, die, stop or linger in the middle of a run: who, at which op, who waits; and nobody is left."""

import json
import os
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executor.device.progress import RankRecord, RankState
from executor.launch import launch
from executor.launch import run as cli
from executor.launch.launch import RankFailed
from executor.launch.watch.verdict import stuck
from tests.executor import faults
from tests.executor.launch.events import stepping
from tests.executor.launch.processes import COMMAND, gone, pids, python
from tests.executor.runs import job_file, run


@pytest.mark.parametrize(
    ("fault", "culprit", "reason", "op"),
    [
        (faults.raising, 1, "ValueError: bad luck", r"1[BW]2.*"),
        (faults.killed, 1, "killed by SIGKILL", r"1[BW]2.*"),
        (faults.stopped, 0, "no progress for", r"0[BW]2.*"),
    ],
    ids=["raise", "kill", "stop"],
)
def test_the_culprit_its_op_and_who_waits_are_named(
    fault: Any, culprit: int, reason: str, op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "RANK", fault)
    with pytest.raises(RankFailed, match=reason) as info:
        run(out=tmp_path, watchdog_s=1.5)
    error = info.value
    assert error.kind.exit_code == 4 and error.rank == culprit and error.op and re.fullmatch(op, error.op)
    ((waiter, waits_at),) = error.waiting.items()
    assert waiter == 1 - culprit and waits_at[0] in "01"
    assert len(pids(tmp_path)) == 2 and all(map(gone, pids(tmp_path)))


@pytest.mark.parametrize(("fault", "known"), [(faults.refusing, True), (faults.raising, False)])
def test_where_in_the_code_is_told_of_what_nobody_foresaw(
    fault: Any, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of ours says all of it itself."""
    monkeypatch.setattr(cli, "RANK", fault)
    with pytest.raises(RankFailed) as info:
        run(out=tmp_path)
    assert ("faults.py" in (info.value.details or "")) is not known
    assert ("keep: cannot save: No space left on device\nfix: make room" in info.value.message) is known
    assert "PiperError" not in str(info.value)


def test_a_rank_that_is_done_early_has_not_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rank 0 works on until the watchdog has looked at rank 1, as it believes at its end for an hour."""

    def launched(fn: object, ranks: int, args: dict[str, Any], **options: Any) -> list[Any]:
        return launch.launch(faults.lingering, ranks, {**args, "fault": {"mark": str(tmp_path / "mark")}}, **options)

    def looked(live: list[RankRecord], *times: float) -> tuple[int, float] | None:
        ended = [r for r in live if r.op == "end" and r.state in (RankState.WAIT, RankState.DONE)]
        if [r.rank for r in ended] == [1]:
            (tmp_path / "mark").touch()
        return stuck([replace(r, changed_s=r.changed_s - 3600) if r in ended else r for r in live], *times)

    monkeypatch.setattr(cli, "launch", launched)
    monkeypatch.setattr(launch, "stuck", looked)
    run(steps=1)
    assert (tmp_path / "mark").exists()


def when_stepping(scratch: Path, act: Callable[[], object]) -> threading.Thread:
    """Do something once both ranks, whose temporary files are in `scratch`, are in their second step or later."""

    def wait() -> None:
        stepping(scratch, 2)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.parametrize("sign", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_the_command_reports_a_rank_killed_from_outside(sign: signal.Signals, tmp_path: Path) -> None:
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    scratch.mkdir()
    watch = ["--watchdog", "5", "--json", "--out", str(out)]
    thread = when_stepping(scratch, lambda: os.kill(pids(out)[1], sign))
    line = ["run", str(job_file(tmp_path)), "-n", "2", "--steps", "100000", *watch]
    done = python(*COMMAND, *line, TMPDIR=str(scratch))
    thread.join()
    assert done.returncode == 4
    found = json.loads(done.stdout)  # one object and nothing else
    error = found["error"]
    assert found["schema_version"] == 1 and error["kind"] == "rank_failed" and error["rank"] == 1
    assert re.match(r"\d", error["op"]) and list(error["waiting"]) == ["0"]
    assert sorted(p.name for p in out.iterdir()) == ["flight", "log.jsonl", "metrics.prom", "ranks.json"]
    assert str(out / "flight") in error["suggestion"]
    assert all(map(gone, pids(out)))
    assert list(scratch.iterdir()) == []
