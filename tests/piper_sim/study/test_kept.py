"""What was worked out for one job and kept serves the next only where it is the same: warm and cold answers agree."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ir.job.build
from ir.job.cache import GraphCache, PlanCache
from ir.job.load import job_from
from ir.plan.kept import MOST_ANSWERS, once_per_plan
from ir.plan.plan import Plan
from piper_sim.folding.ground import MOST_PLACEMENTS, DevicePlacement
from piper_sim.pricing import hosts
from piper_sim.study.predict import predict, step_of
from piper_sim.study.prediction import Prediction
from tests.ir.job.test_job_cache import COSTS, PLAIN, Edit, prepared

MORE: list[Edit] = [
    {},
    {"costs.cuda_graphs": "passes"},
    {"costs.host_model": "one-queue"},
    {"costs.software": "megatron"},
    {"costs.interference": "maxmin"},
    {"cluster.speed": {"1": 0.5, "2": 0.25}},
    {"cluster.speed": {"2": 0.5}},
    {"cluster.hbm_GBps": 900},
    {"parallel.dp": 4},
    {"parallel.zero": 3},
    {"schedule.recompute": "full"},
    {"routing.kind": "zipf"},
]


def predicted(edit: Edit) -> Prediction:
    table: dict[str, dict[str, Any]] = {k: dict(v) for k, v in PLAIN.items()}
    for key, value in edit.items():
        section, name = key.split(".")
        table.setdefault(section, {})[name] = value
    return predict(job_from(table))


def facts(p: Prediction) -> list[object]:
    """All seconds, all bytes, and what is said of them, but for the clock."""
    seconds = [p.costs.duration, p.costs.shares, p.run.start, p.run.end]
    held = [(r.reserved, r.allocated, r.fits, r.band) for r in p.planned.reserved]
    return [[s.tobytes() for s in seconds], held, p.planned.memory.level.tobytes(), p.breakdown.to_dict()]


def strange(jobs: list[Edit], patch: pytest.MonkeyPatch) -> list[Edit]:
    """Jobs whose answer behind others differs from their answer alone."""
    warm = [facts(predicted(edit)) for edit in jobs]
    out = []
    for edit, found in zip(jobs, warm, strict=True):
        patch.setattr(ir.job.build, "PLANS", PlanCache())
        patch.setattr(ir.job.build, "GRAPHS", GraphCache())
        patch.setattr(DevicePlacement, "_made", {})
        if facts(predicted(edit)) != found:
            out.append(edit)
    return out


def test_answers_do_not_depend_on_what_was_asked_before(monkeypatch: pytest.MonkeyPatch) -> None:
    assert strange([*MORE, *COSTS, *MORE[:4]], monkeypatch) == []
    first: dict[Plan, Any] = {}
    ask = hosts._ahead
    monkeypatch.setattr(hosts, "_ahead", lambda plan, *more: first.setdefault(plan, ask(plan, *more)))
    assert strange(MORE[:2], monkeypatch) == [MORE[1]]


def test_a_step_alone_is_the_step_whose_parts_are_told() -> None:
    found = [predicted(edit) for edit in [*MORE, *COSTS]]
    assert [step_of(p.planned) for p in found] == [p.iteration_s for p in found]
    assert len({p.iteration_s for p in found}) > len(MORE)


def counted() -> tuple[Callable[..., int], list[int]]:
    asked: list[int] = []

    @once_per_plan
    def ops(plan: Plan, more: int) -> int:
        asked.append(more)
        return len(plan) + more

    return ops, asked


def test_each_answer_is_worked_out_once_and_goes_with_its_plan() -> None:
    ops, asked = counted()
    one, two = prepared().lowered(), prepared({"parallel.dp": 4}).lowered()
    found = [ops(one, 1), ops(two, 1), ops(one, 1), ops(one, 2)]
    assert found == [len(one) + 1, len(two) + 1, len(one) + 1, len(one) + 2] and asked == [1, 1, 2]
    for more in range(MOST_ANSWERS + 3):
        ops(one, more)
    asked.clear()
    assert ops(one, MOST_ANSWERS + 2) and not asked  # the last are there
    assert ops(one, 0) and asked == [0]  # the first was forgotten
    gone = weakref.ref(one)
    del one
    gc.collect()
    assert gone() is None


def test_placements_are_shared_by_all_that_say_where_ranks_stand() -> None:
    mesh = prepared().mesh
    same, slow = DevicePlacement.of(mesh, 8, {}), DevicePlacement.of(mesh, 8, {"1": 0.5})
    assert same is DevicePlacement.of(prepared({"parallel.zero": 2}).mesh, 8, {}) and (slow.speed == 0.5).any()
    assert not np.array_equal(DevicePlacement.of(mesh, 1, {}).node, same.node)
    for per_node in range(2, 2 + MOST_PLACEMENTS):
        DevicePlacement.of(mesh, per_node, {})
    assert DevicePlacement.of(mesh, 8, {"1": 0.5}) is not slow
