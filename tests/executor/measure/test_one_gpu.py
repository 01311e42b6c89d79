"""`python -m experiments.one_gpu` on a machine that has none."""

from pathlib import Path

import pytest
import torch

from experiments.one_gpu.__main__ import main as measure


def test_without_a_gpu_nothing_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert measure([str(tmp_path / "out")]) == 1
    assert "no GPU" in capsys.readouterr().err and not (tmp_path / "out").exists()
