"""Outputs: whole or not at all, below their folder, never over another file unasked."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ir.core.errors import ErrorKind, PiperError
from piper_sim.report.files import write_outputs
from tests.refusals import refusal


def everything(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def test_files_are_written_below_a_new_folder(tmp_path: Path) -> None:
    paths = write_outputs(tmp_path / "a" / "b", {"t.txt": "é", "sub/x.bin": b"\0"})
    assert [p.read_bytes() for p in paths] == ["é".encode(), b"\0"]
    assert everything(tmp_path) == ["a", "a/b", "a/b/sub", "a/b/sub/x.bin", "a/b/t.txt"]
    assert paths[0].stat().st_mode & 0o777 == 0o644


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("mine")
    with pytest.raises(PiperError, match=r"b\.txt: exists already\nfix: --force") as e:
        write_outputs(tmp_path, {"a.txt": "new", "b.txt": "new"})
    assert (e.value.kind, e.value.kind.exit_code) == (ErrorKind.IO, 2)
    assert everything(tmp_path) == ["b.txt"], "refused before the first byte"
    assert (tmp_path / "b.txt").read_text() == "mine"
    write_outputs(tmp_path, {"a.txt": "new", "b.txt": "new"}, force=True)
    assert (tmp_path / "b.txt").read_text() == "new"


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/tmp/x", "", ".", "a/", "..\\x", "x\0y"])
def test_names_that_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    refusal(write_outputs, out, {"fine": "x", name: "x"}, match="not a file name")
    assert everything(tmp_path) == []


def test_links_are_refused_even_with_force(tmp_path: Path) -> None:
    other, out = tmp_path / "other", tmp_path / "out"
    other.mkdir()
    out.mkdir()
    (other / "f").write_text("theirs")
    (out / "f").symlink_to(other / "f")
    (out / "d").symlink_to(other)
    (out / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "root").symlink_to(out)
    for folder, name in ((out, "f"), (out, "d/x"), (out, "dangling"), (tmp_path / "root", "x")):
        refusal(write_outputs, folder, {name: "x"}, force=True, match="symbolic link")
    assert (other / "f").read_text() == "theirs"
    assert everything(other) == ["f"]


def test_folders_and_files_are_not_confused(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    (tmp_path / "d").mkdir()
    refusal(write_outputs, tmp_path, {"f/x": ""}, force=True, match="is no folder")
    refusal(write_outputs, tmp_path, {"d": ""}, force=True, match="is a folder")
    refusal(write_outputs, tmp_path / "f", {"x": ""}, force=True, match="is no folder")


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("where", ["fsync", "replace", "write"])
def test_a_full_disk_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, existing: bool
) -> None:
    if existing:
        (tmp_path / "second").write_text("old")

    calls = {"n": 0}
    real_fdopen, real = os.fdopen, getattr(os, where, None)

    def full(*args: Any, **kw: Any) -> Any:
        calls["n"] += 1
        if calls["n"] > (2 if where == "fsync" else 1):  # the first file gets through (its folder is synced too)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_fdopen(*args, **kw) if where == "write" else real(*args, **kw)  # type: ignore[misc]

    if where == "write":
        monkeypatch.setattr(os, "fdopen", full)
    else:
        monkeypatch.setattr(os, where, full)
    with pytest.raises(PiperError, match=r"second: cannot be written: No space left on device\nfix: free 1 MB") as e:
        write_outputs(tmp_path, {"first": "one", "second": "two"}, force=True)
    assert e.value.kind is ErrorKind.IO
    monkeypatch.undo()
    assert everything(tmp_path) == (["first", "second"] if existing else ["first"])
    assert (tmp_path / "first").read_text() == "one"
    if existing:
        assert (tmp_path / "second").read_text() == "old"


def test_a_file_made_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def make_it(handle: int) -> None:
        (tmp_path / "x").write_text("theirs")
        real(handle)

    monkeypatch.setattr(os, "fsync", make_it)
    refusal(write_outputs, tmp_path, {"x": "ours"}, match="exists already")
    monkeypatch.undo()
    assert (tmp_path / "x").read_text() == "theirs"
    assert everything(tmp_path) == ["x"]


def test_a_file_system_without_links_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", no_links)
    write_outputs(tmp_path, {"x": "ours"})
    assert everything(tmp_path) == ["x"]


def test_a_folder_one_may_not_write_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("tempfile.mkstemp", denied)
    refusal(write_outputs, tmp_path, {"x": ""}, match="Permission denied")
