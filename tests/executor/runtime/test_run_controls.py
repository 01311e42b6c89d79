"""Controls that must go red: what a wrong executor would do, and that the comparison or the check sees it."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor.launch import run as cli
from executor.launch.launch import RankFailed
from ir.core.errors import PiperError
from ir.job.build import directives_json
from ir.plan.plan import AT_START, OpKind, Plan
from ir.verify import check_plan
from tests.executor import faults
from tests.executor.runs import alone, error, judged, run

VISIBLE = 1e-3
GPIPE = ("schedule.name=gpipe",)
DUAL = ("schedule.name=dualpipe",)


@pytest.mark.parametrize(
    ("fault", "sets"),
    [
        (faults.no_reduction, DUAL),
        (faults.doubled_gradients, GPIPE),
        (faults.doubled_gradients, (*GPIPE, "optimizer.clip_norm=0")),
        (faults.swapped_sends, GPIPE),
        (faults.one_batch, GPIPE),
    ],
    ids=lambda x: getattr(x, "__name__", None) or x[-1],
)
def test_a_wrong_executor_is_seen(fault: Any, sets: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "RANK", fault)
    found = error(run(*sets), alone(*sets))
    assert found > VISIBLE or math.isnan(found)


def test_a_buffer_freed_early_ends_the_run_at_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "RANK", faults.freed_early)
    with pytest.raises(RankFailed, match=r"1F0 reads what 0F0/.* made, which was freed already") as info:
        run(*GPIPE)
    assert (info.value.rank, info.value.op) == (1, "1F0")


def _swapped(plan: Plan) -> Plan:
    """Rank 0 sends its first two messages the other way round."""
    first, second = np.flatnonzero((plan.kind == OpKind.SEND) & (plan.program == 0))[:2]
    mb = plan.mb.copy()
    mb[[first, second]] = mb[[second, first]]
    return replace(plan, mb=mb)


def _freed(plan: Plan) -> Plan:
    """What rank 1 receives first is freed before anybody reads it."""
    b = plan.buffers
    brought = next(k for k in range(len(b)) if b.node[k] < 0 and plan.program[b.slot[k]] == 1)
    reader = next(i for i in range(len(plan)) if plan.text(i) == "1F0")
    free, cover = b.free.copy(), b.free_cover.copy()
    free[brought], cover[brought] = reader, AT_START
    return replace(plan, buffers=replace(b, free=free, free_cover=cover))


@pytest.mark.parametrize("break_it", [_swapped, _freed], ids=lambda f: f.__name__)
def test_a_plan_that_says_so_is_refused_before_it_runs(break_it: Callable[[Plan], Plan], tmp_path: Path) -> None:
    _, plan = judged(tmp_path, *GPIPE)
    check_plan(plan)
    with pytest.raises(PiperError) as info:
        check_plan(break_it(plan))
    assert info.value.kind.exit_code == 3


def test_copies_that_nothing_reduces_are_refused(tmp_path: Path) -> None:
    strategy = [d for d in directives_json(judged(tmp_path, *DUAL)[0].strategy) if d["op"] != "replicate"]
    (tmp_path / "strategy.json").write_text(json.dumps(strategy))
    with pytest.raises(PiperError, match="no replicate names them") as info:
        run(f"schedule.directives={tmp_path / 'strategy.json'}")
    assert info.value.kind.exit_code in (2, 3)
