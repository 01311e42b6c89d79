"""What a failed run leaves in `--out`: of each rank its op, stacks even of one that hangs in C, and its operations."""

import faulthandler
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.device.progress import RankProgress, RankState, create
from executor.launch import launch
from executor.launch.launch import RankFailed
from executor.runtime import flight
from executor.runtime.flight import SIGNAL, arm, first_parting, operations, stacks, stacks_file
from executor.runtime.worker import RankContext
from executor.transport.base import TransportTopology
from tests.executor.launch.events import others_wait, until


def in_a_library() -> None:
    """Holds the interpreter's lock for years: no other thread of the process runs."""
    re.match(r"(a+)+$", "a" * 60 + "b")


def failing(ctx: RankContext, kind: str) -> int:
    """Rank 1 fails once the others wait for it."""
    groups = ctx.gloo(TransportTopology(ctx.world, (), (("all", tuple(range(ctx.world))),)))
    groups.all_reduce("all", torch.ones(3)).wait()
    ctx.progress.op(4, "0F0")
    if ctx.rank != 1:
        ctx.progress.wait([1])
        threading.Event().wait(0 if kind == "none" else None)
        return ctx.rank
    others_wait(ctx) if kind != "none" else None
    match kind:
        case "hang":
            in_a_library()
        case "raise":
            raise ValueError("bad luck")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
    return ctx.rank


def failed(kind: str, out: Path | None, watchdog_s: float = 2.0) -> RankFailed:
    with pytest.raises(RankFailed) as info:
        launch.launch(failing, 2, {"kind": kind}, out=out, watchdog_s=watchdog_s)
    return info.value


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("hang", "in in_a_library"),
        ("raise", "ValueError: bad luck"),
        ("kill", "it had ended"),
        ("stop", "it did not answer"),
    ],
)
def test_each_rank_says_what_it_was_doing(kind: str, says: str, tmp_path: Path) -> None:
    error = failed(kind, tmp_path)
    assert error.rank == 1 and error.suggestion and str(tmp_path / "flight") in error.suggestion
    culprit, waiter = ((tmp_path / "flight" / f"rank-{r}.txt").read_text() for r in (1, 0))
    assert says in culprit and re.match(r"rank 1: (run|failed) at 0F0 \(op 4 of its plan\), for \d", culprit)
    assert re.match(r"rank 0: wait at 0F0 .* it waits for rank 1\n", waiter) and "in failing" in waiter
    entries = json.loads((tmp_path / "flight" / "rank-0.json").read_text())["entries"]
    assert ("gloo:all_reduce", "all") in {(e["profiling_name"], e["process_group"][1]) for e in entries}
    assert (tmp_path / "flight" / "rank-1.json").exists() == (kind == "raise")  # the others could not say


def parting(ctx: RankContext) -> None:
    """Rank 2 does another collective than the rest of its group, which both groups wait for."""
    groups = ctx.gloo(TransportTopology.of(3, groups={"dp:0,1,2": (0, 1, 2), "dp:0,1": (0, 1)}))
    ctx.progress.op(4, "0F0")
    for _ in range(3):
        groups.all_reduce("dp:0,1,2", torch.ones(3)).wait()
    if ctx.rank < 2:
        groups.all_reduce("dp:0,1", torch.ones(2)).wait()
        late = groups.all_reduce("dp:0,1,2", torch.ones(3))
    else:
        late = groups.all_gather("dp:0,1,2", torch.ones(9), torch.ones(3))
    ctx.progress.wait([0])
    threading.Event().wait(None if late is not None else 0)


def test_the_error_names_the_first_collective_in_which_ranks_part(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as info:
        launch.launch(parting, 3, out=tmp_path, watchdog_s=2.0)
    said = "; rank 0, 1 was in all_reduce of [[3]] and rank 2 was in all_gather of [[3]], number 4 of group dp:0,1,2"
    assert str(info.value.suggestion).endswith(said)
    told = [sys.executable, "-m", "executor.runtime.flight", str(tmp_path)]
    assert f"; {subprocess.run(told, capture_output=True, text=True, check=True).stdout}" == f"{said}\n"


def _records(seed: int, kept: int) -> dict[int, list[dict[str, Any]]]:
    """What four ranks did, in some groups, all of it: each rank's last entries."""
    draw, counts, done = random.Random(seed), Counter[str](), defaultdict[int, list[dict[str, Any]]](list)
    groups = ["default_pg", "dp:0,1", "dp:2,3", "pp:0,2", "ep:0,1,2,3", "tp:1,2,3"]
    for at in range(60):
        group, what = draw.choice(groups), draw.choice(["all_reduce", "all_gather", "all_to_all"])
        counts[group] += 1
        for rank in range(4) if group == "default_pg" else map(int, group[3:].split(",")):
            entry = {"profiling_name": f"nccl:{what}", "process_group": ["", group], "is_p2p": False}
            sizes = [[rank if what == "all_to_all" else 7]]
            numbers = {"collective_seq_id": counts[group], "record_id": len(done[rank]), "time_created_ns": at}
            done[rank].append({**entry, **numbers, "input_sizes": sizes})
    return {rank: entries[-kept:] for rank, entries in done.items()}


@pytest.mark.parametrize("kept", [9, 1000])
def test_only_what_differs_is_found_wherever_it_is_and_however_much_was_dropped(kept: int) -> None:
    for seed in range(200):
        records, draw = _records(seed, kept), random.Random(seed)
        assert first_parting(records) == ""
        rank = draw.randrange(4)
        at = draw.randrange(len(records[rank]))
        entry = records[rank][at]
        group, number = entry["process_group"][1], entry["collective_seq_id"]
        words = f"number {number} of group {group}"
        others = [e for r, done in records.items() if r != rank for e in done]
        if not any((e["process_group"][1], e["collective_seq_id"]) == (group, number) for e in others):
            continue  # all others have dropped it; seldom
        records[rank][at] = {**entry, "profiling_name": "nccl:other"}
        assert words in first_parting(records) and f"rank {rank} was in other" in first_parting(records)
        records[rank] = records[rank][:at]  # and there it stood still
        if kept > 60 or any(e["process_group"][1] == group for e in records[rank]):  # else who can know?
            found = first_parting(records, suspect=rank)
            assert words in found and str(rank) in found.split(", and rank ")[1]


def test_of_two_partings_the_one_is_named_that_the_failed_rank_has_not_joined() -> None:
    """Rank 1 waits for rank 2, and so has not joined what rank 0 began before."""

    def only(group: str, at: int) -> list[dict[str, Any]]:
        one = {"profiling_name": "gloo:barrier", "process_group": ["", group], "collective_seq_id": 1, "is_p2p": False}
        return [{**one, "record_id": 0, "time_created_ns": at}]

    records = {0: only("dp:0,1", 1), 1: only("ep:1,2", 5), 2: []}
    assert first_parting(records, suspect=2) == "rank 1 was in barrier, number 1 of group ep:1,2, and rank 2 was not"
    assert first_parting(records) == "rank 0 was in barrier, number 1 of group dp:0,1, and rank 1 was not"


def test_without_a_folder_nothing_is_asked_and_a_run_that_ends_well_leaves_nothing(tmp_path: Path) -> None:
    assert failed("raise", None).suggestion is None
    (tmp_path / "flight").mkdir()
    (tmp_path / "flight" / "rank-7.txt").write_text("of a run before")
    assert launch.launch(failing, 2, {"kind": "none"}, out=tmp_path) == [0, 1]
    assert [p.name for p in tmp_path.iterdir()] == ["ranks.json"]


def test_who_has_waited_long_finds_a_record_without_having_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    short = failed("raise", None, flight.LONG_S)
    assert short.suggestion is None and not list(tmp_path.glob("piper-flight-*"))
    error = failed("raise", None, flight.LONG_S + 1)
    (kept,) = tmp_path.glob("piper-flight-*")
    assert error.suggestion and str(kept / "flight") in error.suggestion
    texts = [(kept / "flight" / f"rank-{r}.txt").read_text() for r in range(2)]
    assert "it waits for rank 1" in texts[0] and "bad luck" in texts[1]


def test_a_record_that_cannot_be_written_does_not_hide_the_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(flight, "note", full)
    error = failed("raise", tmp_path)
    assert "bad luck" in str(error) and error.suggestion is None


def test_ranks_of_one_process_share_their_stacks(tmp_path: Path) -> None:
    with pytest.raises(RankFailed):
        launch.launch(together, 2, {}, out=tmp_path, watchdog_s=1.0, together=True)
    for rank in range(2):
        text = (tmp_path / "flight" / f"rank-{rank}.txt").read_text()
        assert text.count(" in together\n") == 2 and ("whose first is 0" in text) == (rank == 1)


def together(ctx: RankContext) -> None:
    """Nobody goes on."""
    ctx.progress.op(0, "0F0")
    threading.Event().wait()


def test_stacks_are_asked_by_signal_and_named_newest_first(tmp_path: Path) -> None:
    assert stacks().index("test_stacks_are_asked") < stacks().index("pytest")
    before = signal.getsignal(SIGNAL)
    arm(tmp_path, 3)
    os.kill(os.getpid(), SIGNAL)
    until(lambda: stacks_file(tmp_path, 3).stat().st_size > 0)
    assert "test_stacks_are_asked_by_signal" in stacks_file(tmp_path, 3).read_text()
    faulthandler.unregister(SIGNAL)
    assert signal.getsignal(SIGNAL) == before
    assert isinstance(json.loads(operations())["entries"], list)


def test_a_rank_writes_its_own_record_where_nobody_stands_above_it(tmp_path: Path) -> None:
    create(tmp_path / "progress", 1)
    pen = RankProgress(tmp_path / "progress", 0)
    pen.op(2, "1B0")
    mine = flight.RankFlight(tmp_path, 5, tmp_path / "progress")
    mine.tell()
    text = (tmp_path / "flight" / "rank-5.txt").read_text()
    assert text.startswith("rank 5: run at 1B0 (op 2 of its plan)") and "test_a_rank_writes" in text
    mine.fell = "Traceback: its own"
    pen.end(RankState.FAILED)
    mine.tell()
    assert "Traceback: its own" in (tmp_path / "flight" / "rank-5.txt").read_text()
    flight.forget(tmp_path, 5)
    assert not list((tmp_path / "flight").iterdir())
    flight.RankFlight(None, 5, tmp_path / "progress").tell()
    pen.close()
