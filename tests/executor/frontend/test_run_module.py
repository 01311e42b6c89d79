"""A user's annotated module, captured and then trained through pipelines, equals itself in one process."""

import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from executor.device.device import HostDevice
from executor.frontend import capture
from executor.launch.refusals import refuse
from executor.launch.watch.verdict import RankFailed
from executor.modules import choose
from executor.modules.user.model import UserModel
from executor.modules.user.reference import UserModelBuild, load_callable
from executor.runtime import rank_model
from executor.runtime.batch import MicrobatchLoader
from ir.core.errors import PiperError
from ir.job import load_job
from ir.job.build import PreparedJob, prepare
from ir.job.schema import JobOptimizer
from tests.executor.frontend.models import small_net
from tests.executor.reference import ReferenceSteps, train
from tests.executor.runs import distance, job_file, merged, two_steps

NORM = "        self.norm = nn.LayerNorm(WIDTH)\n"
JOB = """
[model]
graph = "model.json"
module = "my_model.py:{build}"
seq_len = 8
[cluster]
gpu = "h100-sxm"
[parallel]
pp = 3
[schedule]
name = "1f1b"
microbatches = 4
[precision]
compute = "fp64"
"""


def _job(folder: Path, build: str = "build", *, dtype: str = "fp64", source: str | None = None) -> str:
    """A folder with the module, its graph and a job; the job's path."""
    model = folder / "my_model.py"
    if source is None:
        shutil.copy(small_net.__file__, model)
    else:
        model.write_text(source)
    out = str(folder / "model.json")
    assert capture.main([f"{model}:{build}", "--out", out, "--seq-len", "8", "--dtype", dtype, "--force"]) == 0
    path = folder / "job.toml"
    path.write_text(JOB.format(build=build))
    return str(path)


def _alone(build: object) -> ReferenceSteps:
    torch.set_num_threads(1)
    data = MicrobatchLoader("synthetic", vocab=small_net.VOCAB, length=8, microbatches=4)
    return train(UserModel(build, dtype=torch.float64), data, 2, optimizer=JobOptimizer(), moments=torch.float64)


def _error(build: str, *sets: str) -> float:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found, ends = two_steps(folder, _job(folder, build), sets)
    one = _alone(getattr(small_net, build))
    wanted = {f"grad/{n}": g.numpy() for n, g in one.grads.items()}
    wanted |= {f"param/{n}": p.detach().numpy() for n, p in one.params.items()}
    losses = np.abs(np.array(found["losses"]) / np.array(one.losses) - 1).max()
    return float(np.max([distance(merged(ends), wanted), losses]))  # NaN stays NaN, and fails


@pytest.mark.parametrize(
    "sets",
    [
        (),
        ("schedule.name=zb1p",),
        ("schedule.name=zbv", "parallel.pp=2", "parallel.layers=[0,1,1,1]"),
        ("schedule.recompute=full", "parallel.pp=2", "schedule.microbatches=4"),
    ],
    ids=lambda s: " ".join(x.partition("=")[2] for x in s) or "1f1b",
)
def test_a_users_module_in_a_pipeline_equals_itself_in_one_process(sets: tuple[str, ...]) -> None:
    assert _error("build", *sets) == 0.0


def test_its_two_copies_and_its_ties_are_summed() -> None:
    assert 0.0 < _error("build", "schedule.name=dualpipe", "parallel.pp=2") <= 1e-10
    assert 0.0 < _error("build_tied", "schedule.name=zb1p") <= 1e-10


SEED = "    torch.manual_seed({})\n    net = Net()\n"
OWN = "    own = torch.Generator()\n    own.seed()\n    net = Net()\n    net.head.weight.data.normal_(generator=own)\n"


@pytest.mark.parametrize("backend", ["gloo", "local"])
@pytest.mark.parametrize("body", [SEED.format("int.from_bytes(os.urandom(4))"), SEED.format("time.time_ns()"), OWN])
def test_values_that_each_rank_would_draw_otherwise_are_refused(body: str, backend: str, tmp_path: Path) -> None:
    job = _job(tmp_path, "other", source=_other(body))
    with pytest.raises(RankFailed, match=r"model\.module: build\(\) makes other values of .*each time"):
        two_steps(tmp_path, job, ("schedule.microbatches=4",), backend=backend)


@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_a_module_made_at_import_has_the_values_of_the_seed(backend: str, tmp_path: Path) -> None:
    """Every rank imports its file; and what a plan trains is what a process alone does."""
    source = Path(small_net.__file__).read_text() + "\n\nNET = Net()\n\n\ndef other():\n    return NET\n"
    found, _ = two_steps(tmp_path, _job(tmp_path, "other", source=source), (), backend=backend)
    assert found["losses"] == two_steps(tmp_path, _job(tmp_path), (), backend=backend)[0]["losses"]


def test_values_that_nobody_reads_may_be_any(tmp_path: Path) -> None:
    """A cache for generating, left as memory was."""
    body = SEED.format(3) + "    net.register_buffer('cache', torch.full((8,), float(time.time_ns() % 10**6)))\n"
    two_steps(tmp_path, _job(tmp_path, "other", source=_other(body)), ())


def test_one_rank_alone_may_draw_as_it_likes(tmp_path: Path) -> None:
    job = _job(tmp_path, "other", source=_other(SEED.format("time.time_ns()")))
    two_steps(tmp_path, job, ("parallel.pp=1",))


def test_a_build_has_one_thread_as_ranks_have() -> None:
    """With more, the last bits of what it computes would be others than theirs."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        build = UserModelBuild(lambda: nn.ParameterList([torch.full((1,), float(torch.get_num_threads()))]))
        assert cast(Any, build())[0].item() == 1.0 and build.drawn and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def _other(body: str) -> str:
    text = Path(small_net.__file__).read_text()
    return f"{text}\n\nimport os, time\n\ndef other():\n{body}    return net\n"


def test_a_file_that_cannot_be_run_is_said_to_be_the_users(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("\nraise ValueError('a beam fell')\n")
    texts = {
        "def (": r"mine.py cannot be run: SyntaxError: .*\(mine.py, line 1\)",
        "import torchh": r"mine.py cannot be run: ModuleNotFoundError: No module named 'torchh' \(mine.py:1\)",
        "import beside": r"mine.py cannot be run: ValueError: a beam fell \(beside.py:2\)",
        "raise SystemExit(3)": r"mine.py cannot be run: SystemExit: 3 \(mine.py:1\)",
    }
    for text, said in texts.items():
        (tmp_path / "mine.py").write_text(text)
        with pytest.raises(PiperError, match=said):
            load_callable(f"{tmp_path / 'mine.py'}:build")
    (tmp_path / "mine.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()\nbuild = print")
    assert load_callable(f"{tmp_path / 'mine.py'}:build") is print


def test_a_rank_keeps_the_values_of_its_own_stages_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = _prepared(_job(tmp_path))
    built: list[UserModel] = []

    def model_of(*given: Any) -> UserModel:
        built.append(cast(UserModel, choose.model_of(*given)))
        return built[-1]

    monkeypatch.setattr(rank_model, "model_of", model_of)
    held = []
    for number in range(prepared.ranks):
        local = rank_model.RankModel.of(prepared, prepared.plan(), number, HostDevice())
        alive = {n for n, p in built[-1].module.named_parameters() if p.numel()}
        assert alive == set(local.params) and all(p.numel() for p in local.params.values())
        held.append(len(alive))
    assert sum(held) == len(built[0].shapes)


class _Elsewhere(HostDevice):
    """The host by another name, as a GPU has one."""

    torch = torch.device("cpu", 0)


def test_only_code_of_the_user_s_own_has_another_default_device(tmp_path: Path) -> None:
    """Each call of torch pays for it (`executor.device.device.make_default`)."""

    def default(job: str) -> torch.device:
        with ThreadPoolExecutor(1) as pool:  # a default is a thread's
            of, prepared = rank_model.RankModel.of, _prepared(job)
            local = pool.submit(of, prepared, prepared.plan(), 0, _Elsewhere()).result()
            assert pool.submit(torch.get_default_device).result() == local.default
        return local.default

    (tmp_path / "ours").mkdir()
    ours = job_file(tmp_path / "ours")
    assert default(_job(tmp_path)) == _Elsewhere.torch and default(str(ours)) == HostDevice.torch


def _prepared(job: str, *sets: str) -> PreparedJob:
    return prepare(load_job(job, sets))


def _refused(prepared: PreparedJob) -> str:
    with pytest.raises(PiperError) as caught:
        refuse(prepared, "gloo")
    return str(caught.value)


def test_what_a_module_cannot_do_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    job = _job(tmp_path)
    refuse(_prepared(job), "gloo")
    no_graph = ("model.graph=x", "model.config=tiny-llama")
    with pytest.raises(PiperError, match="config and graph are both given"):
        _prepared(job, *no_graph)
    text = Path(job).read_text()
    Path(job).write_text(text.replace('module = "my_model.py:build"\n', ""))
    assert "says what a module does, not how" in _refused(_prepared(job))
    Path(job).write_text(text.replace('graph = "model.json"', 'config = "tiny-llama"'))
    asked = "python -m executor.frontend.capture my_model.py:build --out model.json --seq-len 8"
    assert asked in _refused(_prepared(job))
    Path(job).write_text(text)
    mixed = _prepared(job, "precision.grads=fp64")
    assert mixed.config.model_type == "captured"
    model = tmp_path / "my_model.py"
    source = model.read_text()
    for old, new, said in (
        ("2 * WIDTH)", "3 * WIDTH)", "blocks.0.up.weight: (96, 32), but model.json has (64, 32)"),
        ("BLOCKS = 32, 256, 3", "BLOCKS = 32, 256, 2", "has l2: None, but model.json has a chunk"),
        (f"{NORM}        self.mix", "        self.norm = nn.Dropout(0.1)\n        self.mix", "drops out"),
    ):
        assert old in source
        model.write_text(source.replace(old, new))
        assert said in _refused(_prepared(job)), said


SEAM, CALL = '            with annotate("PP"):\n', "                x = block(x, at)"
LAST = "        return self.head(self.norm(x))"
CHANGES = {
    "no seam": (SEAM + CALL, "            x = block(x, at)", "no annotated scope"),
    "empty": (CALL, "                pass", "annotated scope 0 of Net computes nothing"),
    "idle": (
        f"{NORM}        self.head",
        f"        self.idle = nn.Linear(2, 2)\n{NORM}        self.head",
        "read by no chunk",
    ),
    "ids in the head": (LAST, "        return self.head(self.norm(x) + self.embed(ids))", ""),
    "wrong sizes": ("nn.Linear(WIDTH, 2 * WIDTH)", "nn.Linear(WIDTH + 1, 2 * WIDTH)", "l0 failed without values"),
    "format": ("        x = self.embed(ids)\n", "        x = self.embed(ids).float()\n", "hands on"),
}


@pytest.mark.parametrize(("old", "new", "said"), CHANGES.values(), ids=CHANGES)
def test_modules_that_cannot_be_captured_say_why(
    old: str, new: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = Path(small_net.__file__).read_text()
    assert old in source
    (tmp_path / "m.py").write_text(source.replace(old, new))
    code = capture.main([f"{tmp_path}/m.py:build", "--out", str(tmp_path / "m.json"), "--seq-len", "8"])
    assert code == (2 if said else 0) and said in capsys.readouterr().err
