"""Transfers in one order: what a plan that counts on no overlap of messages costs, and where its order comes from."""

import numpy as np
import pytest

from ir.job.cache import PLANS
from ir.lower import global_comm_order
from ir.lower.global_comm_order import OpKind, PlanBuilder
from piper_sim import load_job, predict
from piper_sim.study.explain.what_if import what_ifs

SCHEDULES = ("1f1b", "zbv", "dualpipe", "dualpipev", "interleaved-1f1b")
JOBS = {
    "qwen3-30b-a3b": {"pp": 4, "ep": 8},
    "llama3-8b": {"pp": 4},
}


def price(config: str, schedule: str) -> float:
    """Step with ordered transfers over the step without."""
    PLANS.clear()
    table = {
        "model": {"config": config, "seq_len": 4096},
        "cluster": {"gpu": "h100-sxm", "nodes": 4},
        "parallel": JOBS[config],
        "schedule": {"name": schedule, "microbatches": 16},
    }
    plain, ordered = (predict(load_job(table, [f"schedule.p2p={p}"])) for p in ("overlapped", "ordered"))
    assert ordered.to_dict()["messages"] == "any order"
    return ordered.iteration_s / plain.iteration_s


@pytest.mark.parametrize("config", JOBS)
def test_an_order_by_work_costs_little_and_one_by_rows_much(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control is the order by rows of the plan, in which a stage's pass in ten pieces takes ten times one's."""
    prices = [price(config, name) for name in SCHEDULES]
    assert max(prices) <= 1.05 and min(prices) >= 0.99

    def by_rows(draft: PlanBuilder) -> np.ndarray:
        return np.array([s.kind is not OpKind.SEND for s in draft.templates.shapes], dtype=np.int64)

    monkeypatch.setattr(global_comm_order, "_lengths", by_rows)
    assert max(price(config, name) for name in SCHEDULES) > 1.08
    PLANS.clear()


def test_what_a_plan_counts_on_is_said_and_priced() -> None:
    found = {}
    for name in ("1f1b", "zbv"):
        table = {"model": {"config": "tiny-llama", "num_hidden_layers": 8}, "parallel": {"pp": 2}}
        job = load_job(table, [f"schedule.name={name}"])
        p = predict(job)
        found[name] = p.to_dict()["messages"], [w.changes for w in what_ifs(job, p) if w.name == "ordered transfers"]
    assert found == {"1f1b": ("any order", []), "zbv": ("side by side", [{"schedule.p2p": "ordered"}])}
