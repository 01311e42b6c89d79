"""Ranks import no file that happens to lie in the user's folder, and are given what to run, once."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from executor.launch.launch import launch
from executor.launch.watch.verdict import RankFailed
from executor.runtime.given import given_text, read_given
from executor.runtime.worker import RankContext
from ir.plan.text import plan_digest, plan_text
from tests.executor.launch.processes import COMMAND, ROOT, python
from tests.executor.runs import job_file, judged
from tests.ir.verify.edits import differences

TRAPS = ("queue.py", "numpy.py", "torch.py", "csv.py", "msgspec.py", "ir/__init__.py", "cost_models/__init__.py")


def _trapped(folder: Path) -> Path:
    """A folder with a job and files that have the names of libraries and of ours; returns where they say they ran."""
    job_file(folder)
    said = folder / "said"
    for name in TRAPS:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"open({str(said)!r}, 'a').write(__file__)\nraise ImportError(__file__)\n")
    return said


def test_a_run_executes_no_file_of_the_working_directory(tmp_path: Path) -> None:
    said = _trapped(tmp_path)
    done = python(
        "-P", *COMMAND, "run", "job.toml", "-n", "2", "--json", cwd=tmp_path
    )  # -P: as the installed command starts
    assert done.returncode == 0, done.stdout + done.stderr
    assert not said.exists() and len(json.loads(done.stdout)["losses"]) == 1


def test_nor_does_a_rank_of_torchrun(tmp_path: Path) -> None:
    said = _trapped(tmp_path)
    done = python("-m", "executor", "job.toml", cwd=tmp_path)
    assert done.returncode == 2 and "torchrun" in json.loads(done.stdout)["error"]["suggestion"], done.stderr
    assert not said.exists()
    assert python("-c", "import queue", cwd=tmp_path).returncode == 1 and said.exists(), "the control: they are traps"


NET = """
import iniconfig
from torch import nn

assert iniconfig.WHOSE == "mine"


def build():
    return Net()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(8, 4), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 8)])

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x
"""


def test_ranks_find_packages_where_the_command_does(tmp_path: Path) -> None:
    """In one place of two: an installed package, and another of that name that PYTHONPATH puts before it."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "iniconfig.py").write_text("WHOSE = 'mine'")
    (tmp_path / "net.py").write_text(NET)
    model = '[model]\nmodule = "net.py:build"\ntags = { PP = "layers.*" }\nseq_len = 4\n[precision]\ncompute = "fp32"'
    (tmp_path / "job.toml").write_text(model)
    args = (*COMMAND, "run", "job.toml", "-n", "1", "--steps", "1", "--json")
    done = python(*args, cwd=tmp_path, PYTHONPATH=f"{tmp_path / 'lib'}:{ROOT}")
    assert done.returncode == 0, done.stdout + done.stderr


def _orphan(ctx: RankContext) -> None:
    ctx.progress.op(3, f"{ctx.rank}F1")
    if ctx.rank == 1:
        while not (ctx.dir / "at-0").exists():
            pass
        os.kill(os.getppid(), signal.SIGKILL)
    (ctx.dir / f"at-{ctx.rank}").touch()
    ctx.progress.wait([1])
    signal.pause()


def _fine(ctx: RankContext) -> int:
    return ctx.rank


def test_a_killed_fork_server_is_a_failed_run(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="fork server") as info:
        launch(_orphan, 2, out=tmp_path)
    assert info.value.kind.exit_code == 4 and info.value.op in ("0F1", "1F1")
    assert launch(_fine, 2) == [0, 1], "and the next one has a server again"


def _reads(ctx: RankContext) -> list[Any]:
    """The digest, how often this process has read the text, how often it was there already; nothing is lowered."""

    def never(*_: object) -> Any:
        raise AssertionError("a rank lowers")

    import ir.job.build

    ir.job.build.lower = never
    _, plan = ctx.given()
    found = read_given.cache_info()
    return [plan_digest(plan), found.misses, found.hits]


def test_ranks_inherit_the_plan_that_was_judged(tmp_path: Path) -> None:
    prepared, plan = judged(tmp_path)
    text = given_text(prepared, plan)
    assert launch(_reads, 2, given=[text]) == [[plan_digest(plan), 1, 1]] * 2
    other = json.dumps({**json.loads(text), "digest": plan_digest(plan)[::-1]})
    with pytest.raises(RankFailed, match="was to be run"):
        launch(_reads, 2, given=[other])


@pytest.mark.parametrize(
    "sets",
    [
        ("schedule.name=zbv", "parallel.layers=[1,1,1,1]"),
        ("schedule.name=dualpipe", "parallel.dp=2", "parallel.zero=3", "cluster.nodes=1", "cluster.gpus_per_node=4"),
        ("model.config=tiny-moe", "parallel.dp=4", "parallel.ep=2", "parallel.tp=2", "routing.kind=zipf"),
        ("schedule.name=zb2p", "costs.software=nanotron", "schedule.recompute=selective", "optimizer.clip_norm=0"),
    ],
    ids=" ".join,
)
def test_what_is_given_is_what_was_judged(sets: tuple[str, ...], tmp_path: Path) -> None:
    prepared, plan = judged(tmp_path, *sets)
    (tmp_path / "given.json").write_text(given_text(prepared, plan))
    given, same, _ = read_given(tmp_path / "given.json")
    assert plan_text(same) == plan_text(plan) and not differences(plan, same)
    for name in ("config", "mesh", "schedule", "ranks", "mbs", "stages", "layers", "style", "policy"):
        assert getattr(given, name) == getattr(prepared, name), name
    assert [str(d) for d in given.strategy] == [str(d) for d in prepared.strategy]
    assert [e.name for e in given.base.entries] == [e.name for e in prepared.base.entries]
    sections = ("model", "schedule", "routing", "precision", "optimizer", "data", "costs", "gate")
    assert all(getattr(given.job, s) == getattr(prepared.job, s) for s in sections)
