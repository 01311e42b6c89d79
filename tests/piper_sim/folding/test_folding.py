"""Folding: replicas that are simulated once behave as each would, and what is uneven is unfolded, no more."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from ir.core.mesh import Mesh
from ir.plan.plan import OpKind, Plan
from piper_sim.compiled.choose import steady
from piper_sim.engine import play
from piper_sim.folding import DevicePlacement, RankClasses, classes, replica, unfold
from piper_sim.folding.classes import attributes, coloured, refined
from piper_sim.folding.ground import RankPositions
from piper_sim.folding.uses import meeting_axes
from piper_sim.study.breakdown import KEYS, breakdown
from tests.piper_sim.engine.cases import HEAVY
from tests.piper_sim.folding.folding_cases import (
    CASES,
    LLAMA,
    MOE,
    ORDERS,
    assert_folds,
    drawn,
    every,
    made,
    scenario,
    whole,
)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("config", "parallel"),
    [
        (LLAMA, {"dp": 4, "zero": 1}),
        (LLAMA, {"dp": 2, "tp": 2, "zero": 3}),
        (LLAMA, {"dp": 4, "zero": 1, "dp_replicate": 2}),
        (MOE, {"dp": 8, "ep": 2, "zero": 3, "dp_replicate": 2}),
        (LLAMA, {"dp": 2, "tp": 2, "cp": 2, "zero": 0}),
        (MOE, {"dp": 4, "ep": 2, "zero": 2}),
        (MOE, {"dp": 4, "ep": 4, "zero": 1}),
        (MOE, {"dp": 2, "tp": 2, "ep": 2, "zero": 1}),
    ],
)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipe"])
def test_where_nothing_is_uneven_one_replica_stands_for_all(
    config: str, parallel: dict[str, Any], schedule: str, order: str
) -> None:
    plan, model = made(config, schedule, pp=2, order=order, **parallel)
    found = assert_folds(plan, model)
    assert found.count == 1 and found.size.tolist() == [len(model.ground.positions)]
    assert unfold(plan, found, model.mesh) is plan
    assert model.price(plan, found).digest == model.price(plan).digest


@HEAVY
@given(case=CASES)
def test_a_folded_run_is_the_run_of_every_replica(case: dict[str, Any]) -> None:
    plan, model = drawn(case)
    assert_folds(plan, model, rich=case["rich"])


@HEAVY
@given(case=CASES)
def test_no_two_classes_could_be_one(case: dict[str, Any]) -> None:
    """Merging any two classes leaves members that differ in themselves, or in the classes they meet."""
    plan, model = drawn(case)
    found, at = classes(plan, model.ground), model.ground.positions
    own = coloured(attributes(plan, model.ground))
    sets = {a for s in plan.shapes if (a := meeting_axes(plan, s)) is not None}
    for a in range(found.count):
        for b in range(a):
            merged = np.where(found.of == a, b, found.of)

            def sees(q: int, merged: Any = merged) -> Any:
                return own[q], [set(merged[at.group(x) == at.group(x)[q]].tolist()) for x in sets]

            assert sees(int(found.first[a])) != sees(int(found.first[b]))


@HEAVY
@given(case=CASES)
def test_breakdowns_of_replicas_average_to_pipeline_ranks_and_sum_to_the_step(case: dict[str, Any]) -> None:
    plan, model = drawn(case)
    found = classes(plan, model.ground)
    rows = []
    for c in (found, RankClasses.each(len(found.of))):
        world, costs = scenario(plan, model, c, case["rich"]), model.price(plan, c)
        ran = play(world, costs.duration, 3).last(2)
        by_rank, by_program = breakdown(world, ran, costs, c), breakdown(world, ran, costs)
        assert len(by_rank.seconds) == plan.programs and len(by_program.seconds) == plan.programs * c.count
        for row in (*by_rank.seconds, *by_program.seconds):
            assert tuple(row) == KEYS and min(row.values()) >= -1e-12
            assert sum(row.values()) == pytest.approx(by_rank.iteration_s, abs=1e-9)
        rows.append(by_rank)
    assert rows[0].iteration_s == rows[1].iteration_s
    for mine, full in zip(rows[0].seconds, rows[1].seconds, strict=True):
        assert mine == pytest.approx(full, abs=1e-9)


@pytest.mark.parametrize(
    ("count", "config", "parallel", "cluster"),
    [
        # Ranks of program 0 are 0 .. D-1, of program p from p * D. dp alone: the slow one and the others.
        (2, LLAMA, {"dp": 4}, {"speed": {"5": 0.5}}),
        (2, LLAMA, {"dp": 4}, {"speed": {"5": 0.5, "6": 0.5}}),
        (3, LLAMA, {"dp": 4}, {"speed": {"5": 0.5, "6": 0.8}}),
        (2, LLAMA, {"dp": 4}, {"speed": {"1": 0.5, "5": 0.5}}),
        (3, LLAMA, {"dp": 4}, {"speed": {"1": 0.5, "6": 0.5}}),
        (1, LLAMA, {"dp": 4}, {"speed": {"4": 0.5, "5": 0.5, "6": 0.5, "7": 0.5}}),
        (2, LLAMA, {"dp": 4}, {"speed": {"3": 1.5}}),
        # The slow one, who shares its tensor group, who reduces with it, and the rest.
        (4, LLAMA, {"dp": 4, "tp": 2}, {"speed": {"2": 0.5}}),
        (2, LLAMA, {"dp": 1, "tp": 4}, {"speed": {"2": 0.5}}),
        # The slow one, its experts' group, who owns the same experts, and the rest.
        (4, MOE, {"dp": 8, "ep": 2}, {"speed": {"1": 0.5}}),
        (2, MOE, {"dp": 4, "ep": 4}, {"speed": {"1": 0.5}}),
        # Nodes of 3: in program 0 three of four share one; all four are in one group, so all are alike.
        (1, LLAMA, {"dp": 4}, {"gpus_per_node": 3}),
        # Experts in pairs: (0, 1) in one node, (2, 3) on two; owners (0, 2) in one node, (1, 3) on two.
        (4, MOE, {"dp": 4, "ep": 2}, {"gpus_per_node": 3}),
        # Nodes of 5, pairs: rank 4 is in a node with rank 2, rank 5 not with rank 3.
        (2, LLAMA, {"dp": 2}, {"gpus_per_node": 5}),
    ],
)
def test_as_many_classes_as_reasoning_by_hand_finds(
    count: int, config: str, parallel: dict[str, Any], cluster: dict[str, Any]
) -> None:
    plan, model = made(config, cluster=cluster, pp=2 if parallel != {"dp": 2} else 4, zero=1, **parallel)
    assert assert_folds(plan, model).count == count


def test_how_many_of_a_class_a_group_holds_is_all_the_same() -> None:
    mesh = Mesh.of(tp=1, cp=1, dp=8, pp=1, ep=4)
    colour = np.array([1, 1, 0, 0, 1, 0, 0, 0])
    assert RankClasses.by(refined(colour, RankPositions(mesh), [("ep",)])).size.tolist() == [3, 5]
    three = refined(np.array([1, 1, 0, 0, 0, 0, 0, 0]), RankPositions(mesh), [("ep",)])
    assert RankClasses.by(three).of.tolist() == [0, 0, 1, 1, 2, 2, 2, 2]


def test_what_is_told_apart_tells_others_apart() -> None:
    """A cube with one corner off: its neighbours differ at once, those behind them only then."""
    at = RankPositions(Mesh.of(tp=2, cp=2, dp=2, pp=1))
    corner = np.array([1, 0, 0, 0, 0, 0, 0, 0])
    assert RankClasses.by(refined(corner, at, [("tp",), ("cp",), ("dp",)])).count == 8
    assert RankClasses.by(refined(corner, at, [("tp",), ("cp", "dp")])).size.tolist() == [1, 1, 3, 3]


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipe"])
@pytest.mark.parametrize("rich", [False, True])
def test_a_straggler_unfolds_and_slows(schedule: str, rich: bool) -> None:
    for config, parallel in ((LLAMA, {"dp": 4}), (LLAMA, {"dp": 4, "tp": 2}), (MOE, {"dp": 8, "ep": 2})):
        plan, model = made(config, schedule, {"speed": {"5": 0.5}}, pp=2, zero=1, **parallel)
        _, plain = made(config, schedule, pp=2, zero=1, **parallel)
        found = assert_folds(plan, model, rich=rich)
        assert 1 < found.count < len(found.of)
        each = ((m, classes(plan, m.ground)) for m in (model, plain))
        slow, fast = (every(whole(plan, m, c, 3, rich)[0], c) for m, c in each)
        assert (slow[1, 2] - slow[1, 1]).max() > (fast[1, 2] - fast[1, 1]).max()


def delayed(config: str, speed: dict[str, float], **parallel: Any) -> tuple[set[int], Plan]:
    """Positions with an op of a microbatch, in the first step, that ends at another time than without stragglers."""
    plan, model = made(config, cluster={"speed": speed}, **parallel)
    _, plain = made(config, **parallel)
    nodes = plan.graph.nodes
    per_mb = np.array([bool(s.slot) or not nodes[s.covers[0][0]].once for s in plan.shapes])[plan.shape]
    each = [(m, classes(plan, m.ground)) for m in (model, plain)]
    ends = [every(whole(plan, m, c, 1)[0], c)[1, 0][:, per_mb] for m, c in each]
    return set(np.flatnonzero((ends[0] != ends[1]).any(axis=1)).tolist()), plan


def test_a_straggler_delays_its_own_pipeline_until_the_reduction() -> None:
    late, plan = delayed(LLAMA, {"5": 0.5}, dp=4, pp=4, zero=1)
    assert late == {1}
    assert delayed(LLAMA, {"5": 0.5, "2": 0.9}, dp=4, pp=4, zero=1)[0] == {1, 2}
    model = made(cluster={"speed": {"5": 0.5}}, dp=4, pp=4, zero=1)[1]
    found = classes(plan, model.ground)
    ran, _ = whole(plan, model, found, 1)
    for i in np.flatnonzero(plan.kind == OpKind.COLLECTIVE).tolist():  # then all meet
        both = [replica(ran, k, found.count).end[0, i] for k in range(found.count)]
        assert both[0] == both[1]


def test_a_straggler_delays_its_experts_group_and_its_tensor_group() -> None:
    assert delayed(MOE, {"9": 0.5}, dp=8, ep=2, pp=4, zero=1)[0] == {0, 1}
    assert delayed(MOE, {"9": 0.5}, dp=8, ep=4, pp=4, zero=1)[0] == {0, 1, 2, 3}
    assert delayed(LLAMA, {"9": 0.5}, dp=4, tp=2, pp=4, zero=1)[0] == {0, 1}
    assert delayed(LLAMA, {"8": 0.5}, dp=4, tp=2, pp=4, zero=1, order="dp tp cp ep pp")[0] == {0, 4}


def test_quick_ranks_alone_do_not_make_the_step_shorter() -> None:
    """All but one replica, and all but one of a tensor group, at twice the speed."""
    for parallel, quick in (({"dp": 4}, (0, 1, 2)), ({"dp": 2, "tp": 2}, (0, 1, 2))):
        speed = {str(p * 4 + q): 2.0 for p in range(2) for q in quick}
        steps = []
        for cluster in ({"speed": speed}, {}):
            plan, model = made(LLAMA, cluster=cluster, pp=2, zero=1, **parallel)
            found = classes(plan, model.ground)
            world, costs = scenario(plan, model, found), model.price(plan, found)
            steps.append(breakdown(world, steady(world, costs.duration, True)[0], costs, found).iteration_s)
        assert steps[0] == steps[1]


def test_a_tensor_group_goes_on_together_where_only_some_ops_hold_its_messages() -> None:
    """Two stragglers of one tensor group on two programs: the pipeline is slowed by both, not by the worse."""
    speeds: list[dict[str, float]] = [{}, {"0": 0.5}, {"3": 0.5}, {"0": 0.5, "3": 0.5}]
    took = []
    for speed in speeds:
        plan, model = made(MOE, cluster={"speed": speed}, tp=2, dp=1, pp=2, zero=0)
        found = classes(plan, model.ground)
        assert found.count == (2 if speed else 1)
        took.append(whole(plan, model, found, 2)[0].end[-1].max())
    assert took[3] > max(took[1:3]) > took[0]


def test_a_cluster_of_thousands_of_ranks_is_sorted_at_once() -> None:
    """16,384 ranks: what is asked once per job."""
    mesh = Mesh.of(tp=4, cp=1, dp=256, pp=16, ep=64)
    plan, _ = made(MOE, pp=4, dp=4, ep=2)
    assert classes(plan, DevicePlacement(mesh, 8)).count == 1
    slow = classes(plan, DevicePlacement(mesh, 8, {"777": 0.8}))
    # It; of its experts' group those that it reduces dense gradients with, and the others; of other groups the owners
    # of its experts, whom else it reduces with, and the rest.
    assert sorted(slow.size.tolist()) == sorted([1, 15, 48, 15, 15 * 16 - 15, 15 * 48])


# --- negative controls ---


def test_classes_by_own_attributes_alone_are_caught() -> None:
    plan, model = made(MOE, cluster={"speed": {"1": 0.5}}, dp=8, ep=2, pp=2, zero=1)
    rough = RankClasses.by(coloured(attributes(plan, model.ground)))
    assert rough.count == 2
    with pytest.raises(AssertionError):
        assert_folds(plan, model, rough)


def test_meetings_that_forget_other_classes_are_caught() -> None:
    plan, model = made(MOE, cluster={"speed": {"1": 0.5}}, dp=4, ep=4, pp=2, zero=1)
    found = classes(plan, model.ground)
    right, costs = whole(plan, model, found)
    world = scenario(plan, model, found)
    apart = np.concatenate([np.where(plan.collective >= 0, plan.collective + 1000 * k, -1) for k in range(found.count)])
    alone = play(replace(world, plan=replace(world.plan, collective=apart)), costs.duration, 2)
    each = RankClasses.each(4)
    truth = every(whole(plan, model, each)[0], each)
    assert (every(right, found) == truth).all() and (every(alone, found) != truth).any()
