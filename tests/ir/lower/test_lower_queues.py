"""Transfers: channels in one order at both ends, one queue in the joint order, and what a naive queue would do."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ir.core.errors import ErrorKind
from ir.core.filters import parse_filter
from ir.core.order import Order
from ir.directives import OrderDirective, PlaceDirective, SplitDirective, apply
from ir.graph.build import stage_graph
from ir.graph.graph import Graph, GraphEdge
from ir.lower import MessageQueue, PassMerge, PlanPolicy, lower
from ir.plan.plan import OpKind, Plan
from ir.plan.text import parse_plan, plan_text
from ir.schedules.registry import NAMES, build
from ir.verify import check_plan
from ir.verify.coverage import instances, reads
from ir.verify.deadlock import walk
from tests.ir.plans import FIXED, WHOLE, fewer, moe_plan, stage_plan
from tests.ir.verify.edits import differences
from tests.ir.verify.replay import replay, serial
from tests.refusals import refusal

SINGLE = PlanPolicy(PassMerge.FUSED, whole_backward=True, p2p=MessageQueue.SINGLE, clip=False)
CUT = PlanPolicy(p2p=MessageQueue.SINGLE)


def first_consumers(plan: Plan) -> dict[int, int]:
    """receive -> the first op that reads what it brings."""
    found = reads(plan, instances(plan))
    out: dict[int, int] = {}
    for reader, send in zip(found.reader.tolist(), found.send.tolist(), strict=True):
        if send >= 0:
            recv = int(plan.partner[send])
            out[recv] = min(out.get(recv, reader), reader)
    return out


def naive(name: str, ranks: int, mbs: int) -> Plan:
    """All transfers of a program on one queue: a send behind its producer, a receive just before it is needed."""
    plan = stage_plan(name, ranks, mbs, None, replace(WHOLE, lookahead=0))
    return replace(plan, shapes=tuple(replace(s, stream="p2p") if s.peer >= 0 else s for s in plan.shapes))


@pytest.mark.parametrize(
    ("name", "ranks"), [(n, p) for n in ("1f1b", "dualpipe") for p in (2, 4, 6, 8)] + [("1f1b", 3)]
)
@pytest.mark.parametrize("mbs", [8, 16, 20])
def test_send_first_receive_just_in_time_deadlocks_on_one_queue(name: str, ranks: int, mbs: int) -> None:
    assert refusal(check_plan, naive(name, ranks, mbs), match="the plan cannot finish").kind is ErrorKind.DEADLOCK
    check_plan(stage_plan(name, ranks, mbs, None, SINGLE), serial=True)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_gpipe_needs_no_joint_order(ranks: int) -> None:
    check_plan(naive("gpipe", ranks, 8), serial=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", FIXED)
def test_the_joint_order_passes_for_every_shape(name: str) -> None:
    for ranks in range(1, 9):
        for mbs in range(1, 17):
            if name != "dualpipe" or ranks % 2 == 0:
                for policy in (SINGLE, CUT):
                    check_plan(stage_plan(name, ranks, mbs, None, policy), serial=True)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in FIXED])
def test_the_joint_order_passes_for_searched_schedules(name: str) -> None:
    for ranks, mbs in ((1, 2), (2, 5), (3, 4), (4, 8)):
        for policy in (SINGLE, CUT):
            check_plan(stage_plan(name, ranks, mbs, None, policy), serial=True)


@fewer
@given(
    name=st.sampled_from(FIXED),
    ranks=st.integers(1, 4),
    mbs=st.integers(1, 5),
    zero=st.integers(0, 3),
    tied=st.booleans(),
)
def test_the_joint_order_holds_with_collectives_in_the_same_order(
    name: str, ranks: int, mbs: int, zero: int, tied: bool
) -> None:
    ranks += ranks % 2 if name == "dualpipe" else 0
    plan = moe_plan(name, ranks, mbs, CUT, zero=zero, tied=tied, layers=max(3, 2 * ranks))
    check_plan(plan, serial=True)
    assert replay(plan, [1.0] * len(plan), queues=serial(plan)) is not None


def test_one_queue_has_one_stream_that_names_no_peer() -> None:
    plan = stage_plan("dualpipe", 4, 8, None, SINGLE)
    assert {s for _, s in plan.streams} == {"compute", "p2p"}
    assert {s.peer for s in plan.shapes if s.kind is OpKind.SEND} == {0, 1, 2, 3}
    text = plan_text(plan)
    assert "p2p>2    1SEND_F0" in text and "p2p<2    1RECV_B0" in text


def test_mixed_queues_are_refused() -> None:
    plan = stage_plan("1f1b", 2, 2)
    shapes = tuple(replace(s, stream="p2p") if s.kind is OpKind.SEND else s for s in plan.shapes)
    refusal(check_plan, replace(plan, shapes=shapes), match="use one kind of queue")


# --- where transfers stand -----------------------------------------------------------------


def computes_before(plan: Plan) -> np.ndarray:  # type: ignore[type-arg]
    """How many compute ops of its program stand before each op."""
    compute = (plan.kind == OpKind.COMPUTE).astype(np.int64)
    count = np.cumsum(compute) - compute
    return count - count[plan.bounds[plan.program]]


@given(
    name=st.sampled_from(FIXED),
    ranks=st.integers(1, 6),
    mbs=st.integers(1, 12),
    lookahead=st.integers(0, 3),
    whole=st.booleans(),
)
def test_a_receive_is_dispatched_early_but_not_before_its_channel_needs_it(
    name: str, ranks: int, mbs: int, lookahead: int, whole: bool
) -> None:
    ranks += ranks % 2 if name == "dualpipe" else 0
    policy = replace(WHOLE if whole else PlanPolicy(), lookahead=lookahead)
    plan = stage_plan(name, ranks, mbs, None, policy)
    count, consumers = computes_before(plan), first_consumers(plan)
    channels: dict[tuple[int, str], list[int]] = {}
    for recv in sorted(consumers):
        channels.setdefault((int(plan.program[recv]), plan.shapes[int(plan.shape[recv])].stream), []).append(recv)
    for mine in channels.values():
        soonest = 10**9
        for recv in reversed(mine):
            soonest = min(soonest, int(count[consumers[recv]]))
            assert count[recv] == max(soonest - lookahead, 0)


@given(name=st.sampled_from(FIXED), ranks=st.integers(1, 6), mbs=st.integers(1, 12), cut=st.booleans())
def test_one_queue_receives_as_late_as_what_stands_behind_allows(name: str, ranks: int, mbs: int, cut: bool) -> None:
    ranks += ranks % 2 if name == "dualpipe" else 0
    plan = stage_plan(name, ranks, mbs, None, CUT if cut else SINGLE)
    count, consumers = computes_before(plan), first_consumers(plan)
    for (_, stream), queue in zip(plan.streams, plan.queues, strict=True):
        if stream == "p2p":
            limit = 10**9
            for i in reversed(queue):
                limit = min(limit, int(count[consumers[i]] if plan.kind[i] == OpKind.RECV else count[i]))
                assert count[i] == limit


@pytest.mark.parametrize("policy", [WHOLE, PlanPolicy(), SINGLE, CUT])
def test_a_send_stands_right_behind_its_producer(policy: PlanPolicy) -> None:
    for name in FIXED:
        plan = stage_plan(name, 4, 6, None, policy)
        found = instances(plan)
        for i in np.flatnonzero(plan.kind == OpKind.SEND).tolist():
            slot = plan.shapes[int(plan.shape[i])].slot
            assert slot is not None
            between = plan.kind[int(found.op[slot[0], plan.mb[i]]) + 1 : i]
            assert OpKind.COMPUTE not in between.tolist()


# --- unusual boundaries --------------------------------------------------------------------


def skipping() -> Graph:
    """Stage 0 feeds stages 1 and 2: one buffer goes to two programs, and two buffers come into stage 2."""
    graph = stage_graph(3)
    return replace(graph, edges=(*graph.edges, GraphEdge(0, 6, 0)))


@pytest.mark.parametrize("policy", [PlanPolicy(), CUT, WHOLE])
def test_a_buffer_may_go_to_several_programs(policy: PlanPolicy) -> None:
    places = [PlaceDirective(parse_filter({"PP": s}), s) for s in range(3)]
    graph = apply(skipping(), [SplitDirective(parse_filter({}), "MB", 3), *places])
    plan = lower(graph, policy)
    check_plan(plan)
    mine = [plan.text(i) for i in range(len(plan)) if plan.program[i] == 0]
    assert mine.count("0SEND_F1") == 2
    into = {plan.text(i) for i in range(len(plan)) if plan.program[i] == 2 and plan.kind[i] == OpKind.RECV}
    assert len(into) == 6
    text = plan_text(plan)
    assert not differences(plan, parse_plan(text, graph))


def test_both_neighbours_may_be_one_program() -> None:
    plan = stage_plan("interleaved-1f1b", 2, 4)
    check_plan(plan)
    assert {s for _, s in plan.streams} == {"compute", "send>1", "recv<1", "send>0", "recv<0"}


def test_a_receive_out_of_its_consumer_s_order_is_hoisted() -> None:
    """torch's `defer_pp_recv` swaps these two and takes one's data for the other's."""
    schedule = build("1f1b", 2, 2)
    late = Order.of(["1F1", "1F0", "1B1", "1B0"])
    places = [PlaceDirective(parse_filter({"PP": s}), s) for s in range(2)]
    early = Order.of(["0F0", "0F1", "0B1", "0B0"])
    graph = apply(
        stage_graph(2), [SplitDirective(parse_filter({}), "MB", 2), *places, OrderDirective(((0, early), (1, late)))]
    )
    plan = lower(graph)
    check_plan(plan)
    assert schedule.ranks == plan.programs
    receives = [plan.text(i) for i in range(len(plan)) if plan.program[i] == 1 and plan.kind[i] == OpKind.RECV]
    assert receives == ["1RECV_F0", "1RECV_F1"]


@given(name=st.sampled_from(FIXED), ranks=st.integers(1, 5), mbs=st.integers(1, 8), cut=st.booleans())
def test_walking_and_replaying_agree_on_what_can_finish(name: str, ranks: int, mbs: int, cut: bool) -> None:
    ranks += ranks % 2 if name == "dualpipe" else 0
    for plan in (stage_plan(name, ranks, mbs, None, PlanPolicy() if cut else WHOLE), naive(name, ranks, mbs)):
        for queues in (plan.queues, serial(plan)):
            assert (not walk(plan, queues, plan.waits)) == (replay(plan, [1.0] * len(plan), queues=queues) is not None)
