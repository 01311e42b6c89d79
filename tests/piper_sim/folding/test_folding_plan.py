"""An unfolded plan: who meets whom, what each rank costs."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from cost_models import LinkFabric, message_seconds
from ir.core.grid import quantise
from ir.core.work import Message, MessageKind
from ir.plan.plan import OpKind, Plan
from piper_sim.compiled import play as twin
from piper_sim.engine import EngineScenario, play
from piper_sim.folding import RankClasses, carry, classes, unfold
from piper_sim.folding.uses import joined, meeting_axes
from piper_sim.pricing.costs import CostModel
from piper_sim.pricing.prepare import hardware_of
from piper_sim.pricing.structure import KERNELS, CostShare
from tests.piper_sim.engine.cases import HEAVY
from tests.piper_sim.folding.folding_cases import CASES, LLAMA, MOE, ORDERS, assert_folds, drawn, made, mates, scenario
from tests.piper_sim.pricing.test_costs import job


@pytest.mark.parametrize("order", ORDERS[:3])
@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
@pytest.mark.parametrize(
    ("config", "parallel"),
    [(MOE, {"tp": 2, "dp": 2, "ep": 2, "zero": 1}), (LLAMA, {"tp": 2, "cp": 2, "dp": 2, "zero": 2})],
)
def test_unfolded_ops_meet_the_ranks_of_their_own_groups(
    config: str, parallel: dict[str, Any], schedule: str, order: str
) -> None:
    """Every rank its own program: the members of each op's meeting, counted from coordinates."""
    plan, model = made(config, schedule, pp=2, order=order, **parallel)
    mesh, at, n = model.mesh, model.ground.positions, len(plan)
    full = unfold(plan, RankClasses.each(len(at)), mesh)
    assert full.programs == mesh.ranks

    def rank(op: int) -> int:
        q, p = divmod(int(full.program[op]), plan.programs)
        return int(at.offset[q]) + p * at.stride

    members: dict[int, list[int]] = {}
    for op in np.flatnonzero(full.collective >= 0).tolist():
        members.setdefault(int(full.collective[op]), []).append(op)
    known: dict[tuple[tuple[str, ...], int], set[int]] = {}
    for op in range(0, len(full), 3):
        s = full.shapes[full.shape[op]]
        assert full.text(op) == plan.text(op % n)
        if full.partner[op] >= 0:
            there = int(full.partner[op])
            assert there % n == plan.partner[op % n] and there // n == op // n
            assert mesh.coordinates(rank(there)) | {"pp": 0} == mesh.coordinates(rank(op)) | {"pp": 0}
            continue
        axes = meeting_axes(plan, s)
        wanted = {rank(op)}
        if axes is not None:
            node = plan.graph.nodes[s.covers[0][0]] if s.covers else None
            apart = joined(node) if node is not None and node.message is not None else ()
            for p in apart or (int(plan.program[op % n]),):
                seat = rank(op) + (p - int(plan.program[op % n])) * at.stride
                if (axes, seat) not in known:
                    known[axes, seat] = mates(mesh, axes, seat)
                wanted |= known[axes, seat]
        met = members.get(int(full.collective[op]), [op])
        assert Counter(map(rank, met)) == Counter(wanted) and (full.collective[op] >= 0) == (len(wanted) > 1)
        assert {full.text(i) for i in met} == {full.text(op)}


def test_waits_stay_inside_a_replica_and_the_step_before_is_its_own() -> None:
    plan, model = made(MOE, "zbv", pp=2, dp=4, ep=2, zero=1)
    found = RankClasses.each(4)
    full, n = unfold(plan, found, model.mesh), len(plan)
    assert (full.waits.rows() // n == full.waits.items // n).all()
    for k in range(4):
        assert full.waits.row(k * n + 5).tolist() == [k * n + w for w in plan.waits.row(5).tolist()]
    late, before = carry(plan, found)
    base = EngineScenario.of(plan)
    assert late.reshape(4, -1)[2].tolist() == (base.late + 2 * n).tolist()
    assert (before.reshape(4, -1) - base.before == np.arange(4)[:, None] * n).all()
    assert len(full.streams) == 4 * len(plan.streams) and [len(q) for q in full.queues[: len(plan.streams)]] == [
        len(q) for q in plan.queues
    ]


def test_both_engines_run_an_unfolded_plan_alike() -> None:
    for rich in (False, True):
        plan, model = made(MOE, "dualpipe", {"speed": {"5": 0.5}}, dp=4, ep=2, tp=2)
        found = classes(plan, model.ground)
        world, costs = scenario(plan, model, found, rich), model.price(plan, found)
        one, other = (engine(world, costs.duration, 2) for engine in (play, twin))
        assert found.count > 1 and (one.start == other.start).all() and (one.end == other.end).all()


# --- prices ---


@HEAVY
@given(case=CASES)
def test_every_rank_is_priced_as_it_would_be_alone(case: dict[str, Any]) -> None:
    """By rank, from coordinates and nodes: kernels at its speed, messages in its own group, waiting inside ops."""
    plan, model = drawn(case)
    found, at, n = classes(plan, model.ground), model.ground.positions, len(plan)
    costs = model.price(plan, found)
    base = model.price(plan, RankClasses.by(np.zeros(len(at), dtype=np.int64)))
    speeds = {int(r): float(f) for r, f in model.job.cluster.speed.items()}
    rng = random.Random(case["seed"])
    for k, i in {(rng.randrange(found.count), rng.randrange(n)) for _ in range(60)}:
        p, op, s = int(plan.program[i]), k * n + i, plan.shapes[plan.shape[i]]
        rank = int(at.offset[found.first[k]]) + p * at.stride
        if s.kind in (OpKind.SEND, OpKind.RECV):
            assert s.slot is not None
            size, there = plan.graph.nodes[s.slot[0]].writes[s.slot[1]].bytes, rank + (s.peer - p) * at.stride
            near = rank // model.per_node == there // model.per_node
            wanted = message_seconds(Message(MessageKind.P2P, size, ("pp",)), 2, 1 + near, model.fabric)
            assert costs.duration[op] == quantise(wanted)
        elif s.kind is OpKind.COLLECTIVE:
            node = plan.graph.nodes[s.covers[0][0]] if s.covers else None
            what = s.message if node is None else node.message
            assert what is not None
            apart = (node is not None and joined(node)) or (p,)
            group = {m for x in apart for m in mates(model.mesh, what.axes, rank + (x - p) * at.stride)}
            on = Counter(r // model.per_node for r in group)
            wanted = message_seconds(what, len(group), min(on.values()), model.fabric, nodes=len(on))
            assert costs.duration[op] == quantise(wanted)
        else:
            axes = meeting_axes(plan, s)
            group = {rank} if axes is None else mates(model.mesh, axes, rank)
            own, slowest = speeds.get(rank, 1.0), min(speeds.get(r, 1.0) for r in group)
            full = sum(kernels(model, plan, c) for c, _ in s.covers)
            assert costs.shares[op, KERNELS].sum() == pytest.approx(full / own, abs=1e-11)
            assert costs.duration[op] == costs.shares[op].sum()
            waits = costs.shares[op, [CostShare.TP, CostShare.CP]].sum()
            assert waits >= full / slowest - full / own - 1e-11
    assert len(base.duration) == n


def kernels(model: CostModel, plan: Plan, node: int) -> float:
    shares = model.node_shares(plan.graph.nodes[node])
    return quantise(sum(shares[k] for k in KERNELS))


@pytest.mark.parametrize("given", [None, {"F": 1e-3, "B": 3e-3, "p2p": 1e-4}])
def test_a_straggler_s_neighbours_wait_inside_ops_for_its_kernels_only(given: Any) -> None:
    """Ranks 0-3 run program 0; 2 is slow, 3 shares its tensor group."""
    plan, model = made(cluster={"speed": {"2": 0.5}}, tp=2, dp=2)
    if given:
        model.job = replace(model.job, costs=replace(model.job.costs, stage_times=given))
    found = classes(plan, model.ground)
    assert found.count == 4
    costs, n = model.price(plan, found), len(plan)
    shares, duration = costs.shares.reshape(4, n, -1), costs.duration.reshape(4, n)
    free, _, slow, mate = (int(k) for k in found.of)
    mine = (plan.program == 0) & (plan.kind == OpKind.COMPUTE)
    inside = mine & np.array([bool(meeting_axes(plan, s)) for s in plan.shapes])[plan.shape]
    assert (mine & ~inside).any() and inside.any()
    assert duration[slow][~mine].tolist() == duration[free][~mine].tolist()
    kernel = shares[:, :, KERNELS].sum(axis=2)
    assert kernel[slow][mine] == pytest.approx(2 * kernel[free][mine], abs=1e-11)
    assert (kernel[mate] == kernel[free]).all()
    assert (shares[slow, :, [CostShare.TP, CostShare.CP]] == shares[free, :, [CostShare.TP, CostShare.CP]]).all()
    assert (duration[slow][inside] == duration[mate][inside]).all() and (shares[mate] >= shares[free]).all()
    assert (duration[mate][mine & ~inside] == duration[free][mine & ~inside]).all()
    assert (shares.sum(axis=2)[:, mine] == duration[:, mine]).all()


def test_nodes_that_do_not_divide_are_priced_by_their_scarcest() -> None:
    """Eight replicas on nodes of five: 5 + 3, then 2 + 5 + 1."""
    plan, model = made(LLAMA, cluster={"gpus_per_node": 5}, pp=2, dp=8, zero=1)
    found = assert_folds(plan, model)
    assert found.count == 1, "all are in one group, and none shares a node with the other end of its channel"
    fabric = LinkFabric.of(model.hardware, 5)
    costs = model.price(plan, found)
    seen = set()
    for i in np.flatnonzero(plan.kind == OpKind.COLLECTIVE).tolist():
        message = plan.shapes[plan.shape[i]].message
        assert message is not None
        fewest, nodes = {0: (3, 2), 1: (1, 3)}[int(plan.program[i])]
        if "pp" not in message.axes:
            assert costs.duration[i] == quantise(message_seconds(message, 8, fewest, fabric, nodes=nodes))
            seen.add(int(plan.program[i]))
    assert seen == {0, 1}


@pytest.mark.parametrize("kind", list(MessageKind)[:4])
@pytest.mark.parametrize("nbytes", [1000, 10**6, 10**9])
def test_an_uneven_group_is_no_faster_than_an_even_one(kind: MessageKind, nbytes: int) -> None:
    fabric = LinkFabric.of(hardware_of(job()), 8)
    for fanout in (1, 4) if kind is MessageKind.ALL_TO_ALL else (1,):
        message = Message(kind, nbytes, ("x",), fanout)
        even = message_seconds(message, 8, 4, fabric)
        assert even == message_seconds(message, 8, 4, fabric, nodes=2)
        took = [message_seconds(message, 8, fewest, fabric, nodes=2) for fewest in (4, 3, 2, 1)]
        assert took == sorted(took) and took[0] == even
    with pytest.raises(ValueError, match="cannot be"):
        message_seconds(Message(kind, nbytes, ("x",)), 8, 5, fabric, nodes=2)
