"""`--save` and `--resume` as users give them: to `piper-sim run` and under torchrun; file tokens, a user's module."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from executor.checkpoint.manifest import read_manifest
from executor.frontend import capture
from executor.launch import run as cli
from piper_sim.app.cli import main
from tests.executor.checkpoint import checkpoint_faults
from tests.executor.launch.test_run_command import command
from tests.executor.launch.test_torchrun import _agent, _free_port, _objects
from tests.executor.runs import JOB, job_file

NOISE = """
import torch
from torch import nn
from executor.modules.user.annotate import annotate


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.layer, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.layer.weight = nn.Parameter(torch.randn(16, 16).t())  # not contiguous

    def forward(self, ids):
        x = self.embed(ids)
        x = x + 0.1 * torch.randn_like(x)
        with annotate("PP"):
            x = self.layer(x)
        with annotate("PP"):
            x = self.last(x)
        return self.head(x)
"""
MODULE = JOB.replace('config = "tiny-llama"\nnum_hidden_layers = 4', 'graph = "net.json"\nmodule = "net.py:Net"')


def _run(capfd: pytest.CaptureFixture[str], job: str, *flags: str) -> dict[str, Any]:
    return command(capfd, "run", job, "-n", "2", *flags)


def test_a_files_tokens_are_read_on_where_they_were_left(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("each step reads another part of this text, and no step reads it twice; " * 9)
    job = str(job_file(tmp_path, text=JOB + '[data]\nsource = "text.txt"\n'))
    folder = str(tmp_path / "saved")
    whole = _run(capfd, job, "--steps", "5", "--save", folder, "--every", "3")
    shutil.move(tmp_path / "text.txt", tmp_path / "moved.txt")  # it is known by what is in it
    moved = ["--set", "data.source=moved.txt", "--resume", folder + "/step-000003"]
    assert _run(capfd, job, "--steps", "5", *moved)["losses"] == whole["losses"][3:]
    assert len({round(x, 12) for x in whole["losses"]}) == 5
    (tmp_path / "moved.txt").write_text("another text")
    error = command(capfd, "run", job, "-n", "2", "--steps", "5", *moved, code=2)["error"]
    assert error["key"] == "data.source" and "12 tokens here, 639 tokens there" in error["message"]


def test_people_are_told_where_it_was_saved_and_where_it_goes_on(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job, folder = str(job_file(tmp_path)), str(tmp_path / "saved")
    assert main(["run", job, "-n", "2", "--save", folder]) == 0
    assert f"saved to {folder}/step-000001" in capfd.readouterr().out
    assert main(["run", job, "-n", "2", "--steps", "2", "--resume", folder]) == 0
    out = capfd.readouterr().out
    assert "step 1: loss" in out and "step 0" not in out


def test_a_module_that_draws_at_random_goes_on_drawing(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net.py").write_text(NOISE)
    net = [f"{tmp_path / 'net.py'}:Net", "--out", str(tmp_path / "net.json"), "--seq-len", "8", "--dtype", "fp64"]
    assert capture.main(net) == 0
    capfd.readouterr()
    job, folder = str(job_file(tmp_path, text=MODULE)), tmp_path / "saved"
    whole = _run(capfd, job, "--steps", "4", "--save", str(folder), "--every", "2")
    resume = "--steps", "4", "--resume", str(folder / "step-000002")
    assert _run(capfd, job, *resume)["losses"] == whole["losses"][2:]
    monkeypatch.setattr(cli, "RANK", checkpoint_faults.drawn_anew)
    assert _run(capfd, job, *resume)["losses"] != whole["losses"][2:]


def _torchrun(job: str, *flags: str) -> tuple[int, dict[str, Any], str]:
    agent = _agent(1, 2, _free_port(), job, *flags)
    text, errors = agent.communicate(timeout=120)
    (found,) = _objects(text)
    return agent.returncode, found, errors


def test_torchrun_takes_up_and_hands_on(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job, folder = str(job_file(tmp_path)), tmp_path / "saved"
    both = "--save", str(folder), "--resume", str(folder)
    whole = _run(capfd, job, "--steps", "4", "--save", str(folder), "--every", "2")
    shutil.rmtree(folder / "step-000004")
    code, found, said = _torchrun(job, "--steps", "3", *both)
    assert code == 0 and found["losses"] == whole["losses"][2:3] and found["first_step"] == 2, said
    assert found["saved"] == str(folder / "step-000003")
    assert _run(capfd, job, "--steps", "4", *both)["losses"] == whole["losses"][3:]
    assert len({read_manifest(folder / f"step-00000{n}").run for n in (3, 4)}) == 1


@pytest.mark.slow
def test_torchrun_refuses_what_piper_sim_refuses(tmp_path: Path) -> None:
    job, folder = str(job_file(tmp_path)), tmp_path / "saved"
    assert _torchrun(job, "--steps", "2", "--save", str(folder))[0] == 0
    for flags, key in ((("--resume", str(folder)), "--steps"), (("--save", str(folder)), "--save")):
        code, found, _ = _torchrun(job, "--steps", "2", *flags)
        assert code != 0 and found["error"]["key"] == key
    file = folder / "step-000002" / "rank-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    code, found, _ = _torchrun(job, "--steps", "5", "--resume", str(folder))
    assert code != 0 and (found["error"]["kind"], found["error"]["rank"]) == ("rank_failed", 1)
    assert str(file) in found["error"]["message"] and "damaged" in found["error"]["message"]
