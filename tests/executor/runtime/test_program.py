"""A program's rows, resolved: every node once and in order, and nothing happens inside a stretch but its work."""

from dataclasses import replace
from pathlib import Path

import pytest

from executor.runtime.program import RankPlan
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
