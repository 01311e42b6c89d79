"""A GPT-2 of transformers on a real text, which CPython ships: one loss curve, whatever plan, whoever is killed."""

import json
import os
import pydoc_data.topics
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from piper_sim.app.cli import main
from tests.executor.launch.test_run_failure import pids

ROOT = Path(__file__).parents[3]
MODULE = """
from transformers import GPT2Config, GPT2LMHeadModel

build = lambda: GPT2LMHeadModel(GPT2Config(**{sizes}))
"""
JOB = """
model = {{ module = "model.py:build", tags = {{ PP = "transformer.h.*" }}, seq_len = {length} }}
precision = {{ compute = "fp32", grads = "fp64", reduce = "fp64", optimizer = "fp64" }}
data = {{ source = "text.txt" }}
optimizer = {{ lr = {lr}, warmup_steps = 5, betas = [0.9, 0.95], weight_decay = 0.1, no_decay = ["*.bias", "*ln_*"] }}
"""
PLANS = {
    "1F1B": ("parallel.pp=2", "schedule.name=1f1b", "schedule.microbatches=8"),
    "DualPipe": ("parallel.pp=2", "schedule.name=dualpipe", "schedule.microbatches=8"),
    "ZeRO-3": ("parallel.pp=1", "parallel.dp=2", "parallel.zero=3", "schedule.microbatches=4"),
}


@dataclass(frozen=True)
class Size:
    """A model, and for how long it trains. kills: of a run of it, at drawn steps."""

    width: int
    layers: int
    length: int
    lr: float
    steps: int
    kills: int

    def folder(self, path: Path) -> list[str]:
        """Job, module and text; returns the words of a run, without its plan."""
        sizes = {"vocab_size": 256, "n_embd": self.width, "n_layer": self.layers, "n_head": 4}
        sizes |= {"n_positions": self.length, "bos_token_id": 0, "eos_token_id": 0}
        drops: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
        (path / "model.py").write_text(MODULE.format(sizes=sizes | drops))
        (path / "job.toml").write_text(JOB.format(length=self.length, lr=self.lr))
        (path / "text.txt").write_text("\n".join(pydoc_data.topics.topics.values()), encoding="utf-8")
        return ["run", str(path / "job.toml"), "-n", "2", "--steps", str(self.steps), "--json"]


def _sets(plan: Sequence[str]) -> list[str]:
    return [word for one in plan for word in ("--set", one)]


SIZES = [Size(32, 2, 32, 1e-2, 60, 2)]
pytestmark = pytest.mark.slow  # quick beside it: a class, or dropout, under drawn plans, of three steps


@pytest.fixture(scope="module", params=SIZES, ids=str)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Size, np.ndarray]:
    """The curve under 1F1B."""
    size, folder = request.param, tmp_path_factory.mktemp("text")
    return size, _curve(folder, size, PLANS["1F1B"])


def _curve(folder: Path, size: Size, plan: Sequence[str]) -> np.ndarray:
    words = size.folder(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main([*words, "--out", str(folder / "out"), "--force", *_sets(plan)]) == 0
    return np.array(json.loads((folder / "out" / "run.json").read_text())["losses"])


def test_the_loss_falls_and_is_the_same_under_other_plans(trained: tuple[Size, np.ndarray], tmp_path: Path) -> None:
    size, curve = trained
    assert len(curve) == size.steps and curve[-5:].mean() < 0.7 * curve[0]
    for name in ("DualPipe", "ZeRO-3"):
        (tmp_path / name).mkdir()
        assert np.abs(_curve(tmp_path / name, size, PLANS[name]) / curve - 1).max() <= 1e-6, name


def test_killed_at_random_and_resumed_under_other_plans_it_is_the_same(
    trained: tuple[Size, np.ndarray], tmp_path: Path
) -> None:
    size, curve = trained
    draw, found, killed, out = random.Random(0), dict[int, float](), 0, tmp_path / "out"
    saving = ["--save", "saved", "--every", "7", "--resume", "if-present"]
    words = [*size.folder(tmp_path), *saving, "--out", str(out), "--force"]
    ends = sorted(draw.sample(range(size.steps // 10, size.steps), size.kills))
    while True:
        plan = PLANS[list(PLANS)[killed % len(PLANS)]]
        done = _run_until(tmp_path, [*words, *_sets(plan)], out, ends[killed] if killed < len(ends) else None)
        log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        found |= {line["step"]: line["loss"] for line in log}
        if done == 0:
            break
        killed += 1
    assert killed == size.kills
    assert np.abs(np.array([found[k] for k in range(size.steps)]) / curve - 1).max() <= 1e-6


def _run_until(folder: Path, words: Sequence[str], out: Path, end: int | None) -> int:
    """Run; once step `end` is logged, kill a rank. Returns the exit code."""
    env: dict[str, Any] = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "piper_sim.app.cli", *words]
    said, pipes = list[str](), {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=folder, env=env, text=True, **pipes) as run:
        assert run.stderr is not None
        for line in run.stderr:  # a line per step, as it is done
            said.append(line)
            if end is not None and line.startswith(f"step {end}:"):
                os.kill(pids(out)[1], signal.SIGKILL)
        code = run.wait(300)
    assert code == (0 if end is None else 4), "".join(said)
    return code
