"""What the interpreter does per op, counted: calls of our own functions, which a noisy machine does not change."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import executor
import ir
from executor.runtime.batch import blank_batches
from executor.runtime.interpreter import PlanInterpreter
from experiments.interpreter_speed import CASES, alone

OURS = tuple(str(Path(str(package.__file__)).parent) for package in (executor, ir))
MOST = {"one rank, 1f1b": 28, "two ranks, 1f1b": 38, "two ranks, dualpipe": 36}  # per op, and a tenth to spare


def calls(case: dict[str, Any]) -> float:
    """Of functions, per op of rank 0, in its second step."""
    count = 0

    def seen(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(OURS)

    with alone(case) as run:
        batches = blank_batches(run.program)(0)
        run.step(0, batches)
        sys.setprofile(seen)
        try:
            run.step(1, batches)
        finally:
            sys.setprofile(None)
        return count / len(run.ops)


@pytest.mark.parametrize("name", CASES)
def test_an_op_with_empty_kernels_is_a_few_calls(name: str) -> None:
    assert MOST[name] / 2 < calls(CASES[name]) < MOST[name]


def test_an_op_that_is_looked_up_in_the_plan_again_is_more(monkeypatch: pytest.MonkeyPatch) -> None:
    compute: Callable[..., None] = PlanInterpreter._compute

    def again(self: PlanInterpreter, op: Any, *rest: Any) -> None:
        compute(self, self.program.op(op.index, None), *rest)

    monkeypatch.setattr(PlanInterpreter, "_compute", again)
    assert all(calls(case) > MOST[name] for name, case in CASES.items())
