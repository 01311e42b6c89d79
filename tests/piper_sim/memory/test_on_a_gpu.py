"""Predicted bytes against what torch's allocator counted where plans ran on a GPU: tests/data/run_h200.csv."""

import csv
from pathlib import Path
from typing import Any

import pytest

from piper_sim import load_job, predict

FILE = Path(__file__).parents[2] / "data" / "run_h200.csv"
ROWS = list(csv.DictReader(line for line in FILE.read_text().splitlines() if not line.startswith("#")))
COMMON = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 2048, "vocab_size": 128256}
MODELS: dict[str, dict[str, Any]] = {
    "llama-1b": COMMON
    | {"config": "llama3-8b", "num_hidden_layers": 16, "intermediate_size": 8192, "head_dim": 64}
    | {"tie_word_embeddings": True},
    "mixtral-4": COMMON
    | {"config": "mixtral-8x7b", "num_hidden_layers": 4, "intermediate_size": 4096, "vocab_size": 32000}
    | {"num_attention_heads": 16, "num_local_experts": 8, "head_dim": 128},
}
BF16 = {name: "bf16" for name in ("params", "compute", "grads", "optimizer")}
PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes")


def _predicted(row: dict[str, str], gpu: str = "h200-sxm", **precision: str) -> dict[str, Any]:
    job = {
        "model": MODELS[row["model"]] | {"seq_len": int(row["seq_len"])},
        "cluster": {"gpu": gpu, "nodes": 1, "gpus_per_node": 1},
        "schedule": {
            "name": "1f1b",
            "microbatches": int(row["microbatches"]),
            "microbatch_size": int(row["microbatch_size"]),
            "recompute": row["recompute"],
        },
        "precision": BF16 | precision,
    }
    memory: dict[str, Any] = predict(load_job(job)).to_dict()["memory"]
    return memory


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["job"])
def test_the_allocator_hands_out_what_is_predicted(row: dict[str, str]) -> None:
    memory, found = _predicted(row), int(row["allocated"])
    assert memory["peak_allocated_bytes"]["0"] == pytest.approx(found, rel=0.003)
    low, high = memory["reserved_band_bytes"]["0"]
    assert low <= int(row["reserved"]) <= high
    other = _predicted(row, optimizer="fp32")["peak_allocated_bytes"]["0"]
    assert other != pytest.approx(found, rel=0.1)


def test_the_context_is_what_the_driver_took() -> None:
    context = _predicted(ROWS[0])["breakdown_bytes"]["0"]["context"]
    assert context == pytest.approx(552_402_944, rel=0.02)  # on the same GPU, before anything was allocated
