"""What a run of many steps keeps: every loss, and a trace of its newest steps, the same ones on every rank."""

from typing import Any

import pytest

from executor.launch import run as cli
from executor.runtime import rank
from executor.runtime.rank import traced_steps, train_rank
from executor.runtime.worker import RankContext
from ir.plan.places import RankPlacement
from tests.executor.runs import judged, run

SETS = ("parallel.dp=2", "parallel.zero=1", "schedule.microbatches=3")


def forgetful(ctx: RankContext, **spec: Any) -> Any:
    """Keeps as many rows as three steps and a half have."""
    _, plan = ctx.given()
    rank.TRACED = _rows(plan) * 7 // 2
    return train_rank(ctx, **spec)


def _rows(plan: Any) -> int:
    """Of all ranks in one step."""
    places = RankPlacement.of(plan)
    return sum(int(plan.bounds[p + 1] - plan.bounds[p]) for p in map(places.program, range(places.ranks)))


def test_a_trace_has_the_newest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(*SETS, steps=8)
    monkeypatch.setattr(cli, "RANK", forgetful)
    ran = run(*SETS, steps=8)
    assert ran.object["losses"] == whole.object["losses"] and len(ran.object["losses"]) == 8
    rows = _rows(ran.plan)
    assert [len(r.trace.step) for r in (whole, ran)] == [8 * rows, 3 * rows]
    assert set(ran.trace.step.tolist()) == {5, 6, 7} and 0 < ran.object["iteration_s"] < 10


def test_four_million_rows_are_kept_but_one_step_at_least(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, plan = judged(tmp_path, *SETS)
    assert traced_steps(plan, prepared.ranks) == 4_000_000 // _rows(plan)
    monkeypatch.setattr(rank, "TRACED", 7)
    assert traced_steps(plan, prepared.ranks) == 1
