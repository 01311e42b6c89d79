"""Muon of a module of one's own: torch's, of the matrices of its layers; AdamW of embeddings, head and all else."""

import json
from pathlib import Path

import pytest

from ir.core.errors import PiperError
from ir.job import load_job
from ir.job.build import prepare
from tests.executor.frontend.class_runs import MUON, ClassPlan, _graph, far, sets_of

CASES: list[tuple[str, ClassPlan, tuple[str, ...]]] = [
    ("llama", (2, 1, 0, "1f1b"), ()),
    ("llama", (1, 2, 1, "1f1b"), ("optimizer.tp_mode=duplicated", "parallel.tp=2")),
    ("qwen3", (2, 1, 0, "dualpipe"), ()),
    ("gpt2", (2, 2, 1, "1f1b"), ()),
    ("gemma3", (2, 1, 0, "zb1p"), ()),
    ("Both", (2, 1, 0, "1f1b"), ()),
    ("mixtral", (2, 1, 0, "1f1b"), ()),  # its stacks are AdamW's, unless they are tagged as experts
    ("qwen3_moe", (1, 2, 1, "1f1b"), ("parallel.ep=2",)),
]


@pytest.mark.parametrize(("name", "plan", "more"), CASES, ids=str)
def test_a_class_trains_as_by_torchs_muon(name: str, plan: ClassPlan, more: tuple[str, ...]) -> None:
    assert 0.0 <= far(name, *sets_of(plan, "none"), MUON, *more) <= 1e-10


def test_embeddings_among_the_layers_are_no_hidden_matrices(tmp_path: Path) -> None:
    """T5's distances, a table in its first layer."""
    for name, drop in (("as captured", False), ("without the word", True)):
        graph = json.loads(Path(_graph("Both")).read_text())
        assert any("relative_attention_bias" in n for n in graph["tables"])
        if drop:
            graph["tables"] = []
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(graph))
        job = load_job(
            {
                "model": {"graph": str(file), "seq_len": 8},
                "cluster": {"gpu": "h100-sxm"},
                "precision": {"compute": "fp64"},
            },
            [MUON],
        )
        parts = [e.part for e in prepare(job).base.entries]
        table = {p.name: p.table for part in parts for p in part.params if "relative_attention_bias" in p.name}
        assert table and set(table.values()) == {not drop}


@pytest.mark.parametrize(
    ("change", "words"),
    [("tables", "does not say which matrices are embeddings"), ("embed", "what is ahead of the first")],
)
def test_a_file_that_does_not_tell_them_apart_is_refused(change: str, words: str, tmp_path: Path) -> None:
    graph = json.loads(Path(_graph("llama")).read_text())
    if change == "tables":
        del graph["tables"]
    else:
        graph["chunks"] = [c for c in graph["chunks"] if c["name"] != "embed"]
    (tmp_path / "model.json").write_text(json.dumps(graph))
    table = {
        "model": {"graph": str(tmp_path / "model.json"), "seq_len": 8},
        "cluster": {"gpu": "h100-sxm"},
        "precision": {"compute": "fp64"},
    }
    prepare(load_job(table, []))
    with pytest.raises(PiperError, match=words):
        prepare(load_job(table, [MUON]))
