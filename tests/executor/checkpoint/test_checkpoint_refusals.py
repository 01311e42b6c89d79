"""What is no checkpoint of this training, or not a whole one, or a folder that is taken: refused, with what to do."""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from executor.checkpoint import __main__ as lister
from executor.checkpoint import folder as lock_module
from executor.checkpoint.folder import CheckpointLock, complete, prune, said
from executor.checkpoint.manifest import CheckpointManifest, read_manifest, verify
from executor.checkpoint.settings import settled
from executor.checkpoint.tensors import saving_to
from executor.launch import run as cli
from executor.launch.watch.verdict import RankFailed
from ir.core.errors import PiperError
from ir.job.run_options import CheckpointOptions
from tests.executor.checkpoint import checkpoint_faults
from tests.executor.checkpoint.checkpoints import hashes, resumed, saved
from tests.executor.launch.test_run_command import command
from tests.executor.launch.test_run_faults import _inject
from tests.executor.runs import job_file, judged, run

STEPS = 4


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("above") / "saved"
    saved(folder, steps=STEPS, every=2)
    return folder


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    """One to be damaged."""
    return Path(shutil.copytree(original, tmp_path / "copy"))


Refused = Callable[..., dict[str, Any]]


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Refused:
    """`piper-sim run` with these flags, refused before any rank starts; its error."""

    def go(*flags: str, steps: int = 6) -> dict[str, Any]:
        line = ["run", str(job_file(tmp_path)), "-n", "2", "--steps", str(steps), *flags]
        error: dict[str, Any] = command(capfd, *line, code=2)["error"]
        assert error["suggestion"]
        return error

    return go


# -- flags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "key", "words"),
    [
        (["--save", "{}", "--every", "0"], "--every", "0 steps between two checkpoints"),
        (["--save", "{}", "--keep", "0"], "--keep", "0 checkpoints"),
        (["--every", "2"], "--every", "nothing is saved"),
        (["--keep", "2"], "--keep", "nothing is saved"),
        (["--save", "{}", "--emulate", "0.01"], "--save", "compute nothing"),
        (["--resume", "{}", "--emulate", "0.01"], "--resume", "compute nothing"),
        (["--resume", "{}/none"], "--resume", "there is no such folder"),
        (["--resume", "{}"], "--resume", "there are half"),
        (["--resume", "{}/half"], "--resume", "step-000002.tmp-abc was never finished"),
        (["--resume", "{}/half/file"], "--resume", "it is a file"),
        (["--save", "{}/half/file"], "--save", "it is a file"),
    ],
)
def test_flags_that_cannot_be_meant(
    flags: list[str], key: str, words: str, refused: Refused, tmp_path_factory: pytest.TempPathFactory
) -> None:
    there = tmp_path_factory.mktemp("there")
    (there / "half" / "step-000002.tmp-abc").mkdir(parents=True)
    (there / "half" / "file").touch()
    error = refused(*(f.format(there) for f in flags))
    assert error["key"] == key and words in error["message"]
    assert not (there / "lock").exists()


def test_the_folder_above_is_told_where_to_look(original: Path, refused: Refused) -> None:
    assert refused("--resume", str(original.parent))["suggestion"].endswith(str(original))


def test_steps_are_counted_from_the_first(original: Path, refused: Refused) -> None:
    error = refused("--resume", str(original), steps=4)
    assert (error["key"], error["suggestion"]) == ("--steps", "--steps 5") and "step-000004 has done 4" in error[
        "message"
    ]


# -- another training -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["model.num_hidden_layers=6"], "layers.4.input_layernorm.weight is 64 here, missing there"),
        (["model.num_hidden_layers=2"], "layers.2.input_layernorm.weight is missing here, 64 there"),
        (["model.vocab_size=128"], "embed_tokens.weight is 128 x 64 here, 256 x 64 there"),
        (["model.tie_word_embeddings=true"], "lm_head.weight is missing here, 256 x 64 there"),
        (["model.rope_theta=500"], "rope_theta is 500.0 here, 10000.0 there"),
        (["model.seq_len=16"], "16 tokens in a sequence here, 8 there"),
        (["schedule.microbatches=8"], "8 sequences in the global batch here, 4 there"),
        (["parallel.dp=3"], "12 sequences in the global batch here, 4 there"),
        (["parallel.dp=2"], "8 sequences in the global batch here, 4 there"),
        (["data.seed=3"], "data drawn by seed 3 here, 0 there"),
        (["data.source=job.toml"], "tokens here, synthetic there"),
        (["optimizer.name=sgd"], "sgd here, adamw there"),
        (["precision.compute=fp32"], "updated in fp32 here, in fp64 there"),
        (["precision.compute=fp32", "precision.params=fp32", "precision.optimizer=fp32"], "in fp64 there"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else None,
)
def test_another_training_is_refused_and_the_fix_fixes_it(
    sets: list[str], words: str, original: Path, tmp_path: Path
) -> None:
    saving = CheckpointOptions(resume=str(original))
    prepared, _ = judged(tmp_path, *sets)
    with pytest.raises(PiperError) as info:
        settled(saving, prepared, 9, real=True)
    error = info.value
    assert words in error.message and error.kind.exit_code == 2 and error.allowed
    if "=" not in (error.suggestion or ""):  # keys that were not set, and cannot be unset by a flag
        assert "manifest.json" in (error.suggestion or "") and sets[0].startswith("model.")
        return
    fixes = (error.suggestion or "").replace("--set ", "").split()
    prepared, _ = judged(tmp_path, *sets, *fixes)
    assert settled(saving, prepared, 9, real=True).first == STEPS


def test_what_is_not_the_training_may_be_another(original: Path, tmp_path: Path) -> None:
    free = (
        "optimizer.lr=0.5", "optimizer.clip_norm=0", "parallel.dp=2", "schedule.microbatches=2", "model.seed=9",
        "parallel.zero=3", "schedule.name=zbv", "precision.params=bf16", "model.attention=unfused",
    )  # fmt: skip
    prepared, _ = judged(tmp_path, *free)
    assert settled(CheckpointOptions(resume=str(original)), prepared, 9, real=True).first == STEPS


# -- damage -----------------------------------------------------------------------------------------------------------


def _flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def _cut(file: Path, by: int) -> None:
    file.write_bytes(file.read_bytes()[:-by])


DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a flipped bit": ("rank-00001.safetensors", lambda f: _flip(f, 50_000), "damaged: its SHA-256"),
    "a shorter file": ("rank-00000.safetensors", lambda f: _cut(f, 8), "bytes,"),
    "a missing file": ("rank-00001.safetensors", lambda f: f.unlink(), "the checkpoint lacks it"),
    "half a manifest": ("manifest.json", lambda f: _cut(f, 2000), "not a manifest, or not all of one"),
    "another step": (
        "manifest.json",
        lambda f: f.write_text(f.read_text().replace('"step": 4', '"step": 3')),
        "somebody has changed it",
    ),
    "a later version": (
        "manifest.json",
        lambda f: f.write_text(f.read_text().replace('"schema_version": 1', '"schema_version": 2')),
        "a checkpoint of version 2",
    ),
    "another manifest": ("manifest.json", lambda f: f.write_text("[]"), "not a manifest"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused_by_the_name_of_its_file(
    name: str, copy: Path, refused: Refused, capfd: pytest.CaptureFixture[str]
) -> None:
    file, harm, words = DAMAGE[name]
    harm(copy / "step-000004" / file)
    error = refused("--resume", str(copy))
    assert words in error["message"] and error["file"] == str(copy / "step-000004" / file)
    assert error["kind"] == "io" and error["suggestion"] == f"--resume {copy / 'step-000002'}"
    assert lister.main([str(copy)]) == 2 and file in capfd.readouterr().err
    assert lister.main([str(copy / "step-000002")]) == 0
    assert json.loads(capfd.readouterr().out)["sha256"] == hashes(copy / "step-000002")


@pytest.mark.parametrize("name", ["a flipped bit", "a missing file", "half a manifest"])
def test_the_older_one_is_gone_on_from_where_the_damaged_one_lies(name: str, copy: Path, refused: Refused) -> None:
    """What a run that saves to that folder, too, is told to do is not refused again."""
    file, harm, _ = DAMAGE[name]
    harm(copy / "step-000004" / file)
    fix = f"--resume {copy / 'step-000002'}"
    assert refused("--save", str(copy), "--resume", str(copy))["suggestion"] == f"{fix} --force"
    assert refused("--save", str(copy), "--resume", "if-present")["suggestion"] == f"{fix} --force"
    assert refused("--save", str(copy.parent / "other"), "--resume", str(copy))["suggestion"] == fix
    run(steps=4, saving=CheckpointOptions(str(copy), resume=str(copy / "step-000002"), force=True))
    assert lister.main([str(copy / "step-000004")]) == 0


def test_a_newer_one_is_gone_on_from_without_force(copy: Path) -> None:
    _flip(copy / "step-000002" / "rank-00001.safetensors", 50_000)
    with pytest.raises(PiperError) as info, saving_to(str(copy)):
        verify(copy / "step-000002", read_manifest(copy / "step-000002"), ["rank-00001.safetensors"])
    assert info.value.suggestion == f"--resume {copy / 'step-000004'}"


def _forge(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A manifest changed by somebody who can count: its own SHA-256 is right."""
    file = checkpoint / "manifest.json"
    table = json.loads(file.read_text())
    change(table)
    with suppress(msgspec.ValidationError):  # what has the wrong type has no digest
        table["sha256"] = msgspec.json.decode(json.dumps(table), type=CheckpointManifest).own_digest
    file.write_text(json.dumps(table))
    return file


NAME = "model.layers.0.mlp.up_proj.weight"


def _renamed(table: dict[str, Any], name: str) -> None:
    table["files"][name] = table["files"].pop("rank-00000.safetensors")
    text = json.dumps(table["parameters"]).replace('"rank-00000.safetensors"', json.dumps(name))
    table["parameters"] = json.loads(text)


FORGED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "nothing": (lambda t: None, ""),
    "a file above": (lambda t: _renamed(t, "../../x.safetensors"), "no name of a file in a checkpoint"),
    "a file elsewhere": (lambda t: _renamed(t, "/tmp/rank-00000.safetensors"), "no name of a file in a checkpoint"),
    "a file below": (lambda t: _renamed(t, "rank-00000.safetensors/x"), "no name of a file in a checkpoint"),
    "no such file": (lambda t: t["files"].pop("rank-00000.safetensors"), "no such piece of"),
    "a piece of another shape": (lambda t: t["training"]["shapes"][NAME].append(1), f"no such piece of {NAME}"),
    "a shape of floats": (lambda t: t["training"]["shapes"].update({NAME: [2.0, 2]}), "Expected `int`, got `float`"),
    "a shape below 0": (lambda t: t["training"]["shapes"].update({NAME: [-2, -2]}), "Expected `int` >= 0"),
    "a step below 0": (lambda t: t.update(step=-1), "Expected `int` >= 0"),
    "a piece too long": (lambda t: _piece(t).update(count=_piece(t)["count"] + 1), f"no such piece of {NAME}"),
    "a piece too early": (lambda t: _piece(t).update(first=-1), f"no such piece of {NAME}"),
    "a cut along no dim": (lambda t: _cut_along(t, 2, 0, 1), f"no such piece of {NAME}"),
    "a cut of no parts": (lambda t: _cut_along(t, 0, 0, 0), f"no such piece of {NAME}"),
    "a part that is none": (lambda t: _cut_along(t, 0, 1, 1), f"no such piece of {NAME}"),
    "a piece less": (lambda t: t["parameters"].update({NAME: []}), f"elements of {NAME} were written"),
    "more than its files hold": (
        lambda t: t["training"]["shapes"].update(x=[2**40]),
        "are more than what its files have",
    ),
    "a format of none": (lambda t: t["training"].update(format="fp3"), "Invalid enum value 'fp3'"),
    "a format of no update": (lambda t: t["training"].update(format="fp8"), "fp8 is no format of updates"),
    "a key less": (lambda t: t.pop("parameters"), "missing required field `parameters`"),
    "no version": (lambda t: t.pop("schema_version"), "not a manifest"),
}


def _piece(table: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = table["parameters"][NAME][0]["piece"]
    return found


def _cut_along(table: dict[str, Any], dim: int, index: int, count: int) -> None:
    share = _piece(table)["share"]
    share["cuts"] = [{"dim": dim, "index": index, "count": count, "blocks": share["shape"][:1]}]


@pytest.mark.parametrize("name", FORGED)
def test_a_manifest_that_cannot_be_so_is_refused(name: str, copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    change, words = FORGED[name]
    file = _forge(copy / "step-000004", change)
    if not words:
        assert lister.main([str(copy)]) == 0
        return
    with pytest.raises(PiperError) as info:
        read_manifest(copy / "step-000004")
    assert words in info.value.message and info.value.file == str(file)
    assert info.value.suggestion == f"--resume {copy / 'step-000002'}"
    assert lister.main([str(copy)]) == 2 and words in capfd.readouterr().err


@pytest.mark.parametrize("text", ["[" * 100_000, '{"schema_version": 1, "job": ' + '{"a":' * 100_000, "", "\0", "{}"])
def test_what_is_no_manifest_is_refused(text: str, copy: Path) -> None:
    (copy / "step-000004" / "manifest.json").write_text(text)
    with pytest.raises(PiperError, match="not a manifest, or not all of one"):
        read_manifest(copy / "step-000004")


def test_what_was_never_finished_is_passed_over(copy: Path) -> None:
    shutil.copytree(copy / "step-000004", copy / "step-000006.tmp-abc")
    shutil.copytree(copy / "step-000004", copy / "step-000008")
    (copy / "step-000008" / "manifest.json").unlink()
    end = resumed(copy, steps=5, save=copy)
    assert end.object["first_step"] == 4 and list(complete(copy)) == [4, 5]
    assert not list(copy.glob("*.tmp-*"))


def test_what_was_never_finished_is_not_taken_up_by_its_name_and_removed(copy: Path, refused: Refused) -> None:
    (copy / "step-000004").rename(part := copy / "step-000004.tmp-abc")
    error = refused("--resume", str(part), "--save", str(copy))
    assert error["key"] == "--resume" and error["suggestion"].endswith("step-000002") and part.exists()
    shutil.rmtree(copy / "step-000002")
    assert "mv step-000004.tmp-abc step-000004" in refused("--resume", str(part), "--save", str(copy))["suggestion"]


# -- folders that are taken -------------------------------------------------------------------------------------------


def test_two_runs_do_not_save_to_one_folder(tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "PATIENCE_S", 0.2)
    lock = CheckpointLock(tmp_path / "folder")
    lock.say("one", "two")
    error = refused("--save", str(tmp_path / "folder"))
    assert error["kind"] == "io" and "another run saves to it (process " in error["message"]
    lock.free()
    saved(tmp_path / "folder", steps=1)


def test_a_folder_of_something_else_needs_force(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    error = refused("--save", str(tmp_path / "home"))
    assert "thesis.tex is in it" in error["message"] and "--force" in error["suggestion"]
    run(steps=1, saving=CheckpointOptions(str(tmp_path / "home"), force=True))
    assert {p.name for p in (tmp_path / "home").iterdir()} == {"thesis.tex", "lock", "step-000001"}


def test_checkpoints_of_another_run_go_only_by_force_and_not_too_early(
    copy: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = refused("--save", str(copy))
    assert "step-000004 of another run is in it" in error["message"] and f"--resume {copy}" in error["suggestion"]
    older = refused("--save", str(copy), "--resume", str(copy / "step-000002"))
    assert "step-000004 in it is newer than step-000002" in older["message"]
    with monkeypatch.context() as patch:
        _inject(patch, checkpoint_faults.killed_at, {"moment": "before the rename", "rank": 0, "visit": 1})
        with pytest.raises(RankFailed):
            run(steps=3, saving=CheckpointOptions(str(copy), 1, force=True))
    assert list(complete(copy)) == [2, 4]
    run(steps=3, saving=CheckpointOptions(str(copy), 3, force=True))
    assert list(complete(copy)) == [3]


def test_the_last_few_are_kept(tmp_path: Path) -> None:
    run(steps=5, saving=CheckpointOptions(str(tmp_path), 1, keep=3))
    assert list(complete(tmp_path)) == [3, 4, 5]
    run(steps=6, saving=CheckpointOptions(str(tmp_path), resume=str(tmp_path)))
    assert list(complete(tmp_path)) == [5, 6]
    first, last = (read_manifest(tmp_path / f"step-00000{n}") for n in (5, 6))
    assert first.run == last.run and last.job["schedule"]["name"] == "1f1b" and last.job_digest == first.job_digest


def test_old_ones_go_with_a_sign_of_life_for_every_file(copy: Path) -> None:
    run_name, seen = read_manifest(copy / "step-000004").run, []
    (copy / "step-000002" / "nested").mkdir()
    prune(copy, run_name, 4, 1, force=False, tick=lambda: seen.append(len(list(copy.glob("*/rank-*")))))
    assert len(seen) == 3 and seen == sorted(seen, reverse=True) and seen[0] > seen[-1] == 2
    assert {p.name for p in copy.iterdir()} == {"lock", "step-000004"}


def test_the_lock_says_who_has_it_down_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def noted(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    lock = CheckpointLock(tmp_path / "folder")
    lock.say("one", "two")
    assert synced == [str(tmp_path / "folder" / "lock"), str(tmp_path / "folder")]
    assert (said(tmp_path / "folder").run, said(tmp_path / "folder").name) == ("one", "two")
    lock.free()
    for words in ("", "[]", '{"run": ["one"], "name": "two", "pid": 1, "host": ""}'):
        (tmp_path / "folder" / "lock").write_text(words)
        with pytest.raises(PiperError, match="rank 0's lock is not seen by this rank"):
            said(tmp_path / "folder")


def test_a_full_disk_ends_the_run_and_leaves_what_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        _inject(patch, checkpoint_faults.short_of_room, {"rank": 1, "bytes": 300_000})
        with pytest.raises(RankFailed, match="cannot save step-000004: File too large") as info:
            saved(tmp_path / "folder", steps=6, every=2)
    assert (info.value.rank, info.value.op, info.value.kind.exit_code) == (1, "save step-000004", 4)
    assert info.value.waiting == {0: "save step-000004"}
    assert not list((tmp_path / "folder").glob("step-000004*/rank-00001.safetensors"))  # there is room again
    assert resumed(tmp_path / "folder", steps=6, save=tmp_path / "folder").object["first_step"] == 2


def test_a_file_damaged_behind_the_check_is_still_no_parameter(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "verified", lambda saving: saving)  # as under torchrun, where ranks read the files
    _flip(copy / "step-000004" / "rank-00000.safetensors", 60_000)
    with pytest.raises(RankFailed, match=r"rank-00000\.safetensors: .*damaged") as info:
        resumed(copy, steps=6)
    assert info.value.op == "load step-000004"
