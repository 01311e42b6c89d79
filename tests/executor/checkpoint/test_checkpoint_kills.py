"""Ranks that are killed at any moment, while saving too: a complete checkpoint loads, and little is lost."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from executor.checkpoint.folder import complete, newest
from executor.checkpoint.manifest import check_files, read_manifest
from executor.checkpoint.saving import Saving
from executor.checkpoint.settings import verify
from executor.launch import run as cli
from executor.launch.verdict import RankFailed
from tests.executor.checkpoint import checkpoint_faults
from tests.executor.checkpoint.checkpoints import hashes, saved
from tests.executor.launch.test_run_failure import gone, pids
from tests.executor.launch.test_run_faults import _inject
from tests.executor.runs import run

SETS = ("parallel.dp=2", "parallel.zero=2", "parallel.pp=1", "schedule.microbatches=2", "optimizer.clip_norm=0.3")
EVERY = 2


def _newest(folder: Path) -> int:
    """The step of the newest checkpoint, which is whole; 0 where there is none yet."""
    found = complete(folder)
    if not found:
        return 0
    last = newest(folder)
    manifest = read_manifest(last)
    check_files(last, manifest)
    verify(last, manifest, manifest.files)
    assert manifest.step == max(found) and len(found) <= 3  # an old one may not have gone yet
    return manifest.step


def _notes(folder: Path, name: str) -> list[int]:
    file = folder / name
    return [int(x) for x in file.read_text().split()] if file.exists() else []


@dataclass(frozen=True)
class Kill:
    """When a rank is killed: so many seconds after the start, or after another so many saves have begun."""

    rank: int
    after_s: float
    saves: int = 0

    @classmethod
    def drawn(cls, draw: random.Random) -> Kill:
        """At any time of the run, or of a save."""
        if draw.random() < 0.5:
            return cls(draw.randrange(2), draw.uniform(0.0, 1.5))
        return cls(draw.randrange(2), draw.uniform(0.0, 0.06), draw.randint(1, 3))


@contextmanager
def _killer(out: Path, notes: Path, kill: Kill | None) -> Iterator[None]:
    """Kill a rank of the run that goes on meanwhile."""

    def act(kill: Kill) -> None:
        while not over.is_set() and (not (out / "ranks.json").exists() or len(_notes(notes, "saves")) < until):
            time.sleep(0.001)
        if not over.wait(kill.after_s):
            os.kill(pids(out)[kill.rank], signal.SIGKILL)

    over, until = threading.Event(), len(_notes(notes, "saves")) + (kill.saves if kill else 0)
    thread = threading.Thread(target=act, args=(kill,)) if kill else None
    if thread:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if thread:
            thread.join()


@dataclass
class _Through:
    """Training to the end, again and again, through kills. saving: how many hit a rank that saved."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    steps: int
    kills: int = 0
    saving: int = 0
    ends: int = 0

    def train(self, most: int, draw: random.Random) -> dict[str, str]:
        """From step 0 to the end; the hashes it ends with."""
        notes = self.folder / f"notes-{self.ends}"
        into = notes / "saved"
        notes.mkdir()
        _inject(self.monkeypatch, checkpoint_faults.counted, {"folder": str(notes)})
        while (before := _newest(into)) < self.steps:
            out = notes / f"out-{self.kills}"
            kill = Kill.drawn(draw) if self.kills < most else None
            try:
                with _killer(out, notes, kill):
                    run(*SETS, steps=self.steps, out=out, saving=_saving(into, resume=before > 0))
            except RankFailed as error:
                assert kill and ("SIGKILL" in error.reason or "lost" in error.reason), error
                self.kills += 1
                self.saving += (error.op or "").startswith("save")
            assert all(map(gone, pids(out)))
            kept = _newest(into)
            assert before <= kept >= max([0, *_notes(notes, "steps")]) - EVERY
        self.ends += 1
        return hashes(into / f"step-{self.steps:06d}")


def _saving(into: Path, *, resume: bool) -> Saving:
    return Saving(str(into), EVERY, resume=str(into) if resume else None)


def _suffer(kills: int, folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> _Through:
    saved(folder / "whole", *SETS, steps=10)
    want, through, draw = (
        hashes(folder / "whole" / "step-000010"),
        _Through(folder, monkeypatch, 10),
        random.Random(seed),
    )
    while through.kills < kills:
        assert through.train(kills, draw) == want
    return through


def test_random_kills_lose_one_interval_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _suffer(5, tmp_path, monkeypatch, 1).ends >= 1


@pytest.mark.slow
def test_fifty_random_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    through = _suffer(50, tmp_path, monkeypatch, 2)
    assert through.kills == 50 and 5 <= through.saving <= 45 and through.ends >= 3


def _killed(fault: object, at: dict[str, object], folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """A run that dies in its second save is taken up and ends as it would have. Returns the step it went on from."""
    want = saved(folder / "whole", *SETS, steps=6, every=EVERY)
    with monkeypatch.context() as patch:
        _inject(patch, fault, at)
        with pytest.raises(RankFailed) as info:
            saved(folder / "saved", *SETS, steps=6, every=EVERY)
    assert info.value.rank == at["rank"] and info.value.op and info.value.op.startswith("save step-0000")
    end = run(*SETS, steps=6, saving=Saving(str(folder / "saved"), EVERY, resume=str(folder / "saved")))
    first = int(end.object["first_step"])
    assert end.object["losses"] == want.object["losses"][first:]
    assert hashes(folder / "saved" / "step-000006") == hashes(folder / "whole" / "step-000006")
    names = {p.name for p in (folder / "saved").iterdir()}
    assert names == {"lock", "step-000004", "step-000006"}  # nothing half written is left
    return first


MOMENTS = [
    ("before any file", 1, 2),
    ("behind its file", 0, 2),
    ("before the manifest", 0, 2),
    ("before the rename", 0, 2),
    ("behind the rename", 0, 4),
    ("while old ones go", 0, 6),
]


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "rank", "loads"), MOMENTS)
def test_a_kill_at_any_moment_of_saving(
    moment: str, rank: int, loads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if moment == "while old ones go":
        at = {"moment": moment, "rank": rank, "visit": 1}
        with monkeypatch.context() as patch:
            _inject(patch, checkpoint_faults.killed_at, at)
            with pytest.raises(RankFailed):
                saved(tmp_path / "saved", *SETS, steps=8, every=EVERY)
        assert _newest(tmp_path / "saved") == loads
        return
    at = {"moment": moment, "rank": rank, "visit": 2}
    assert _killed(checkpoint_faults.killed_at, at, tmp_path, monkeypatch) == loads


@pytest.mark.parametrize("share", [0.02, pytest.param(0.6, marks=pytest.mark.slow)])
def test_a_kill_in_the_middle_of_a_file(share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "size", *SETS, steps=1)
    size = (tmp_path / "size" / "step-000001" / "rank-00001.safetensors").stat().st_size
    at = {"rank": 1, "bytes": int(size * (1 + share))}
    assert _killed(checkpoint_faults.killed_within_a_file, at, tmp_path, monkeypatch) == 2


def test_nothing_is_complete_before_all_have_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "RANK", checkpoint_faults.impatient)
    with pytest.raises(RankFailed, match="cannot save step-000001: No such file") as info:
        saved(tmp_path, *SETS, steps=1)
    assert info.value.rank == 0 and not complete(tmp_path)
