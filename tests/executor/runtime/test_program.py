"""A program's rows, resolved: every node once and in order; what an op then costs."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import executor
import ir
from executor.runtime.batch import blank_batches
from executor.runtime.interpreter import PlanInterpreter
from executor.runtime.program import RankPlan
from experiments import interpreter_speed
from experiments.interpreter_speed import CASES
from ir.core.ops import Pass
from ir.plan.plan import OpKind
from tests.executor.runs import judged

JOBS = {
    "1f1b": (),
    "zbv, recompute": ("schedule.name=zbv", "model.num_hidden_layers=8", "schedule.recompute=full"),
    "dualpipe, ZeRO-3": ("schedule.name=dualpipe", "parallel.dp=2", "parallel.zero=3", "schedule.microbatches=6"),
    "experts": ("model.config=deepseek-v3", "parallel.layers=[2,2]", "parallel.dp=2", "parallel.ep=2"),
}


def crossed(program: RankPlan, alone: frozenset[str] | None, by: RankPlan | None = None) -> list[str]:
    """What happens inside a stretch that must happen at its ends. by: the program that cut the stretches."""
    out = []
    for i in range(program.first, program.last):
        op, covers = (by or program).op(i, alone), program.covers(i)
        for stretch in op.stretches:
            for c in range(stretch.cover, stretch.end + 1):
                index, node, mb = covers[c]
                begins, ends = c == stretch.cover, c == stretch.end
                if not begins and (index in program.brought or (i, c) in program.opens):
                    out.append(f"{op.text}: {node.part} is waited for")
                if not ends and ((i, c) in program.frees or (i, c) in program.closes):
                    out.append(f"{op.text}: freed behind {node.part}")
                if not set(program.gathered.get(index, ())) <= set(program.gathered.get(stretch.first, ())):
                    out.append(f"{op.text}: {node.part} reads other gathers")
                if (node.stage, mb) != (stretch.stage, stretch.mb):
                    out.append(f"{op.text}: {node.part} is of another stage or microbatch")
                if not (begins and ends) and (alone is None or node.part in alone):
                    out.append(f"{op.text}: {node.part} is not alone")
    return out


@pytest.mark.parametrize("name", JOBS)
def test_stretches_are_the_covers_in_order_and_cross_nothing(name: str, tmp_path: Path) -> None:
    _, plan = judged(tmp_path, *JOBS[name])
    for rank in (0, 1):
        program = RankPlan.of(plan, rank)
        parts = [n.part for n in plan.graph.nodes if not n.once]
        for alone in (None, frozenset(parts[::3])):
            assert not crossed(program, alone)
            for i in range(program.first, program.last):
                covers = program.covers(i)
                done = [w for s in program.op(i, alone).stretches for w in s.passes]
                want = [(Pass(str(n.kind)), n.part) for _, n, _ in covers if not n.once]
                assert done == (want if program.shape(i).kind is OpKind.COMPUTE else [])
        every = (s for i in range(program.first, program.last) for s in program.op(i, frozenset()).stretches)
        assert sum(not s.passes for s in every) == 1  # the update


def test_a_program_that_forgets_what_happens_crosses_it(tmp_path: Path) -> None:
    program = RankPlan.of(judged(tmp_path, *JOBS["dualpipe, ZeRO-3"])[1], 0)
    assert len({
        len(s.passes) for i in range(program.first, program.last) for s in program.op(i, frozenset()).stretches
    }) > 1  # fmt: skip
    found = crossed(program, frozenset(), replace(program, closes={}, opens={}, frees={}, brought={}, gathered={}))
    assert any("freed" in x for x in found) and any("waited for" in x for x in found)


# What the interpreter does per op, counted: calls of our own functions, which a noisy machine does not change.

OURS = tuple(str(Path(str(package.__file__)).parent) for package in (executor, ir))
MOST = {"one rank, 1f1b": 28, "two ranks, 1f1b": 38, "two ranks, dualpipe": 36}  # per op, and a tenth to spare


def calls(case: dict[str, Any]) -> float:
    """Of functions, per op of rank 0, in its second step."""
    count = 0

    def seen(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(OURS)

    with interpreter_speed.alone(case) as run:
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
