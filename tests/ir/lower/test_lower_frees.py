"""Buffers: freed as soon as their readers are proven done, never sooner, whatever the ops' durations."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ir.core.filters import parse_filter
from ir.core.mesh import Mesh
from ir.directives import PlaceDirective, ReplicateDirective, ShardDirective, SplitDirective, apply
from ir.graph.build import model_graph
from ir.lower import MessageQueue, PlanPolicy, lower
from ir.plan.plan import AT_START, OpKind, Plan
from ir.verify import check_plan
from ir.workload.part import Chunk, Param, Part
from tests.ir.plans import FIXED, InventedSource, cut, fewer, moe_plan
from tests.ir.verify.replay import replay


def readers(plan: Plan) -> dict[int, list[tuple[int, int]]]:
    """buffer -> (op, cover) of all who read it, found the slow way; cover AT_START for communication."""
    g, b = plan.graph, plan.buffers
    where = {}
    for i, (shape, mb, mb2) in enumerate(zip(plan.shape.tolist(), plan.mb.tolist(), plan.mb2.tolist(), strict=True)):
        for c, (n, member) in enumerate(plan.shapes[shape].covers):
            where[n, (mb, mb2)[member]] = i, (c if plan.kind[i] == OpKind.COMPUTE else AT_START)
    transfers = defaultdict(list)
    for i in np.flatnonzero((plan.kind == OpKind.SEND) | (plan.kind == OpKind.RECV)).tolist():
        transfers[plan.shapes[int(plan.shape[i])].slot, int(plan.mb[i])].append(i)
    out = {}
    for k in range(len(b)):
        node, slot, mb = int(b.node[k]), int(b.slot[k]), int(b.mb[k])
        if node < 0:
            brought = plan.shapes[int(plan.shape[slot])].slot
            if brought is None:
                continue  # a gathered or reduced flat buffer: see test_lower_zero
            node, slot = brought
        mine = plan.program[b.alloc[k]]
        found = [where[e.dst, mb] for e in g.edges if (e.src, e.slot) == (node, slot) and not e.join]
        if b.node[k] >= 0:
            sends = [i for i in transfers[(node, slot), mb] if plan.kind[i] == OpKind.SEND]
            found += [(i, AT_START) for i in sends]
        out[k] = [(i, c) for i, c in found if plan.program[i] == mine]
    return out


POLICIES = (PlanPolicy(), PlanPolicy(p2p=MessageQueue.SINGLE), PlanPolicy(lookahead=2), PlanPolicy(whole_backward=True))


@fewer
@given(
    name=st.sampled_from(FIXED),
    ranks=st.integers(1, 3),
    mbs=st.integers(1, 4),
    policy=st.sampled_from(POLICIES),
    recompute=st.sampled_from([(), ("full",), ("norm",)]),
    rng=st.randoms(use_true_random=False),
)
def test_a_buffer_outlives_its_readers_under_any_durations(
    name: str, ranks: int, mbs: int, policy: PlanPolicy, recompute: tuple[str, ...], rng: object
) -> None:
    ranks += ranks % 2 if name == "dualpipe" else 0
    plan = moe_plan(name, ranks, mbs, policy, recompute=recompute, layers=max(3, 2 * ranks))
    b = plan.buffers
    ran = replay(plan, [rng.choice((0.1, 1.0, 9.0)) for _ in range(len(plan))])  # type: ignore[attr-defined]
    assert ran is not None
    start, end = ran
    for k, found in readers(plan).items():
        at, alloc = int(b.free[k]), int(b.alloc[k])
        assert all(op >= alloc for op, _ in found)
        if at < 0:
            assert any(plan.kind[op] == OpKind.SEND for op, _ in found)  # nothing proves that it has left
            continue
        for op, cover in found:
            if op == at:
                assert cover <= b.free_cover[k]
            else:
                assert end[op] <= start[at]
        inside = [c for op, c in found if op == at]
        if at == alloc:
            assert b.free_cover[k] == max([int(b.alloc_cover[k]), *inside])
        else:
            assert b.free_cover[k] == max(inside, default=AT_START)


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe", "dualpipev"])
def test_what_lives_to_the_end_was_sent_without_an_answer(name: str) -> None:
    plan = moe_plan(name, 4, 8, layers=8)
    b = plan.buffers
    kept = np.flatnonzero(b.free < 0)
    sent = {
        (plan.shapes[int(plan.shape[i])].slot, int(plan.mb[i]))
        for i in np.flatnonzero(plan.kind == OpKind.SEND).tolist()
    }
    assert {((int(b.node[k]), int(b.slot[k])), int(b.mb[k])) for k in kept.tolist()} <= sent
    assert len(kept) < len(sent) / 2


def test_a_sent_buffer_dies_at_the_first_answer() -> None:
    """1F1B, two ranks: what rank 0 sent forward is gone when the gradient that rank 1 made of it is used."""
    plan = moe_plan("1f1b", 2, 4, layers=2)
    b = plan.buffers
    sends = {
        (plan.shapes[int(plan.shape[i])].slot, int(plan.mb[i])): i
        for i in np.flatnonzero((plan.kind == OpKind.SEND) & (plan.program == 0)).tolist()
    }
    for k in range(len(b)):
        send = sends.get(((int(b.node[k]), int(b.slot[k])), int(b.mb[k])))
        if send is not None:
            mb = int(b.mb[k])
            brought = next(i for i in range(len(plan)) if plan.program[i] == 0 and plan.text(i) == f"0RECV_B{mb}")
            assert brought in plan.waits.row(int(b.free[k])).tolist()


def test_what_only_a_collective_reads_dies_with_the_first_op_that_waits_for_it() -> None:
    plan = moe_plan("1f1b", 1, 2, layers=1)
    at = {plan.buffer_name(k): plan.text(int(plan.buffers.free[k])) for k in range(len(plan.buffers))}
    assert at["0F0/l0.router.out"] == "0F0/l0.experts"
    assert at["0F0/l0.experts.out"].startswith("0F0/l0.add")
    assert at["0F0/l0.dispatch.out"] == "0F0/l0.experts"


def test_a_collective_whose_result_only_leaves_is_proven_by_the_send() -> None:
    """Experts at the end of a stage: no compute here waits for the combine, but the answer to its send does."""
    source = InventedSource()
    experts = Part("experts", ("",), (), (Param("l0.experts", (4, 8, 4), ("ep",), True, (0,)),))
    chunks = [
        Chunk("l0", (experts,), {"L": 0, "MOE": 0}),
        Chunk("head", (Part("head", ("",), (), (Param("head.weight", (9, 4)),)),)),
    ]
    mesh = Mesh.of(tp=1, cp=1, dp=2, pp=2, ep=2)
    f = parse_filter
    divide = [ShardDirective(f({"EP": "*"}), "ep"), ReplicateDirective(f({}), 1)]
    places = [SplitDirective(f({}), "MB", 4), *(PlaceDirective(f({"PP": s}), s) for s in range(2))]
    graph = apply(replace(model_graph(cut(chunks, 2), source), mesh=mesh), [*places, *divide])
    plan = lower(graph)
    check_plan(plan)
    b = plan.buffers
    free = {plan.buffer_name(k): int(b.free[k]) for k in range(len(b))}
    assert "0SEND_F0" in plan.texts
    assert all(free[f"0F{mb}/l0.experts.out"] >= 0 for mb in range(2))
