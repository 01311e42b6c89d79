"""What was trained of peft's adapters goes out as peft saves them, and is read by it."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from executor.checkpoint.__main__ import main as lister
from executor.checkpoint.adapter import FILE, _named, write_adapter
from executor.modules.hub_weights import WHOLE
from executor.runtime.batch import MicrobatchLoader
from ir.core.errors import PiperError
from ir.core.work import DType
from piper_sim.app.cli import main
from tests.executor.frontend.models.hub_classes import VOCAB
from tests.executor.modules.hub import quiet

SOURCE = """
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tests.executor.frontend.models.hub_classes import llama

CONFIG = LoraConfig(r=2, lora_alpha=8, **{given})

def base():
    torch.manual_seed(3)
    return llama()

def build():
    return get_peft_model(base(), CONFIG)

def goes_on():
    return PeftModel.from_pretrained(base(), "{out}", is_trainable=True)
"""
JOB = """
model = { module = "model.py:build", tags = { PP = "base_model.model.model.layers.*" }, seq_len = 8 }
cluster = { gpu = "h100-sxm" }
parallel = { pp = 2, dp = 2, zero = 3 }
schedule = { name = "1f1b", microbatches = 2 }
precision = { compute = "fp32" }
optimizer = { lr = 0.01 }
"""
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a head beside": {"modules_to_save": ["lm_head"]},
    "of a table": {"target_modules": ["q_proj", "embed_tokens"]},
    "with magnitudes": {"use_dora": True},
}


pytestmark = pytest.mark.filterwarnings("ignore")  # peft calls what transformers will have no more


def source(way: str) -> str:
    given = {"target_modules": ["q_proj", "down_proj"], **WAYS[way]}
    return SOURCE.replace("{given}", repr(given))


def space(way: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    exec(source(way), out)
    return out


@pytest.mark.parametrize("way", WAYS)
def test_names_are_those_that_peft_saves(way: str) -> None:
    from peft import get_peft_model_state_dict

    with quiet():
        made = space(way)["build"]()
    wanted = get_peft_model_state_dict(made, save_embedding_layers=False)
    named = {n: _named(n) for n, p in made.named_parameters() if p.requires_grad}
    assert None not in named.values() and {a for _, a in named.values()} == {"default"}
    assert {name: made.get_parameter(n).shape for n, (name, _) in named.items()} == {
        n: t.shape for n, t in wanted.items()
    }


def run(folder: Path, steps: int, *flags: str, ranks: str = "4") -> None:
    usual = ["run", str(folder / "job.toml"), "-n", ranks, "--steps", str(steps), "--backend", "local", "--json"]
    assert main([*usual, *flags]) == 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """way → a folder with a run's checkpoint, and an adapter's as the run and its user leave it."""

    @cache
    def made(way: str) -> Path:
        folder = tmp_path_factory.mktemp("adapters")
        (folder / "model.py").write_text(source(way).replace("{out}", str(folder / "adapter")))
        (folder / "job.toml").write_text(JOB)
        run(folder, 2, "--save", str(folder / "keep"))
        assert lister([str(folder / "keep"), "--adapter", str(folder / "adapter")]) == 0
        space(way)["CONFIG"].save_pretrained(folder / "adapter")
        return folder

    return made


@pytest.mark.parametrize("way", ["plain", "a head beside"])
def test_peft_reads_what_a_run_has_trained(
    way: str, trained: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftModel, set_peft_model_state_dict

    folder, made, ids = trained(way), space(way), torch.arange(8)[None]
    out = folder / "adapter"
    with quiet():
        untrained = made["build"]()
        found = PeftModel.from_pretrained(made["base"](), str(out))
        begun = untrained(input_ids=ids).logits
        set_peft_model_state_dict(untrained, load_file(out / FILE))
        assert torch.equal(found(input_ids=ids).logits, untrained(input_ids=ids).logits)
        assert not torch.equal(found(input_ids=ids).logits, begun)
    assert sorted(p.name for p in out.iterdir() if p.suffix == ".safetensors") == [FILE]
    assert capsys.readouterr() and lister([str(folder / "keep"), "--adapter", str(out)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_a_run_goes_on_with_an_adapter(
    trained: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which build() reads, beside the files of what it is put in, or with all values."""
    from peft import PeftModel

    made = trained("plain")
    data = MicrobatchLoader("synthetic", vocab=VOCAB, length=8, microbatches=2)
    with quiet():
        model = PeftModel.from_pretrained(space("plain")["base"](), str(made / "adapter"))
        save_file({n: p.detach() for n, p in space("plain")["base"]().named_parameters()}, tmp_path / WHOLE)
        wanted = 0.0
        for batch in (data.batch(0, 0, mb) for mb in range(2)):
            logits = model(input_ids=batch.ids).logits.flatten(0, 1)
            wanted += float(F.cross_entropy(logits, batch.labels.flatten(), reduction="sum")) * batch.scale
    (tmp_path / "model.py").write_text((made / "model.py").read_text())
    (tmp_path / "job.toml").write_text(JOB.replace(":build", ":goes_on").replace("dp = 2", "dp = 1"))
    given = "--set", f'model.weights="{tmp_path / WHOLE}"', "--set", 'model.drawn=["*.lora_*"]'
    for more in ((), given):
        assert capsys.readouterr()
        run(tmp_path, 1, *more, ranks="2")
        assert json.loads(capsys.readouterr().out)["losses"] == pytest.approx([wanted], rel=1e-6)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            ["q.lora_A.default.weight", "q.lora_A.other.weight"],
            "adapters of several names were trained: default, other",
        ),
        (["q.lora_A.default.weight", "model.norm.weight"], "model.norm.weight was trained, and is no adapter's"),
        (["q.lora.weight"], "q.lora.weight was trained"),
    ],
)
def test_what_is_no_adapter_s_is_refused(names: list[str], said: str, tmp_path: Path) -> None:
    """Nothing is left out of what was trained."""
    manifest: Any = SimpleNamespace(training=SimpleNamespace(shapes=dict.fromkeys(names, (2, 2))))
    with pytest.raises(PiperError, match=said):
        write_adapter(tmp_path, manifest, tmp_path / "out", DType.FP32)
    assert not (tmp_path / "out").exists()
