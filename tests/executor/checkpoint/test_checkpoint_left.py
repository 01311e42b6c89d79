"""What a save leaves on the disk, and what the Hub is given of it."""

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import safetensors.torch
import torch

from executor.checkpoint.hub import write_hub
from executor.checkpoint.manifest import read_manifest
from ir.core.errors import PiperError
from ir.core.work import DType
from tests.executor.checkpoint.checkpoints import State, drawn
from tests.executor.checkpoint.test_checkpoint_log import SLOTS, Golden
from tests.executor.runtime.test_run_families import sets as family

FEW = "model.num_hidden_layers=2", "optimizer.name=sgd"

LEFT = {
    "dualpipe": (
        "schedule.name=dualpipe",
        "parallel.dp=2",
        "parallel.zero=1",
        "model.tie_word_embeddings=true",
        FEW[0],
    ),
    "cut": ("parallel.pp=1", "parallel.tp=2", "parallel.dp=2", "parallel.zero=3", "parallel.bucket_MiB=0.05", FEW[0]),
    "experts": ("model.config=tiny-moe", "parallel.pp=1", "parallel.dp=2", "parallel.ep=2", *FEW),
    "corrected": ("parallel.pp=1", "optimizer.name=sgd", *family("kimi", "model.num_hidden_layers=2")),
}


def listed(folder: Path) -> str:
    """Files, and of the Hub's what is in them."""
    out = []
    for file in sorted(folder.iterdir()):
        if file.suffix == ".json":
            out.append(f"{file.name}: {file.read_text()}")
            continue
        for name, t in sorted(safetensors.torch.load_file(file).items()):
            digest = sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:12]
            out.append(f"{file.name} {name} {[*t.shape]} {t.dtype} {digest}")
    return "\n".join(out)


@pytest.mark.parametrize("name", LEFT)
def test_what_a_save_leaves_and_what_the_hub_is_given(name: str, golden: Golden, tmp_path: Path) -> None:
    state = State.of(tmp_path / "job", *LEFT[name], "schedule.microbatches=4")
    slots = ("weight",) if "optimizer.name=sgd" in LEFT[name] else SLOTS
    state.fill(drawn(state, slots, torch.float64))
    checkpoint = state.save(tmp_path / "saved", 3, run="one")
    manifest = read_manifest(checkpoint)
    pieces = [f"{n} {p.file} {p.piece.runs()}" for n, found in manifest.parameters.items() for p in found]
    told = [*pieces, *(f"{k}: {getattr(manifest, k)}" for k in ("step", "tokens", "training", "plan_digest", "ranks"))]
    (tmp_path / "hub40000").mkdir()  # a folder that is there, and empty
    for most, form in ((2**30, DType.FP32), (40_000, DType.BF16)):
        told += write_hub(checkpoint, manifest, out := tmp_path / f"hub{most}", form, most)
        told.append(listed(out))
    if name == "corrected":  # as they were read, from where they are still
        for n, path in enumerate((tmp_path / "hub40000", tmp_path / "none")):
            job = {**manifest.job, "model": {**manifest.job["model"], "weights": str(path)}}
            try:
                told.append(str(write_hub(checkpoint, replace(manifest, job=job), tmp_path / f"again{n}", DType.FP32)))
            except PiperError as error:
                told.append(str(error))
    told += (checkpoint / "manifest.json").read_text().splitlines()[:3]
    for where in (tmp_path / "saved", tmp_path / "job" / "job.toml"):
        with pytest.raises(PiperError) as error:
            write_hub(checkpoint, manifest, where, DType.FP32)
        told.append(str(error.value))
    golden(f"left, {name}.txt", "\n".join(told).replace(str(tmp_path), ".") + "\n")
