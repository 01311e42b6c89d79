"""Frozen experts that ranks share out: rows and their gradients travel, no gradient of theirs is made or reduced."""

import pytest

import piper_sim
from ir.core.ops import Pass
from ir.job import load_job
from ir.job.build import prepare
from tests.executor.frontend import class_runs as hub
from tests.executor.frontend.class_runs import LENGTH, ClassPlan, _graph, far, run_class, sets_of
from tests.executor.frontend.models import expert_classes

PLANS: list[tuple[str, ClassPlan, str]] = [
    ("mixtral_adapted", (1, 2, 0, "1f1b"), "none"),
    ("mixtral_adapted", (2, 2, 3, "dualpipe"), "none"),
    ("qwen3_moe_frozen", (2, 2, 1, "zb1p"), "full"),
    ("qwen3_moe_frozen", (1, 2, 2, "1f1b"), "none"),
    ("qwen3_moe_half", (2, 2, 2, "1f1b"), "none"),
    ("qwen3_moe_half", (1, 2, 3, "1f1b"), "full"),
    ("qwen3_moe_ahead", (2, 2, 1, "1f1b"), "none"),
    ("qwen3_moe_ahead", (1, 2, 3, "zb1p"), "full"),
    ("qwen3_moe_one", (2, 2, 0, "dualpipe"), "none"),
]
EP = "parallel.ep=2"


@pytest.fixture(autouse=True)
def _experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "hub_classes", expert_classes)


# Every kind of module, level of ZeRO and schedule; the others are slow.
QUICK = (1, 2, 4, 7, 8)


@pytest.mark.parametrize(
    ("name", "plan", "recompute"),
    [case if k in QUICK else pytest.param(*case, marks=pytest.mark.slow) for k, case in enumerate(PLANS)],
    ids=str,
)
def test_frozen_experts_on_several_ranks_train_the_rest_as_by_plain_torch(
    name: str, plan: ClassPlan, recompute: str
) -> None:
    assert 0.0 <= far(name, *sets_of(plan, recompute), EP) <= 1e-10


def test_each_rank_holds_its_experts_and_neither_gradients_nor_state_of_theirs() -> None:
    parts = dict(expert_classes.qwen3_moe_frozen().named_parameters())
    experts = sum(p.numel() for n, p in parts.items() if ".experts." in n)
    trained = sum(p.numel() for p in parts.values() if p.requires_grad)
    found, _, _ = run_class("qwen3_moe_frozen", *sets_of((1, 2, 0, "1f1b"), "none"), EP)
    held = found["memory"]["persistent_bytes"]["0"]
    assert held["parameters"] - held["gradients"] == experts // 2 * 8  # both with the buckets' padding
    table = {
        "model": {"graph": _graph("qwen3_moe_frozen", ep=2), "seq_len": LENGTH},
        "cluster": {"gpu": "h100-sxm"},
        "precision": {"compute": "fp64"},
        "parallel": {"dp": 2, "ep": 2, "zero": 0},
        "schedule": {"microbatches": 2},
    }
    told = piper_sim.predict(load_job(table)).to_dict()
    stands = told["memory"]["breakdown_bytes"]["0"]
    assert stands["parameters"] == (trained + experts // 2) * 8 and stands["gradients"] == trained * 8
    assert stands["optimizer"] == 2 * stands["gradients"]
    assert told["parameters"] == {"total": trained + experts, "active": trained + experts // 2, "trained": trained}
    nodes = prepare(load_job(table)).plan().graph.nodes
    assert not [n for n in nodes if n.kind is Pass.W and n.part.endswith(".experts")]
    back = [n.part.rpartition(".")[2] for n in nodes if n.kind is Pass.I and n.message is not None]
    assert back == ["combine", "dispatch"] * 3
