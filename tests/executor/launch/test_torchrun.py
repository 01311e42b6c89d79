"""`torchrun -m executor JOB`: the same numbers as `piper-sim run`, over several agents too; failures are reported."""

import errno
import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed import TCPStore

from executor.launch import torchrun
from executor.launch.store import PIECE, clocks, meeting, put, take
from executor.launch.torchrun import main
from executor.launch.watch import watchdog
from executor.launch.watch.sights import host
from executor.launch.watch.verdict import RankFailed
from executor.transport.base import TransportError
from ir.trace.trace import Trace
from piper_sim.app.doctor.ranks import AllocationRanks
from tests.executor.launch.events import until
from tests.executor.launch.processes import agent, forked, free_port, gone, objects, pids
from tests.executor.launch.test_run_failure import when_stepping
from tests.executor.runs import job_file, run
from tests.refusals import refusal


def test_two_agents_train_as_one_process_would_and_only_rank_0_speaks(tmp_path: Path) -> None:
    want, port, out = run(memory=True), free_port(), tmp_path / "out"
    args = str(job_file(tmp_path)), "--steps", "2", "--out", str(out), "--digest", want.object["plan_digest"]
    agents = [agent(2, 1, port, *args) for _ in range(2)]
    said = [a.communicate(timeout=120) for a in agents]
    assert [a.returncode for a in agents] == [0, 0], said
    (found,) = [o for text, _ in said for o in objects(text)]
    same = ("schema_version", "losses", "grad_norms", "ranks", "plan_digest", "memory")
    assert {k: found[k] for k in same} == {k: want.object[k] for k in same}
    assert found.keys() == want.object.keys()
    assert sorted(p.name for p in out.iterdir()) == ["ranks.json", "run.json", "trace.tsv"]
    assert len(pids(out)) == 2 and all(map(gone, pids(out)))


def test_a_line_that_is_started_again_behind_its_end_leaves_all_as_it_is(tmp_path: Path) -> None:
    saved, out = tmp_path / "saved", tmp_path / "out"
    line = str(job_file(tmp_path)), "--save", str(saved), "--resume", "if-present", "--out", str(out)
    first, _ = agent(1, 2, free_port(), *line).communicate(timeout=120)
    trace, files = (out / "trace.tsv").read_bytes(), {p: p.stat().st_mtime_ns for p in saved.rglob("*")}
    launcher = agent(1, 2, free_port(), *line)
    text, errors = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, errors
    (was,), (found,) = objects(first), objects(text)
    assert found.keys() == was.keys() and (found["first_step"], found["losses"]) == (1, [])
    assert found["saved"] == was["saved"] == str(saved / "step-000001")
    assert (out / "trace.tsv").read_bytes() == trace and found["trace"] is None
    assert {p: p.stat().st_mtime_ns for p in saved.rglob("*")} == files


@pytest.mark.parametrize(
    ("rank", "sign"),
    [
        (1, signal.SIGKILL),
        pytest.param(0, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_a_failure_ends_everybody_and_is_reported_once(rank: int, sign: signal.Signals, tmp_path: Path) -> None:
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    scratch.mkdir()
    args = str(job_file(tmp_path)), "--steps", "100000", "--out", str(out), "--watchdog", "8"
    launcher = agent(1, 2, free_port(), *args, TMPDIR=str(scratch))
    thread = when_stepping(scratch, lambda: os.kill(pids(out)[rank], sign))
    text, errors = launcher.communicate(timeout=120)
    thread.join()
    assert launcher.returncode != 0
    (found,) = objects(text)
    error = found["error"]
    assert (error["kind"], error["rank"]) == ("rank_failed", rank), errors
    assert error["op"][0] in "01" and list(error["waiting"]) == [str(1 - rank)]
    record = (out / "flight" / f"rank-{1 - rank}.txt").read_text()
    assert f"at {error['waiting'][str(1 - rank)]} (op " in record
    assert "Traceback" in record or "Thread 0x" in record
    assert json.loads((out / "flight" / f"rank-{1 - rank}.json").read_text())["entries"]
    assert all(map(gone, pids(out)))


def test_who_dies_before_any_rank_watches_is_named_as_soon_as_the_launcher_ends_the_others(tmp_path: Path) -> None:
    """Torchrun waits for half a minute for those that it has told to end, and then says nothing but its own."""
    line = str(job_file(tmp_path)), "--set", "parallel.pp=1", "--set", "parallel.dp=3", "--set", "parallel.zero=1"
    fault = json.dumps({"kind": "unwatched", "rank": 2})
    began_s = time.monotonic()
    text, errors = agent(1, 3, free_port(), *line, module="tests.clusters.faulty", FAULT=fault).communicate(timeout=120)
    assert [o["error"]["rank"] for o in objects(text)] == [2], errors
    assert "rank 2 failed before its first op" in text and time.monotonic() - began_s < 25


WAYS = {"end(0)": 0, "end(4)": 4, "sys.exit(0)": -signal.SIGABRT}


@cache
def _ended() -> dict[str, tuple[int, str]]:
    begin = "import atexit, os, sys; from executor.launch.torchrun import end; atexit.register(os.abort); print(7); "
    return dict(zip(WAYS, forked("import executor.launch.torchrun", *(begin + way for way in WAYS)), strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_what_libraries_do_at_the_end_of_a_process_does_not_fail_a_run(way: str) -> None:
    code, said = _ended()[way]
    assert code == WAYS[way] and (said == "7\n" or way == "sys.exit(0)")


def test_what_cannot_run_is_refused_before_anybody_meets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*args: str, **env: str) -> tuple[int, dict[str, Any]]:
        for variable, value in env.items():
            monkeypatch.setenv(variable, value)
        code = main([*args])
        (found,) = objects(capsys.readouterr().out)
        return code, found["error"]

    job = str(job_file(tmp_path))
    monkeypatch.setattr(torchrun, "joined", _raises(AssertionError("nobody is to be met")))
    code, error = refused(job)
    assert (code, error["kind"]) == (2, "usage") and "torchrun" in error["suggestion"]
    somewhere = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    code, error = refused(job, **somewhere)
    assert (code, error["key"]) == (2, "WORLD_SIZE") and "--nproc-per-node 2" in error["suggestion"]
    code, error = refused(job, "--digest", "no", WORLD_SIZE="2")
    assert (code, error["kind"], error["key"]) == (3, "illegal_plan", "--digest")


@pytest.mark.parametrize(
    ("name", "text"),
    [("RANK", "x"), ("RANK", "2"), ("WORLD_SIZE", ""), ("LOCAL_RANK", "-1"), ("MASTER_PORT", "http"),
     ("MASTER_PORT", "0"), ("MASTER_PORT", "70000")],
)  # fmt: skip
def test_a_launcher_s_variables_that_are_no_numbers_are_refused_by_name(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "LOCAL_RANK": "0"}
    for variable, value in (told | {name: text}).items():
        monkeypatch.setenv(variable, value)
    assert main([str(job_file(tmp_path))]) == 2
    (found,) = objects(capsys.readouterr().out)
    assert (found["error"]["kind"], found["error"]["key"]) == ("usage", name)


@pytest.mark.parametrize(
    ("rank", "name", "text", "out", "err"),
    [
        ("1", "LOCAL_RANK", "x", 0, "rank 1: LOCAL_RANK: 'x' is no number"),
        ("1", "MASTER_PORT", "", 0, "rank 1: MASTER_PORT: '' is no number"),
        (" 00", "WORLD_SIZE", "3", 1, "3 processes for a job of 2 ranks"),
        ("1", "WORLD_SIZE", "2", 0, "told nothing to run"),  # what is wrong with the job is rank 0's to say
    ],
)
def test_a_rank_that_cannot_even_meet_the_others_says_why(
    rank: str, name: str, text: str, out: int, err: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    told = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "LOCAL_RANK": "0"}
    for variable, value in (told | {name: text, "RANK": rank}).items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(torchrun, "joined", _raises(TimeoutError("nobody")))
    assert main([str(job_file(tmp_path))]) in (2, 4)
    said = capsys.readouterr()
    assert len(objects(said.out)) == out and err in said.err


def test_a_port_that_another_has_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = str(other.getsockname()[1])
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        assert main([str(job_file(tmp_path))]) == 4
        doctor = refusal(AllocationRanks.meet)
    (found,) = objects(capsys.readouterr().out)
    for error in (found["error"], doctor.to_dict()):
        assert (error["kind"], error["key"]) == ("rank_failed", "MASTER_PORT")
        assert f"listens at port {port}" in error["message"] and "another MASTER_PORT" in error["suggestion"]


def test_a_folder_that_cannot_be_written_is_found_before_anybody_meets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torchrun, "joined", None)
    job = str(job_file(tmp_path))
    assert main([job, "--out", job]) == 2
    (found,) = objects(capsys.readouterr().out)
    assert (found["error"]["kind"], found["error"]["file"]) == ("io", job)


def _raises(error: OSError) -> Any:
    def call(*_: Any, **__: Any) -> None:
        raise error

    return call


def test_no_room_for_temporary_files_is_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torchrun, "joined", _raises(OSError(errno.ENOSPC, "No space left on device")))
    assert main([str(job_file(tmp_path))]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: rank 1: ") and "TMPDIR" in err


@pytest.mark.parametrize(
    ("number", "of", "code", "says"),
    [
        (errno.ENOSPC, "write_whole", 2, "--out: cannot be written"),
        (errno.ENOSPC, "stdout", 2, "cannot write to stdout"),
        (errno.EPIPE, "stdout", 0, ""),
    ],
)
def test_what_cannot_be_handed_over_ends_the_run_for_all_and_in_words(
    number: int, of: str, code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    fail = _raises(OSError(number, os.strerror(number)))
    if of == "write_whole":
        monkeypatch.setattr(torchrun, of, fail)
    trace = Trace.of({}, [])
    assert torchrun._handed_over({}, trace, tmp_path, fail if of == "stdout" else torchrun.printed) == code
    out, err = capsys.readouterr()
    assert says in err and (of == "stdout" or objects(out)[0]["error"]["kind"] == "io")


def test_a_report_that_cannot_be_printed_stops_nobody_who_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.print", _raises(OSError(errno.ENOSPC, "No space left on device")))
    torchrun.report(RankFailed("killed by SIGKILL", rank=1, op="1F0", waiting={}))


def test_ranks_that_begin_again_do_not_read_what_those_before_left() -> None:
    store = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))

    def name(rank: int, world: int) -> str:
        return meeting(store.clone(), rank, world, 60.0)

    with ThreadPoolExecutor(3) as ranks:
        (before,) = set(ranks.map(partial(name, world=3), range(3)))
        said = store.get("name/0")
        first = ranks.submit(name, 0, 2)
        until(lambda: store.get("name/0") != said)  # rank 0 has heard the word that an earlier rank 1 left
        assert ranks.submit(name, 1, 2).result() == first.result() != before
        with pytest.raises(TimeoutError, match="not all of 4 ranks are there: no word of rank 3 in 0 s"):
            meeting(store, 0, 4, 0.0)


def test_who_does_not_come_is_the_culprit_and_who_waited_a_witness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "STARTUP_S", 0.1)
    store = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    lookout = watchdog.RankWatchdog(store, 0, 3, tmp_path / "progress", 15.0, torchrun.report)
    store.set("here/1", "[]")
    with pytest.raises(TransportError, match="did not come") as error:
        lookout.meet("digest")
    assert error.value.peers == (2,)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_do_not_meet_end_in_one_object(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torchrun, "joined", _raises(TimeoutError("not all of 2 ranks are there")))
    assert main([str(job_file(tmp_path))]) == 4
    out, err = capsys.readouterr()
    assert (
        "not all of 2 ranks are there" in err and [x["error"]["kind"] for x in objects(out)] == ["rank_failed"][rank:]
    )


def test_results_of_any_length_go_through_the_store() -> None:
    store = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    rows = np.random.default_rng(0).random(120 * 256 * 20).tolist()  # some 12 MB, and random digits hardly shrink
    text = json.dumps(rows)
    put(store, "result/0", text)
    assert len(store.get("result/0/0")) == PIECE and int(store.get("result/0")) > 1
    assert json.loads(take(store, "result/0")) == rows
    put(store, "nothing", "")
    assert take(store, "nothing") == ""
    with pytest.raises(RuntimeError):  # the control: what one value can hold
        store.set("all", text)
        store.get("all")


class _Store(dict[str, Any]):
    """A store in which whoever gets waits."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self[key] = value
            self.changed.notify_all()

    def wait(self, keys: list[str]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: all(k in self for k in keys), 10)

    def get(self, key: str, default: Any = None) -> Any:
        self.wait([key])
        return self[key]


def test_clocks_of_other_machines_are_set_by_question_and_answer() -> None:
    store, hosts, found = _Store(), ["here", "here", "there"], {}
    threads = [threading.Thread(target=lambda r=r: found.update({r: clocks(store, r, hosts)})) for r in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found[0] == found[1] == (0.0, 0.0)
    ahead, uncertain = found[2]
    assert abs(ahead) <= uncertain < 0.5 and uncertain > 0  # it is the same clock after all
    assert len(host()) > 10
