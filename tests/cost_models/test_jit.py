"""Where compiled kernels are kept: nowhere, for a user who has no home, or is shut out of it, as in containers."""

import os
from pathlib import Path
from typing import Any

import pytest

from cost_models import jit


@pytest.mark.parametrize("home", ["none", "shut", "his own"])
def test_a_user_without_a_home_compiles_in_every_process(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("numba")
    package = tmp_path / "package"
    (package / "__pycache__").mkdir(parents=True)
    real: Any = os.stat
    made = Path.mkdir

    def shut(path: Any) -> bool:
        inside = [package / "__pycache__", *([tmp_path / "home"] if home == "shut" else [])]
        return any(str(path).startswith(str(folder)) for folder in inside)

    def stat(path: Any, *args: Any, **more: Any) -> Any:
        if shut(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **more)

    def mkdir(path: Path, *args: Any, **more: Any) -> None:
        if shut(path):
            raise PermissionError(13, "Permission denied", str(path))
        made(path, *args, **more)

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    if home == "none":
        monkeypatch.setattr(os, "getuid", lambda: 987_654)  # whom no table of users knows
    else:
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "file").touch()
    monkeypatch.setattr(jit.numba.config, "CACHE_DIR", str(tmp_path / "file"))  # no folder, so ours are looked at
    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(Path, "mkdir", mkdir)
    folder = jit._folder.__wrapped__(package)
    monkeypatch.undo()
    assert (folder is None) == (home != "his own") == ("each time anew" in capsys.readouterr().err)
    assert folder is None or Path(folder).parent == tmp_path / "home/.cache/piper-sim"
