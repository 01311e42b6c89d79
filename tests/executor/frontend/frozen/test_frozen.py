"""Modules of which something is frozen train as by plain torch, and hold what they were given."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import piper_sim
from executor.checkpoint.__main__ import main as lister
from executor.frontend.capture import main as main_capture
from executor.modules.hub_weights import WHOLE
from executor.runtime.batch import MicrobatchLoader
from ir.job import load_job
from ir.job.build import prepare
from piper_sim.app.cli import main
from piper_sim.study import simulate
from tests.executor.frontend import class_runs as hub
from tests.executor.frontend.class_runs import LENGTH, MBS, SIZE, ClassPlan, _graph, far, run_class, sets_of
from tests.executor.frontend.models import frozen_classes


@pytest.fixture(autouse=True)
def _frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "hub_classes", frozen_classes)


CASES: list[tuple[str, ClassPlan, str, tuple[str, ...]]] = [
    ("llama_adapted", (2, 1, 0, "1f1b"), "none", ()),
    ("llama_adapted", (2, 2, 3, "dualpipe"), "full", ()),
    ("llama_adapted", (2, 1, 0, "zbv"), "none", ()),
    ("gpt2_last", (3, 1, 0, "zb1p"), "none", ()),
    ("gpt2_last", (2, 2, 2, "1f1b"), "full", ()),
    ("gpt2_biases", (2, 2, 1, "1f1b"), "none", ()),
    ("gemma3_first", (3, 1, 0, "1f1b"), "none", ()),
    ("mixtral_adapted", (2, 2, 3, "1f1b"), "none", ()),
    ("llama_adapted", (2, 1, 0, "1f1b"), "none", ("parallel.tp=2",)),
    ("qwen3_adapted", (1, 2, 1, "1f1b"), "full", ("parallel.tp=2", "parallel.sequence_parallel=true")),
    ("qwen3_adapted", (2, 1, 0, "gpipe"), "none", ("parallel.cp=2",)),
    ("llama_adapted", (1, 1, 0, "1f1b"), "none", ("parallel.cp=2", "parallel.cp_comm=all_to_all", "parallel.tp=2")),
]


@pytest.mark.parametrize(("name", "plan", "recompute", "more"), CASES, ids=str)
def test_what_is_not_frozen_trains_as_by_plain_torch(
    name: str, plan: ClassPlan, recompute: str, more: tuple[str, ...]
) -> None:
    assert 0.0 <= far(name, *sets_of(plan, recompute), *more) <= 1e-10


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
def test_compiled_layers_train_as_by_plain_torch() -> None:
    assert 0.0 <= far("gpt2_last", *sets_of((2, 1, 0, "1f1b"), "none"), "run.compile=true") <= 1e-10


def test_what_is_frozen_counts_once_a_rank_and_has_neither_gradient_nor_state() -> None:
    """Whole under ZeRO-3, too: of dp ranks each has it, and a share of the rest."""
    sizes = {n: p.numel() for n, p in frozen_classes.gpt2_last().named_parameters() if not p.requires_grad}
    frozen = sum(sizes.values())
    trained = sum(p.numel() for p in frozen_classes.gpt2_last().parameters() if p.requires_grad)
    for dp, zero in ((1, 0), (2, 3)):
        found, _, _ = run_class("gpt2_last", *sets_of((1, dp, zero, "1f1b"), "none"))
        share = -(-trained // (dp if zero else 1)) * 8
        held = found["memory"]["persistent_bytes"]["0"]
        assert held["parameters"] - frozen * 8 == pytest.approx(share, abs=64)
        assert held["gradients"] == pytest.approx(share, abs=64) and held["optimizer"] == pytest.approx(
            2 * share, abs=64
        )
        job = load_job(
            {
                "model": {"graph": _graph("gpt2_last"), "seq_len": LENGTH},
                "cluster": {"gpu": "h100-sxm"},
                "precision": {"compute": "fp64"},
                "parallel": {"dp": dp, "zero": zero},
                "schedule": {"microbatches": 4 // dp},
            }
        )
        told = piper_sim.predict(job).to_dict()
        assert told["memory"]["breakdown_bytes"]["0"]["parameters"] == pytest.approx(held["parameters"], abs=64)
        assert told["parameters"] == {
            k: trained + n for k, n in {"total": frozen, "active": frozen, "trained": 0}.items()
        }


def test_products_that_nobody_makes_are_no_work_for_the_mfu() -> None:
    """Those of the gradients of frozen weights: 2 FLOPs for each element and token."""
    frozen = [p for n, p in frozen_classes.llama_adapted().named_parameters() if "base" in n or "lm_head" in n]
    tokens = LENGTH * SIZE * MBS
    whole, some = (step_flops(name) for name in ("llama_with_adapters", "llama_adapted"))
    assert whole - some == 2 * tokens * sum(p.numel() for p in frozen)


SOURCE = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.more = nn.Linear(8, 8), nn.Linear(8, 8)
        self.base.requires_grad_(False)

    def forward(self, x):
        return x + torch.relu(self.base(x) + self.more(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.embed.requires_grad_(False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
"""
JOB = """
model = { module = "model.py:Net", tags = { PP = "layers.*" }, seq_len = 8 }
parallel = { pp = 2 }
schedule = { microbatches = 2 }
precision = { compute = "fp64" }
"""
GIVEN = ("--set", 'model.weights="given"')


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job, and beside it other values in `given`."""
    (tmp_path / "model.py").write_text(SOURCE)
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "given").mkdir()
    space: dict[str, Any] = {}
    exec(SOURCE, space)
    torch.manual_seed(5)
    save_file(space["Net"]().double().state_dict(), tmp_path / "given" / WHOLE)
    return tmp_path / "job.toml"


def test_a_run_goes_on_with_what_was_frozen(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint has what is trained: it is refused where the rest would be another."""
    keep, sets = job.parent / "keep", ("--set", "parallel.pp=1")
    _, whole = run(job, capsys, 2)
    run(job, capsys, 1, "--save", str(keep))
    code, told = run(job, capsys, 2, "--resume", str(keep), "--set", "model.seed=1")
    assert (code, told["error"]["key"]) == (2, "model.seed") and "seed of frozen" in told["error"]["message"]
    assert told["error"]["suggestion"] == "--set model.seed=0"
    code, again = run(job, capsys, 2, *sets, "--resume", str(keep), ranks="1")
    assert again["losses"] == pytest.approx(whole["losses"][1:], rel=1e-12)


def test_patterns_of_no_decay_may_name_what_is_frozen(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--set", 'optimizer.no_decay=["*base*"]')
    assert run(job, capsys, 1, *given)[1]["losses"] == run(job, capsys, 1)[1]["losses"]
    code, told = run(job, capsys, 1, "--set", 'optimizer.no_decay=["*bass*"]')
    assert (code, told["error"]["key"]) == (2, "optimizer.no_decay")


def test_frozen_values_are_read_from_files(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep, out, file = (job.parent / n for n in ("keep", "out", f"given/{WHOLE}"))
    _, drawn = run(job, capsys, 2)
    _, read = run(job, capsys, 2, *GIVEN, "--save", str(keep))
    assert abs(drawn["losses"][0] / read["losses"][0] - 1) > 1e-3
    assert lister([str(keep), "--hub", str(out)]) == 0 and capsys.readouterr()
    values, found = load_file(file), load_file(out / WHOLE)
    assert found.keys() == values.keys()
    assert {n for n, v in found.items() if torch.equal(v, values[n])} == {
        n for n in values if "base" in n or "embed" in n
    }
    for n in ("layers.0.base.weight", "embed.weight"):
        save_file({**values, n: values[n] + 0.1}, file)
        _, other = run(job, capsys, 2, *GIVEN)
        assert abs(other["losses"][0] / read["losses"][0] - 1) > 1e-6
        code, told = run(job, capsys, 3, *GIVEN, "--resume", str(keep))
        assert (code, told["error"]["key"]) == (2, "model.weights")
    unread = job.parent / "model.py"  # a tower of another kind of input, say
    unread.write_text(
        SOURCE.replace(
            "        self.embed.req",
            "        self.tower = nn.Linear(3, 3).requires_grad_(False)\n        self.embed.req",
        )
    )
    save_file({**values, "tower.weight": torch.ones(3, 3), "tower.bias": torch.ones(3)}, file)
    _, other = run(job, capsys, 2, *GIVEN)
    assert other["losses"] == read["losses"]
    unread.write_text(SOURCE)
    save_file({n: v for n, v in values.items() if n != "embed.weight"}, file)
    code, told = run(job, capsys, 2, *GIVEN)
    assert code == 2 and "no tensor for embed.weight" in told["error"]["message"]


def test_a_head_that_is_frozen_and_tied_to_nothing_is_written_and_must_be_the_same(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the name that files give a second copy of the table of words."""
    keep, out, file = (job.parent / n for n in ("keep", "out", f"given/{WHOLE}"))
    named = SOURCE.replace("self.head", "self.lm_head").replace("self.embed.req", "self.lm_head.req")
    (job.parent / "model.py").write_text(named)
    values = {n.replace("head", "lm_head"): t for n, t in load_file(file).items()}
    save_file(values, file)
    assert run(job, capsys, 1, *GIVEN, "--save", str(keep))[0] == 0
    assert lister([str(keep), "--hub", str(out)]) == 0 and capsys.readouterr()
    found = load_file(out / WHOLE)
    assert found.keys() == values.keys() and torch.equal(found["lm_head.weight"], values["lm_head.weight"])
    save_file(values | {"lm_head.weight": 2 * values["lm_head.weight"]}, file)
    code, told = run(job, capsys, 2, *GIVEN, "--resume", str(keep))
    assert (code, told["error"]["key"]) == (2, "model.weights")


def test_what_could_not_be_frozen_is_refused(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = job.parent / "model.json"
    assert (
        main_capture(
            [f"{job.parent}/model.py:Net", "--out", str(graph), "--seq-len", "8", "--pp", "layers.*", "--dtype", "fp64"]
        )
        == 0
    )
    capsys.readouterr()
    usual = ("--set", "model.graph=model.json")
    assert run(job, capsys, 1, *usual)[0] == 0
    text = (job.parent / "model.py").read_text()
    (job.parent / "model.py").write_text(text.replace("        self.embed.requires_grad_(False)\n", ""))
    code, told = run(job, capsys, 1, *usual)
    assert (
        code == 2 and "frozen" in told["error"]["message"] and told["error"]["suggestion"] == "capture the module again"
    )
    (job.parent / "model.py").write_text(text.replace("self.embed.req", "self.req"))
    code, told = run(job, capsys, 1)
    assert code == 2 and "no parameter requires a gradient" in told["error"]["message"]


def test_annotated_code_with_something_frozen_trains_as_by_plain_torch(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = job.parent / "model.py"
    text = f"from executor.modules.user.annotate import annotate\n{module.read_text()}"
    text = text.replace("            x = layer(x)", "            with annotate('PP'):\n                x = layer(x)")
    module.write_text(text)
    job.write_text(job.read_text().replace('tags = { PP = "layers.*" }, ', ""))
    _, found = run(job, capsys, 3, "--set", "optimizer.lr=0.01", "--set", "parallel.zero=1")
    data = MicrobatchLoader("synthetic", vocab=16, length=8, microbatches=2)
    space: dict[str, Any] = {}
    exec(SOURCE, space)
    torch.manual_seed(0)
    model = space["Net"]().double()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for step in range(3):
        optimizer.zero_grad()
        batches = [data.batch(step, 0, mb) for mb in range(2)]
        parts = [F.cross_entropy(model(b.ids).flatten(0, 1), b.labels.flatten(), reduction="sum") for b in batches]
        loss = sum(parts) * batches[0].scale
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert found["losses"] == pytest.approx(losses, rel=1e-12)


def step_flops(name: str) -> float:
    job = load_job(
        {
            "model": {"graph": _graph(name), "seq_len": LENGTH},
            "cluster": {"gpu": "h100-sxm"},
            "precision": {"compute": "fp64"},
            "schedule": {"microbatches": MBS},
        }
    )
    return simulate._model_flops(prepare(job))


def run(job: Path, capsys: pytest.CaptureFixture[str], steps: int, *flags: str, ranks: str = "2") -> tuple[int, Any]:
    """The exit code and the object."""
    usual = ["run", str(job), "-n", ranks, "--steps", str(steps), "--backend", "local", "--json"]
    code = main([*usual, *flags])
    return code, json.loads(capsys.readouterr().out)
