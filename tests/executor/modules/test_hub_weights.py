"""Weights that transformers saved are what a run starts from, under any plan; what it saves, transformers reads."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from executor.checkpoint import __main__ as lister
from executor.checkpoint.folder import newest
from executor.checkpoint.hub import write_hub
from executor.checkpoint.manifest import read_manifest
from executor.launch.refusals import refuse
from executor.launch.run import run as launched
from executor.modules.base import evaluate
from executor.modules.decoder import DecoderModel
from executor.modules.hub_weights import INDEX, WHOLE, HubCheckpoint, biases
from executor.parallel.shares import ParamShard
from executor.runtime.batch import MicrobatchLoader
from ir.core.errors import PiperError
from ir.job.run_options import CheckpointOptions, JobRunOptions
from ir.workload.config.load import config_from, raw_config
from tests.executor.modules.hub import Doubled, Theirs, quiet
from tests.executor.modules.test_modules_huggingface import small
from tests.executor.runs import judged, run

torch.set_num_threads(1)
PRESETS = ("tiny-llama", "qwen2-7b", "tiny-moe", "mixtral-8x7b", "deepseek-v2-lite", "gpt2", "nemotron-15b")
V3 = small(raw_config("deepseek-v3"), num_nextn_predict_layers=0)
FAMILIES: dict[str, dict[str, Any]] = {
    **{name: small(raw_config(name)) for name in PRESETS},
    "tied": small(raw_config("tiny-llama"), tie_word_embeddings=True),
    "deepseek-v3": V3,
}
DATA = MicrobatchLoader("synthetic", vocab=32, length=12, microbatches=2, size=1)


def saved(folder: Path, raw: dict[str, Any]) -> Theirs:
    """A model of transformers with values of its own, in float64, as its own `save_pretrained` writes it."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with quiet(), Doubled():
            theirs = Theirs(raw)
            made = torch.Generator().manual_seed(2)
            for name, value in (*theirs.inner.named_parameters(), *theirs.inner.named_buffers()):
                if not name.endswith("inv_freq"):
                    value.data.copy_(torch.randn(value.shape, generator=made, dtype=torch.float64) * 0.3)
            theirs.inner.save_pretrained(folder, max_shard_size="8KB")
    finally:
        torch.set_default_dtype(default)
    return theirs


def loss(theirs: Theirs, step: int = 0) -> float:
    """Of a global batch."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Doubled(), torch.no_grad():
            batches = [DATA.batch(step, 0, mb) for mb in range(DATA.microbatches)]
            return float(sum(theirs.loss(b.ids, b.labels) * b.scale for b in batches))
    finally:
        torch.set_default_dtype(default)


def ours(raw: dict[str, Any], folder: Path) -> float:
    model = DecoderModel(config_from(raw, "x"), dtype=torch.float64, weights=HubCheckpoint(folder))
    built, batches = model.build(model.chunks), [DATA.batch(0, 0, mb) for mb in range(DATA.microbatches)]
    return float(sum(evaluate(built, b.ids, {"head": (b.labels, b.scale)}).detach() for b in batches))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_saved_has_its_loss(family: str, tmp_path: Path) -> None:
    raw = FAMILIES[family]
    wanted, found = loss(saved(tmp_path, raw)), ours(raw, tmp_path)
    assert abs(found - wanted) <= 1e-12 * wanted
    config = config_from(raw, "x")
    shapes = DecoderModel(config).shapes
    HubCheckpoint(tmp_path).check(shapes, biases(shapes, config.moe.scoring if config.moe else None))


def test_a_correction_that_is_not_read_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = loss(saved(tmp_path, V3))
    monkeypatch.setattr("executor.modules.layers.Params.buffer", lambda _, __, size: torch.zeros(size))
    assert abs(ours(V3, tmp_path) - wanted) > 1e-6 * wanted


PLANS = {
    "tiny-moe": ("parallel.pp=1 parallel.tp=2 parallel.dp=2 parallel.ep=4", "parallel.dp=2 parallel.zero=3"),
    "deepseek-v3": ("parallel.pp=2 parallel.dp=2 parallel.ep=2", "parallel.pp=1 parallel.tp=2"),
}


@pytest.mark.parametrize("family", PLANS)
def test_a_run_starts_there_and_transformers_reads_what_it_saves(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start, keep, out = (tmp_path / n for n in ("start", "keep", "out"))
    theirs = saved(start, FAMILIES[family])
    (start / "config.json").write_text(json.dumps(FAMILIES[family]))
    job = [*job_of(start), f'model.weights="{start}"']
    runs = [run(*job, *_batch(plan), steps=1, saving=_saving(keep / str(k))) for k, plan in enumerate(PLANS[family])]
    for r in runs:
        assert abs(r.object["losses"][0] - loss(theirs)) <= 1e-12 * loss(theirs)
    assert lister.main([str(keep / "0"), "--hub", str(out)]) == 0
    assert "config.json" in json.loads(capsys.readouterr().out)["hub"]
    back = ours(FAMILIES[family], out)
    with quiet():
        from transformers import AutoModelForCausalLM

        read = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float64)
    # transformers rounds routers' weights to float32 as it reads them, from 5.24 on: these are taken from the file.
    routers = {
        k: v for f in out.glob("*.safetensors") for k, v in load_file(f).items() if k.endswith("mlp.gate.weight")
    }
    theirs.inner.load_state_dict(read.state_dict() | routers)
    folder = newest(keep / "0")
    manifest = read_manifest(folder)
    captured = replace(manifest, job=manifest.job | {"model": {"module": "model.py:build"}})
    write_hub(folder, captured, tmp_path / "own", manifest.training.format)
    assert {*manifest.training.shapes} <= {*load_file(tmp_path / "own" / WHOLE)}  # as stacked
    assert abs(loss(theirs) - back) <= 1e-12 * back < back < runs[0].object["losses"][0]
    write_hub(folder, manifest, tmp_path / "many", manifest.training.format, 8192)
    files = {f.name: load_file(f) for f in (tmp_path / "many").glob("*.safetensors")}
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    assert len(files) > 1 and index["weight_map"] == {t: name for name, held in files.items() for t in held}
    assert index["metadata"]["total_size"] == sum(t.nbytes for held in files.values() for t in held.values())


def test_what_is_exported_is_whole_wherever_the_job_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = saved(tmp_path / "start", V3)
    (tmp_path / "start" / "config.json").write_text(json.dumps(V3))
    job = 'model.config="start/config.json"', 'model.weights="start"', *job_of(tmp_path)[1:], "schedule.microbatches=2"
    prepared, plan = judged(tmp_path, *job)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    launched(prepared, plan, JobRunOptions(prepared.ranks), _saving(tmp_path / "keep"))
    (tmp_path / "start" / "config.json").unlink()
    assert lister.main([str(tmp_path / "keep"), "--hub", "out"]) == 0
    assert json.loads(Path("out", "config.json").read_text()).items() >= V3.items()
    name = next(n for n, _ in theirs.inner.named_buffers() if n.endswith("e_score_correction_bias"))
    written = {k: v for f in Path("out").glob("*.safetensors") for k, v in load_file(f).items()}
    assert torch.equal(written[name].float(), theirs.inner.get_buffer(name).float())


def job_of(folder: Path) -> tuple[str, ...]:
    return f'model.config="{folder}/config.json"', "model.seq_len=12", "model.num_hidden_layers=3"


def _batch(plan: str) -> list[str]:
    dp = 2 if "dp=2" in plan else 1
    return [*plan.split(), f"schedule.microbatches={2 // dp}"]


def _saving(folder: Path) -> CheckpointOptions:
    return CheckpointOptions(save=str(folder))


def _changed(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """One of the folder's files with other tensors."""
    file = next(f for f in sorted(folder.glob("*.safetensors")) if "model.norm.weight" in load_file(f))
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def _set(name: str, value: Any, tensors: dict[str, Any]) -> None:
    tensors[name] = value


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda f: _changed(f, lambda t: t.pop("model.norm.weight")), "no tensor for model.norm.weight"),
    "shape": (lambda f: _changed(f, partial(_set, "model.norm.weight", torch.ones(3))), "model.norm.weight is 3"),
    "format": (
        lambda f: _changed(f, partial(_set, "model.norm.weight", torch.ones(16).to(torch.float8_e4m3fn))),
        "is stored in F8_E4M3",
    ),
    "left": (lambda f: _changed(f, partial(_set, "model.extra", torch.ones(1))), "no parameter for model.extra"),
    "no folder": (lambda f: [p.unlink() for p in f.iterdir()], "without safetensors files"),
    "no tensors": (lambda f: next(f.glob("*.safetensors")).write_bytes(b"x" * 99), "cannot read tensors"),
    "outside": (lambda f: (f / INDEX).write_text('{"weight_map": {"a": "../a.safetensors"}}'), "not in this folder"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_weights_of_something_else_are_refused_before_ranks_start(wrong: str, tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    saved(folder, FAMILIES["tiny-llama"])
    spoil, said = WRONG[wrong]
    if wrong in ("left", "missing"):
        (folder / INDEX).unlink()  # as files then say themselves what is in them
    spoil(folder)
    (folder / "config.json").write_text(json.dumps(FAMILIES["tiny-llama"]))
    prepared, _ = judged(tmp_path, *job_of(folder), f'model.weights="{folder}"')
    with pytest.raises(PiperError, match=said) as e:
        refuse(prepared)
    assert e.value.key and e.value.allowed and e.value.file


def test_of_a_family_that_is_not_built_weights_are_no_matter(tmp_path: Path) -> None:
    saved(tmp_path, FAMILIES["tiny-llama"])
    raw = FAMILIES["tiny-llama"] | {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    prepared, _ = judged(tmp_path, *job_of(tmp_path), f'model.weights="{tmp_path}"')
    with pytest.raises(PiperError, match="olmo2 is predicted, but has no reference module"):
        refuse(prepared)


def test_a_folder_with_one_file_beside_an_index_is_read_as_transformers_does(tmp_path: Path) -> None:
    raw = FAMILIES["tiny-llama"]
    saved(tmp_path, raw)
    values = {k: v * 2 for f in tmp_path.glob("*.safetensors") for k, v in load_file(f).items()}
    save_file(values, tmp_path / WHOLE, {"format": "pt"})
    with quiet():
        from transformers import AutoModelForCausalLM

        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    name = "model.norm.weight"
    mine = HubCheckpoint(tmp_path).read(name, ParamShard((16,)), torch.float64)
    assert (tmp_path / INDEX).exists() and torch.equal(mine, theirs.state_dict()[name])


@pytest.mark.parametrize("same", [True, False])
def test_a_second_copy_of_what_is_tied_is_one(same: bool, tmp_path: Path) -> None:
    raw = FAMILIES["tied"]
    saved(tmp_path, raw)
    for file in tmp_path.glob("*.safetensors"):
        if (name := "model.embed_tokens.weight") in (tensors := load_file(file)):
            copy = tensors[name].clone() if same else tensors[name] + 1e-3
            save_file(tensors | {"lm_head.weight": copy}, file, {"format": "pt"})
    config = config_from(raw, "x")
    if same:
        HubCheckpoint(tmp_path).check(DecoderModel(config).shapes, {})
        return
    with quiet():
        from transformers import AutoModelForCausalLM

        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert not torch.equal(theirs.lm_head.weight, theirs.model.embed_tokens.weight)
    with pytest.raises(PiperError, match=r"lm_head.weight has other values than model.embed_tokens.weight") as e:
        HubCheckpoint(tmp_path).check(DecoderModel(config).shapes, {})
    assert e.value.suggestion == "model.tie_word_embeddings = false"


def test_corrections_are_given_again_where_training_goes_on(tmp_path: Path) -> None:
    start, keep = tmp_path / "start", tmp_path / "keep"
    saved(start, V3)
    (start / "config.json").write_text(json.dumps(V3))
    job = [*job_of(start), "schedule.microbatches=2"]
    weights = f'model.weights="{start}"'
    run(*job, weights, steps=1, saving=_saving(keep))
    with pytest.raises(PiperError, match="routers' corrections"):
        run(*job, steps=2, saving=CheckpointOptions(resume=str(keep)))
    again = run(*job, weights, steps=2, saving=CheckpointOptions(resume=str(keep)))
    whole = run(*job, weights, steps=2)
    assert again.object["losses"] == whole.object["losses"][1:]
    assert all(np.array_equal(a[n], b[n]) for a, b in zip(again.params, whole.params, strict=True) for n in a)
