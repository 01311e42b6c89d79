"""What a profile knows of one job and not of another: nobody is told that the model's error is a gain."""

from pathlib import Path
from typing import Any

import pytest

from cost_models.profile.file import profile_text
from cost_models.profile.profile import MeasuredCost, OpEntry, Profile, ProfileMachine
from cost_models.profile.shapes import op_shapes
from ir.graph.classes import node_classes
from ir.job import Job, load_job
from piper_sim.study.compare import compare
from piper_sim.study.explain import explain
from piper_sim.study.predict import predict
from piper_sim.study.search import search

MACHINE = ProfileMachine("x", 1, "NVIDIA H100 80GB HBM3", 1, {}, "2026-01-01T00:00:00Z")
LISTS = {"tp": [1, 2], "pp": [2], "name": ["1f1b"], "zero": [1], "microbatch_size": [1], "recompute": ["none"]}


def job(profile: str | None, **more: dict[str, Any]) -> Job:
    table: dict[str, Any] = {
        "model": {"config": "llama3-8b", "num_hidden_layers": 4, "seq_len": 2048},
        "cluster": {"gpu": "h100-sxm", "nodes": 1, "gpus_per_node": 4},
        "parallel": {"tp": 2, "pp": 2},
        "schedule": {"microbatches": 4},
        "costs": {"profile": profile} if profile else {},
    }
    return load_job(table | more)


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """Every op of the job, twice as long as modelled."""
    p = predict(job(None)).planned
    named = zip(p.plan.graph.nodes, node_classes(p.plan.graph), op_shapes(p.plan.graph), strict=True)
    ops = {c: OpEntry(MeasuredCost(2 * sum(p.model.node_shares(n)), 0.0, 9), shape=s) for n, c, s in named if s}
    (tmp_path / "profile.json").write_text(profile_text(Profile.of(MACHINE, ops)))
    return str(tmp_path / "profile.json")


def test_a_search_says_that_its_best_is_modelled_where_the_job_is_measured(profile: str) -> None:
    found = search(job(profile, search=LISTS))
    assert found.best is not None and found.best["changes"]["parallel.tp"] == 1
    mine = predict(job(profile)).to_dict()["cost_shares"]["modelled"]
    assert found.best["cost_shares"]["modelled"] > 0.5 > 0.1 > mine
    assert len(found.warnings) == 1 and "of the best's seconds are modelled" in found.to_dict()["warnings"][0]
    assert search(job(None, search=LISTS)).warnings == []
    assert search(job(profile, search=LISTS | {"tp": [2]})).warnings == []


def test_forward_computed_again_gains_nothing_by_not_being_measured(profile: str) -> None:
    """It takes a forward more, at any speed of the machine; here that forward would be modelled, and quicker."""
    asked = [{w.name: w.gain_s for w in explain(job(p)).what_ifs} for p in (profile, None)]
    assert "recompute full" not in asked[0] and "one more microbatch" in asked[0] and asked[1]["recompute full"] < 0


def test_a_comparison_says_who_is_measured(profile: str) -> None:
    other = {"parallel": {"tp": 1, "pp": 2, "dp": 2}, "schedule": {"microbatches": 2}}
    said = "costs.profile has not measured may decide it"
    assert said in compare([job(profile), job(profile, **other)]).why
    assert said not in compare([job(profile), job(profile)]).why
    assert said not in compare([job(None), job(None, **other)]).why
