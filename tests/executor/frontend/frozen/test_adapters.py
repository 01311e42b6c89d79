"""Adapters of a library train as by plain torch, from the files of the model that they are put in and values drawn."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from executor.checkpoint.__main__ import main as lister
from executor.frontend.capture import capture
from executor.modules.decoder import DecoderModel
from executor.modules.hub_weights import WHOLE, HubCheckpoint
from executor.modules.user.divided.linears import divide
from executor.modules.user.model import UserModel
from executor.parallel.inline import RankAxis, RankRegion
from ir.core.errors import PiperError
from ir.core.work import DType
from ir.job import load_job
from ir.workload import load_config
from piper_sim.app.cli import main
from tests.executor.frontend import class_runs as hub
from tests.executor.frontend.class_runs import ClassPlan, _alone, far, run_class, sets_of
from tests.executor.frontend.frozen import test_frozen
from tests.executor.frontend.models import wrapped_classes
from tests.executor.modules.hub import quiet
from tests.executor.runs import distance

PLANS: list[tuple[ClassPlan, str, tuple[str, ...]]] = [
    ((2, 1, 0, "1f1b"), "none", ()),
    ((1, 2, 1, "1f1b"), "full", ()),
    ((2, 2, 3, "dualpipe"), "none", ()),
    ((1, 1, 0, "1f1b"), "none", ("parallel.tp=2",)),
    ((2, 1, 0, "zbv"), "none", ("parallel.tp=2", "parallel.sequence_parallel=true")),
]


@pytest.fixture(autouse=True)
def _wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "hub_classes", wrapped_classes)


@pytest.mark.filterwarnings("ignore")  # peft calls what transformers will have no more
@pytest.mark.parametrize(
    ("name", "plan", "recompute", "more"),
    [
        pytest.param(name, *plan, marks=pytest.mark.slow if (k + n) % 2 else ())  # each plan by one of the two is quick
        for k, plan in enumerate(PLANS)
        for n, name in enumerate(("llama_peft", "qwen3_wrapped"))
    ],
    ids=str,
)
def test_adapters_train_as_by_plain_torch(name: str, plan: ClassPlan, recompute: str, more: tuple[str, ...]) -> None:
    assert 0.0 <= far(name, *sets_of(plan, recompute), *more) <= 1e-10


@pytest.mark.parametrize(
    ("plan", "recompute", "more"),
    [plan if k in (0, 2, 4) else pytest.param(*plan, marks=pytest.mark.slow) for k, plan in enumerate(PLANS)],
    ids=str,
)
def test_adapters_are_drawn_beside_the_files_of_what_they_are_put_in(
    plan: ClassPlan, recompute: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    """As where the rest is read, which draws nothing. Files have its names, without the library's."""
    save_file({n: p.detach() for n, p in wrapped_classes.base().named_parameters()}, tmp_path / WHOLE)
    given = f'model.weights="{tmp_path}"', 'model.drawn=["*.lora_?.*"]'
    found, grads, params = run_class("llama_wrapped", *sets_of(plan, recompute), *more, *given)
    losses, norms, their_grads, their_params = _alone("llama_loaded")
    assert found["losses"] == pytest.approx(losses, rel=1e-10)
    assert found["grad_norms"] == pytest.approx(norms, rel=1e-10)
    assert 0.0 <= distance(grads, their_grads) <= 1e-10 and 0.0 <= distance(params, their_params) <= 1e-10
    assert all("lora_" in n for n in params) and distance(params, _alone("llama_wrapped")[3]) > 1e-3


def test_what_build_converts_is_captured_in_the_format_of_the_job(tmp_path: Path) -> None:
    """A module is cast behind build(), whatever that has made of it."""
    text = "from tests.executor.frontend.models.wrapped_classes import llama_wrapped as build\n"
    (tmp_path / "model.py").write_text(f"{text}\nimport torch\ndef cast(): return build().to(torch.bfloat16)\n")
    with quiet():
        given: dict[str, Any] = {"batch": (1, 8), "tags": {"PP": wrapped_classes.LAYERS["llama_wrapped"]}}
        wanted, found = (capture(f"{tmp_path}/model.py:{n}", dtype=DType.FP32, **given) for n in ("build", "cast"))
    assert found == {**wanted, "model": found["model"]} and found["chunks"][1]["frozen"]


def test_a_plan_of_tp_that_names_nothing_is_refused() -> None:
    """That of a class that is wrapped now, say, as peft hands it on."""
    made = wrapped_classes.llama_wrapped()
    vars(made)["tp_plan"] = {"model.layers.*.self_attn.q_proj": "colwise"}
    with pytest.raises(PiperError, match="Wrapping has nothing that its own tp_plan names"):
        divide(made, {}, RankRegion(RankAxis(2, 0)))


SOURCE = test_frozen.SOURCE.replace("self.base", "self.base_layer").replace("self.more", "self.lora_A")
JOB = test_frozen.JOB.replace("seq_len", 'weights = "given", drawn = ["*.lora_*"], seq_len')


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job, and beside it the values of all but the adapters, as they were called before there were any."""
    (tmp_path / "model.py").write_text(SOURCE)
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "given").mkdir()
    space: dict[str, Any] = {}
    exec(SOURCE, space)
    torch.manual_seed(5)
    values = {n.replace("base_layer.", ""): t for n, t in space["Net"]().state_dict().items() if "lora" not in n}
    save_file(values, tmp_path / "given" / WHOLE)
    return tmp_path / "job.toml"


def test_a_run_goes_on_with_adapters_and_is_written_with_what_they_stand_in(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep, out = job.parent / "keep", job.parent / "out"
    _, whole = run(job, capsys, 3)
    _, first = run(job, capsys, 1, "--save", str(keep))
    _, again = run(job, capsys, 3, "--set", "parallel.pp=1", "--resume", str(keep), ranks="1")
    assert first["losses"] + again["losses"] == pytest.approx(whole["losses"], rel=1e-12)
    assert lister([str(keep), "--hub", str(out)]) == 0 and capsys.readouterr()
    found, values = load_file(out / WHOLE), load_file(job.parent / "given" / WHOLE)
    frozen = {n for n in values if "head" not in n}
    assert found.keys() == values.keys() | {f"layers.{k}.lora_A.{n}" for k in (0, 1) for n in ("weight", "bias")}
    assert all(torch.equal(found[n], values[n]) for n in frozen)
    _, later = run(job, capsys, 1, "--set", 'model.weights="out"')  # adapters are there, and are read
    _, all_of_it = run(job, capsys, 1, "--set", 'model.weights="out"', "--set", "model.drawn=[]")
    assert later["losses"] == all_of_it["losses"] != first["losses"]
    _, other = run(job, capsys, 1, "--set", "model.seed=1")
    assert other["losses"] != first["losses"]


def test_what_files_lack_is_refused_unless_the_job_says_so(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, told = run(job, capsys, 1, "--set", "model.drawn=[]")
    assert (code, told["error"]["kind"]) == (2, "io") and "no tensor for layers.0.lora_A.weight" in told["error"][
        "message"
    ]
    assert told["error"]["suggestion"] == 'model.drawn = ["layers.*.lora_A.weight"], if it is new and trained'
    code, told = run(job, capsys, 1, "--set", 'model.drawn=["*.lora_A.weight"]')
    assert code == 2 and "no tensor for layers.0.lora_A.bias" in told["error"]["message"]
    code, told = run(job, capsys, 1, "--set", 'model.drawn=["*.lora_*", "*.lara_*"]')
    assert (code, told["error"]["key"]) == (2, "model.drawn") and "'*.lara_*'" in told["error"]["message"]
    given = load_file(job.parent / "given" / WHOLE)
    save_file({n: t for n, t in given.items() if n != "embed.weight"}, job.parent / "given" / WHOLE)
    code, told = run(job, capsys, 1, "--set", 'model.drawn=["*.lora_*", "embed.*"]')
    assert (code, told["error"]["key"]) == (2, "model.drawn") and "embed.weight" in told["error"]["message"]
    save_file({**given, "lora_A.weight": torch.zeros(2)}, job.parent / "given" / WHOLE)
    code, told = run(job, capsys, 1)
    assert code == 2 and "no parameter for lora_A.weight" in told["error"]["message"]
    with pytest.raises(PiperError, match="there are none: all is drawn"):
        load_job({"model": {"config": "tiny-llama", "drawn": ["*"]}})


class _Odd(nn.Module):
    """Adapters that begin at values of others."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lora = nn.Embedding(4, 2), nn.Linear(2, 4)
        self.lora.weight.data.copy_(self.embed.weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits."""
        found: torch.Tensor = self.lora(self.embed(ids))
        return found


def test_values_made_of_those_that_are_not_there_are_refused(tmp_path: Path) -> None:
    save_file({"embed.weight": torch.ones(4, 2)}, tmp_path / WHOLE)
    with pytest.raises(PiperError, match=r"build\(\) makes lora.weight of the values of others"):
        UserModel(_Odd, values=HubCheckpoint(tmp_path, ("lora.*",)))


def test_a_head_of_a_config_may_be_drawn(tmp_path: Path) -> None:
    """By its name, as without files."""
    config = load_config("tiny-llama")
    plain = DecoderModel(config, seed=3, dtype=torch.float64)
    values = {n: p.detach() for n, p in plain.build(plain.chunks).params.items()}
    save_file({n: 0 * p for n, p in values.items() if n != "lm_head.weight"}, tmp_path / WHOLE)
    files = HubCheckpoint(tmp_path, ("lm_head.*",))
    files.check(plain.shapes, {})
    model = DecoderModel(config, seed=3, dtype=torch.float64, weights=files)
    found = model.build(model.chunks).params
    assert {n for n, p in found.items() if torch.equal(p, values[n])} == {"lm_head.weight"}


def run(job: Path, capsys: pytest.CaptureFixture[str], steps: int, *flags: str, ranks: str = "2") -> tuple[int, Any]:
    """The exit code and the object."""
    usual = ["run", str(job), "-n", ranks, "--steps", str(steps), "--backend", "local", "--json"]
    code = main([*usual, *flags])
    return code, json.loads(capsys.readouterr().out)
