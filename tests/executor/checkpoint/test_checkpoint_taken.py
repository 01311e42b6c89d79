"""A folder of checkpoints that becomes another's while a run starts, or goes on: nothing of either is mixed or lost."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from executor.checkpoint import folder as folder_module
from executor.checkpoint.folder import complete
from executor.checkpoint.manifest import read_manifest
from executor.launch import run as cli
from executor.launch.watch.verdict import RankFailed
from ir.core.errors import PiperError
from ir.job.run_options import CheckpointOptions
from tests.executor.checkpoint.checkpoints import Alone, State, drawn, resumed, saved
from tests.executor.runs import run

SLOTS = "weight", "exp_avg", "exp_avg_sq"


@pytest.mark.parametrize("resume", [False, True])
def test_what_another_run_has_saved_since_it_was_looked_at_stays(
    resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs of one line begin together: one had the folder's lock and has let go of it before the other asks."""
    folder, checked = tmp_path / "folder", cli.verified
    if resume:
        saved(folder, steps=1)

    def late(saving: CheckpointOptions) -> CheckpointOptions:
        monkeypatch.setattr(cli, "verified", checked)
        if resume:
            resumed(folder, steps=2, save=folder)
        else:
            saved(folder, steps=2)
        return saving

    monkeypatch.setattr(cli, "verified", late)
    says = "step-000002 in it is newer than step-000001" if resume else "step-000002 of another run is in it"
    with pytest.raises(RankFailed, match=says) as error:
        run(steps=3, saving=CheckpointOptions(str(folder), 1, resume=str(folder) if resume else None))
    assert error.value.rank == 0 and max(complete(folder)) == 2


@pytest.mark.parametrize("able", [True, False])
def test_at_no_moment_of_replacing_a_checkpoint_is_there_none(
    able: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is killed at a change of names leaves what was there, or what is new; control: where disks cannot."""
    state, folder, seen, rename = State.of(tmp_path, "parallel.pp=1"), tmp_path / "folder", list[int](), os.rename
    state.fill(drawn(state, SLOTS, torch.float64))
    before = read_manifest(state.save(folder, 2))

    def noted(*names: str) -> None:
        rename(*names)
        seen.append(len(complete(folder)))

    monkeypatch.setattr(os, "rename", noted)
    if not able:
        monkeypatch.setattr(folder_module, "_exchanged", lambda *_: False)
    after = read_manifest(state.save(folder, 2, force=True))
    assert after.run != before.run and list(complete(folder)) == [2]
    assert (0 in seen) is not able and {p.name for p in folder.iterdir()} == {"lock", "step-000002"}


@pytest.mark.parametrize("anew", [False, True])
def test_a_run_whose_folder_was_removed_does_not_save_among_another_s(anew: bool, tmp_path: Path) -> None:
    state, folder, transport = State.of(tmp_path, "parallel.pp=1"), tmp_path / "folder", Alone()
    state.fill(drawn(state, SLOTS, torch.float64))
    (old,) = state.keepers(CheckpointOptions(save=str(folder), every=1))
    old.begin(transport)  # type: ignore[arg-type]
    assert not old.after(1, 9, transport)  # type: ignore[arg-type]
    shutil.rmtree(folder)
    folder.mkdir()
    if anew:
        state.save(folder, 3)
    with pytest.raises(PiperError, match="cannot save step-000002: somebody has removed its lock") as error:
        old.after(2, 9, transport)  # type: ignore[arg-type]
    assert "no checkpoint is complete" in str(error.value.suggestion) and "make room" not in str(error.value)
    assert list(complete(folder)) == [3] * anew
    assert not anew or read_manifest(folder / "step-000003").step == 3
