"""Ranks that are killed at any moment, while saving too: a complete checkpoint loads, and little is lost."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from executor.checkpoint.folder import complete, newest
from executor.checkpoint.manifest import check_files, read_manifest, verify
from executor.launch import run as cli
from executor.launch.watch.verdict import RankFailed
from ir.job.run_options import CheckpointOptions
from tests.executor.checkpoint import checkpoint_faults
from tests.executor.checkpoint.checkpoints import hashes, saved
from tests.executor.launch.processes import gone, pids
from tests.executor.launch.test_run_faults import _inject
from tests.executor.runs import run

SETS = ("parallel.dp=2", "parallel.zero=2", "parallel.pp=1", "schedule.microbatches=2", "optimizer.clip_norm=0.3")
EVERY, STEPS = 2, 10


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
class Whole:
    """A run that nobody disturbs. events: of each rank, by kind."""

    folder: Path
    losses: list[float]
    events: list[dict[str, int]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Ten steps, every second one of them kept."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        _inject(patch, checkpoint_faults.killed_at_event, asdict(Kill()) | {"folder": str(folder)})
        found = run(*SETS, steps=STEPS, saving=CheckpointOptions(str(folder / "saved"), EVERY, keep=STEPS)).object
    events = [json.loads((folder / f"events-{rank}").read_text()) for rank in range(2)]
    return Whole(folder / "saved", found["losses"], events)


@dataclass(frozen=True)
class Kill:
    """A rank dies before its `number`-th event of a kind; by default none does."""

    rank: int = -1
    kind: str = "op"
    number: int = 0

    @classmethod
    def drawn(cls, draw: random.Random, events: list[dict[str, int]]) -> Kill:
        """At any op of a whole run, or any write, rename or removal of its saves; a shorter run may end before."""
        rank, kind = draw.randrange(2), draw.choice(["op", "file"])
        return cls(rank, kind, draw.randint(1, events[rank][kind]))


@dataclass
class _Through:
    """Training to the end, again and again, through kills. saving: how many hit a rank that saved."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    events: list[dict[str, int]]
    behind: bool = False  # saves are written while steps go on
    kills: int = 0
    saving: int = 0
    ends: int = 0

    def train(self, most: int, draw: random.Random) -> dict[str, str]:
        """From step 0 to the end; the hashes it ends with."""
        notes = self.folder / f"notes-{self.ends}"
        into = notes / "saved"
        notes.mkdir()
        while (before := _newest(into)) < STEPS:
            out = notes / f"out-{self.kills}"
            kill = Kill.drawn(draw, self.events) if self.kills < most else Kill()
            _inject(self.monkeypatch, checkpoint_faults.killed_at_event, asdict(kill) | {"folder": str(notes)})
            try:
                sets = *SETS, f"run.save_behind={str(self.behind).lower()}"
                run(*sets, steps=STEPS, out=out, saving=_saving(into, resume=before > 0))
            except RankFailed as error:
                assert kill.number and ("SIGKILL" in error.reason or "lost" in error.reason), error
                self.kills += 1
                self.saving += (error.op or "").startswith("save")
            assert all(map(gone, pids(out)))
            kept = _newest(into)
            lost = 2 * EVERY if self.behind else EVERY
            assert before <= kept >= max([0, *_notes(notes, "steps")]) - lost
        self.ends += 1
        return hashes(into / f"step-{STEPS:06d}")


def _saving(into: Path, *, resume: bool) -> CheckpointOptions:
    return CheckpointOptions(str(into), EVERY, resume=str(into) if resume else None)


def _suffer(
    kills: int, folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int, whole: Whole, *, behind: bool = False
) -> _Through:
    want, through = hashes(whole.folder / f"step-{STEPS:06d}"), _Through(folder, monkeypatch, whole.events, behind)
    draw = random.Random(seed)
    while through.kills < kills:
        assert through.train(kills, draw) == want
    return through


def test_random_kills_lose_one_interval_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Whole) -> None:
    through = _suffer(5, tmp_path, monkeypatch, 1, whole)
    assert through.ends >= 1 and through.saving >= 1


@pytest.mark.slow
def test_random_kills_lose_two_where_saves_are_written_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Whole
) -> None:
    assert _suffer(12, tmp_path, monkeypatch, 3, whole, behind=True).ends >= 1


@pytest.mark.slow
def test_fifty_random_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Whole) -> None:
    through = _suffer(50, tmp_path, monkeypatch, 2, whole)
    assert through.kills == 50 and 5 <= through.saving <= 45 and through.ends >= 3


def _killed(fault: object, at: dict[str, object], folder: Path, monkeypatch: pytest.MonkeyPatch, whole: Whole) -> int:
    """A run that dies in its second save is taken up and ends as it would have. Returns the step it went on from."""
    with monkeypatch.context() as patch:
        _inject(patch, fault, at)
        with pytest.raises(RankFailed) as info:
            saved(folder / "saved", *SETS, steps=6, every=EVERY)
    assert info.value.rank == at["rank"] and info.value.op and info.value.op.startswith("save step-0000")
    end = run(*SETS, steps=6, saving=CheckpointOptions(str(folder / "saved"), EVERY, resume=str(folder / "saved")))
    first = int(end.object["first_step"])
    assert end.object["losses"] == whole.losses[first:6]
    assert hashes(folder / "saved" / "step-000006") == hashes(whole.folder / "step-000006")
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
    moment: str, rank: int, loads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Whole
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
    assert _killed(checkpoint_faults.killed_at, at, tmp_path, monkeypatch, whole) == loads


@pytest.mark.parametrize("share", [0.02, pytest.param(0.6, marks=pytest.mark.slow)])
def test_a_kill_in_the_middle_of_a_file(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Whole
) -> None:
    at = {"rank": 1, "share": share}
    assert _killed(checkpoint_faults.killed_within_a_file, at, tmp_path, monkeypatch, whole) == 2


def test_nothing_is_complete_before_all_have_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "RANK", checkpoint_faults.impatient)
    with pytest.raises(RankFailed, match="cannot save step-000001: No such file") as info:
        saved(tmp_path, *SETS, steps=1)
    assert info.value.rank == 0 and not complete(tmp_path)
