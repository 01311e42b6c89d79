"""Buffers that a module of the user's own was given beside its weights: no checkpoint has them, and none goes on, or is
exported, without them."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from executor.checkpoint.__main__ import main as lister
from executor.modules.hub_weights import WHOLE, HubCheckpoint
from ir.core.errors import PiperError
from piper_sim.app.cli import main

SOURCE = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gain = nn.Linear(8, 8), nn.Parameter(torch.tensor(0.5))
        self.none = nn.Parameter(torch.zeros(0))
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        x = x + self.none.sum()
        return x + self.gain * torch.relu(self.up(x)) * self.scale

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

def build():
    torch.manual_seed(0)
    return Net()
"""
JOB = """
model = { module = "model.py:build", tags = { PP = "layers.*" }, seq_len = 8 }
parallel = { pp = 2 }
schedule = { microbatches = 2 }
precision = { compute = "fp64" }
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job whose weights lie beside it in `given`, with buffers that build() does not make."""
    (tmp_path / "model.py").write_text(SOURCE)
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "given").mkdir()
    module = built(tmp_path)
    for number, layer in enumerate(module.layers):
        layer.scale.copy_(torch.arange(8) * (number + 1.0))
    save_file(module.state_dict(), tmp_path / "given" / WHOLE)
    return tmp_path / "job.toml"


def built(folder: Path) -> Any:
    spec = importlib.util.spec_from_file_location("buffered", folder / "model.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    module: nn.Module = found.build().double()
    return module


def run(job: Path, capsys: pytest.CaptureFixture[str], steps: int, *flags: str) -> tuple[int, Any]:
    """The exit code and the object."""
    usual = ["run", str(job), "-n", "2", "--steps", str(steps), "--backend", "local", "--json"]
    code = main([*usual, *flags])
    return code, json.loads(capsys.readouterr().out)


GIVEN = ("--set", 'model.weights="given"')


def test_a_run_goes_on_with_the_buffers_that_it_was_given(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep = job.parent / "keep"
    _, whole = run(job, capsys, 2, *GIVEN)
    run(job, capsys, 1, *GIVEN, "--save", str(keep))
    _, again = run(job, capsys, 2, *GIVEN, "--resume", str(keep))
    assert again["losses"] == whole["losses"][1:]
    code, told = run(job, capsys, 2, "--resume", str(keep))  # by those of build() it would train another model
    assert (code, told["error"]["key"]) == (2, "model.weights") and "buffers" in told["error"]["message"]
    assert told["error"]["suggestion"] == f"--set model.weights={job.parent / 'given'}"
    values = load_file(job.parent / "given" / WHOLE)
    save_file({n: v + 1 if "scale" in n else v for n, v in values.items()}, job.parent / "given" / WHOLE)
    code, told = run(job, capsys, 2, *GIVEN, "--resume", str(keep))
    assert code == 2 and "buffers" in told["error"]["message"]
    assert lister([str(keep), "--hub", str(job.parent / "other")]) == 2


def test_a_run_goes_on_whatever_its_layers_are(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two tensors cross these seams."""
    keep, other = job.parent / "keep", ("--set", 'model.tags={PP="layers.*.up"}')
    _, whole = run(job, capsys, 2)
    run(job, capsys, 1, "--save", str(keep))
    code, again = run(job, capsys, 2, "--resume", str(keep), *other)
    assert code == 0 and again["losses"] == pytest.approx(whole["losses"][1:], rel=1e-12)


def test_another_module_is_refused(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep = job.parent / "keep"
    run(job, capsys, 1, "--save", str(keep))
    job.with_name("model.py").write_text(
        SOURCE.replace("Embedding(16, 8), nn.Linear(8, 16)", "Embedding(18, 8), nn.Linear(8, 18)")
    )
    code, told = run(job, capsys, 2, "--resume", str(keep))
    assert code == 2 and "the job it was saved by" in told["error"]["suggestion"]


def test_what_is_exported_has_every_value_of_the_module(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Buffers, and parameters without dimensions, or without elements."""
    keep, out = job.parent / "keep", job.parent / "out"
    run(job, capsys, 1, *GIVEN, "--save", str(keep))
    assert lister([str(keep), "--hub", str(out)]) == 0
    module, given = built(job.parent), load_file(job.parent / "given" / WHOLE)
    found = load_file(out / WHOLE)
    module.load_state_dict(found)  # all of them, and no other
    assert all(torch.equal(v, given[n]) is ("scale" in n or not v.numel()) for n, v in found.items())
    assert found["layers.0.gain"].shape == ()


def test_what_is_tied_to_what_is_trained_is_not_written_beside_it(tmp_path: Path) -> None:
    table = torch.randn(4, 2)
    save_file({"embed.weight": table, "lm_head.weight": table.bfloat16().float()}, tmp_path / "other.safetensors")
    save_file({"embed.weight": table, "lm_head.weight": table.clone()}, tmp_path / "same.safetensors")
    for name, shapes, wanted in (
        ("same", {"embed.weight": (4, 2)}, []),
        ("other", {"embed.weight": (4, 2)}, ["lm_head.weight"]),
        ("same", {}, ["embed.weight", "lm_head.weight"]),
    ):
        assert HubCheckpoint(tmp_path / f"{name}.safetensors").beside(shapes) == wanted


def test_a_vector_by_the_name_of_gpt_2_s_mask_is_no_table(tmp_path: Path) -> None:
    """Of a linear called attn: frozen it is handed on, and files whose model has none are refused."""
    shapes = {"h.0.attn.weight": (4, 4)}
    values = {"h.0.attn.weight": torch.ones(4, 4), "h.0.attn.bias": torch.ones(4), "h.1.attn.bias": torch.ones(1, 4, 4)}
    save_file(values, tmp_path / WHOLE)
    files = HubCheckpoint(tmp_path)
    assert files.beside(shapes) == ["h.0.attn.bias"]
    files.check(shapes, {"h.0.attn.bias": (4,)})
    with pytest.raises(PiperError, match=r"no parameter for h\.0\.attn\.bias"):
        files.check(shapes, {})
