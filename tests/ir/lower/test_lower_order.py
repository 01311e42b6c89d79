"""How units become ops: interleaving, coalescing, recompute, and one order of reductions for all owners."""

import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ir.core.errors import PiperError
from ir.core.order import Order
from ir.directives import OrderDirective, apply
from ir.job.build import prepare
from ir.job.load import job_from
from ir.lower import MessageQueue, PassMerge, PlanPolicy, lower
from ir.lower.merge import alternate
from ir.plan.plan import OpKind, Plan
from ir.schedules.registry import build
from ir.verify import check_plan
from piper_sim import predict
from tests.ir.plans import FIXED, fewer, moe_graph, moe_plan, stage_plan
from tests.ir.verify.edits import rearranged
from tests.ir.verify.replay import replay
from tests.refusals import refusal


def texts(plan: Plan, program: int, streams: tuple[str, ...] = ("compute", "ep")) -> list[str]:
    rows = range(int(plan.bounds[program]), int(plan.bounds[program + 1]))
    return [plan.text(i) for i in rows if plan.shapes[int(plan.shape[i])].stream in streams]


# --- interleaving ----------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.sampled_from("cxw"), max_size=8), min_size=1, max_size=3),
)
def test_merging_keeps_chains_and_loses_nothing(members: list[list[str]]) -> None:
    """c: compute, x: communication, w: weight gradient."""
    numbered = [[100 * m + i for i in range(len(seq))] for m, seq in enumerate(members)]
    kind = {100 * m + i: k for m, seq in enumerate(members) for i, k in enumerate(seq)}
    merged = alternate(numbered, lambda n: kind[n] == "x", lambda n: kind[n] == "w")
    assert sorted(n for n, _ in merged) == sorted(kind)
    assert all(n // 100 == m for n, m in merged)
    for m, chain in enumerate(numbered):
        assert [n for n, mm in merged if mm == m] == chain


def test_compute_of_one_microbatch_stands_beside_the_wire_of_the_other() -> None:
    plan = moe_plan("dualpipe", 2, 6, layers=4)
    assert "(1F4;0B0)OVERLAP_F_B" in build("dualpipe", 2, 6).orders[0].cells()
    pair = [t for t in texts(plan, 0) if re.match(r"1F4|0[BIW]0", t)]
    swaps = [i for i, (a, b) in enumerate(pairwise(pair)) if a[:2] != b[:2]]
    assert len(swaps) > 4
    i = pair.index("1F4/l2.dispatch")
    assert pair[i + 1].startswith("0")  # the other's compute follows at once


@pytest.mark.parametrize("recompute", ["none", "mlp", "full"])
@pytest.mark.parametrize(("schedule", "pp"), [("1f1b", 1), ("1f1b", 2), ("gpipe", 2), ("zb1p", 2), ("zbv", 2)])
@pytest.mark.parametrize("word", ["overlapped", "shared", "serial"])
def test_what_stands_beside_experts_all_to_alls_is_what_the_job_says(
    word: str, schedule: str, pp: int, recompute: str
) -> None:
    """Told by an independent walk of a simulated step: which compute of a rank overlaps an all-to-all in time."""
    table = {
        "model": {"config": "deepseek-v3", "num_hidden_layers": 4, "first_k_dense_replace": 0, "seq_len": 1024}
        | {"num_nextn_predict_layers": 0},
        "cluster": {"gpu": "h100-sxm"},
        "parallel": {"pp": pp, "ep": 8 // pp, "dp": 8 // pp},
        "schedule": {"name": schedule, "microbatches": 4, "expert_all_to_all": word, "recompute": recompute},
    }
    job = job_from(table)
    check_plan(prepare(job).plan())
    beside = Counter[str]()
    ops = [r for r in predict(job).trace.to_dict("records") if r["rank"] == 0]
    wires = [r for r in ops if r["stream"] == "ep" and r["end_s"] - r["start_s"] > 1e-6]
    for r in ops:
        inside = (w["start_s"] < r["end_s"] - 1e-9 and r["start_s"] < w["end_s"] - 1e-9 for w in wires)
        if r["stream"] == "compute" and any(inside):
            beside["shared" if ".shared" in r["op"] else "W" if "W" in r["op"].partition("/")[0] else "other"] += 1
    assert (word == "serial") is not bool(beside), beside
    assert word == "overlapped" or not beside["W"], beside


def test_weight_gradients_stand_behind_the_communication_their_input_gradient_feeds() -> None:
    mine = texts(moe_plan("1f1b", 1, 1, layers=1), 0)
    i = mine.index("0I0/l0.experts")
    assert mine[i : i + 3] == ["0I0/l0.experts", "0I0/l0.dispatch", "0W0/l0.experts"]


def test_a_group_of_dependent_members_is_refused() -> None:
    graph = moe_graph("1f1b", 1, 2, layers=2)
    cells = ["(0F0;0B0)OVERLAP_F_B", "0F1", "0B1"]
    refusal(lower, apply(graph, [OrderDirective(table=((0, Order.of(cells)),))]), match="whose result it reads")


# --- coalescing ------------------------------------------------------------------------------


def test_b_is_cut_at_its_send_or_stays_whole_as_the_policy_says() -> None:
    cut, whole = (
        stage_plan("1f1b", 2, 2, None, PlanPolicy()),
        stage_plan("1f1b", 2, 2, None, PlanPolicy(whole_backward=True)),
    )
    assert texts(cut, 1) == ["1F0", "1I0", "1W0", "1F1", "1I1", "1W1"]
    assert texts(whole, 1) == ["1F0", "1B0", "1F1", "1B1"]
    assert texts(cut, 0) == texts(whole, 0)  # its B sends nothing


@fewer
@given(
    name=st.sampled_from(FIXED),
    ranks=st.integers(1, 3),
    mbs=st.integers(1, 4),
    zero=st.sampled_from([1, 3]),
    recompute=st.sampled_from([(), ("full",), ("norm",), ("mlp",)]),
    whole=st.booleans(),
)
def test_an_op_holds_one_microbatch_s_compute_between_communications(
    name: str, ranks: int, mbs: int, zero: int, recompute: tuple[str, ...], whole: bool
) -> None:
    ranks += ranks % 2 if name == "dualpipe" else 0
    policy = PlanPolicy(whole_backward=whole)
    plan = moe_plan(name, ranks, mbs, policy, zero=zero, recompute=recompute, layers=max(3, 2 * ranks))
    check_plan(plan)
    nodes = plan.graph.nodes
    collective = {e.dst for e in plan.graph.edges if not nodes[e.src].once and nodes[e.src].stream != "compute"}
    for s in plan.shapes:
        assert len({nodes[n].stage for n, _ in s.covers}) <= 1
        assert len({nodes[n].kind == "F" for n, _ in s.covers}) <= 1
        assert not {n for n, _ in s.covers[1:]} & collective  # an op waits for the wire before it begins, or not at all
        if s.kind is not OpKind.COMPUTE:
            assert len(s.covers) <= 1
    assert len({(s.stream, s.text, s.peer) for s in plan.shapes}) == len(plan.shapes)
    assert replay(plan, [1.0] * len(plan)) is not None


def test_recomputed_parts_run_again_just_before_they_are_needed() -> None:
    mine = texts(moe_plan("1f1b", 1, 1, layers=2, recompute=("full",)), 0)
    backward = [t for t in mine if t[1] != "F"]
    assert backward[0].startswith("0B0/head.head..l1.router")  # R of l1 up to its dispatch runs in the head's wake
    assert backward.index("0R0/l1.experts") < backward.index("0I0/l1.experts")
    assert backward.index("0W0/l1.experts") < backward.index("0R0/l0.dispatch")


def test_fused_pairs_are_one_op_and_publish_at_its_end() -> None:
    plan = stage_plan("dualpipe", 4, 8)
    i = plan.texts.index("(0F3;3B5)OVERLAP_F_B")
    assert [plan.text(k) for k in (i + 1, i + 2)] == ["0SEND_F3", "3SEND_B5"]


# --- one order of reductions -------------------------------------------------------------------


def disagreeing(p2p: MessageQueue = MessageQueue.CHANNELS) -> Plan:
    """DualPipe on two ranks whose last weight gradients were swapped by hand on rank 0."""
    schedule = build("dualpipe", 2, 4)
    graph = moe_graph("dualpipe", 2, 4, layers=4)
    cells = schedule.orders[0].cells()
    assert cells[-3:] == ["1B3", "0I1", "0W1"]
    mine = Order.of([*cells[:-3], "0B1", "1I3", "1W3"])
    other = Order.of([*schedule.orders[1].cells()])
    return lower(apply(graph, [OrderDirective(table=((0, mine), (1, other)))]), PlanPolicy(p2p=p2p))


def reductions(plan: Plan, program: int) -> list[str]:
    return [t for t in texts(plan, program, ("dp",)) if "RS/" in t]


def locally_ordered(plan: Plan) -> Plan:
    """Every program puts its reductions in the order of its own last contributions."""
    rows = list(range(len(plan)))
    for p in range(plan.programs):
        mine = [i for i in rows if plan.program[i] == p and "RS/" in plan.text(i)]
        own = {i: max(w for w in plan.waits.row(i).tolist() or [0]) for i in mine}
        last = {i: _last_w(plan, i) for i in mine}
        for place, i in zip(sorted(mine), sorted(mine, key=lambda i: (last[i], own[i])), strict=True):
            rows[place] = i
    return rearranged(plan, rows)


def _last_w(plan: Plan, reduction: int) -> int:
    node = plan.shapes[int(plan.shape[reduction])].covers[0][0]
    sources = {e.src for e in plan.graph.edges if e.dst == node}
    mine = [
        i
        for i in range(len(plan))
        if plan.program[i] == plan.program[reduction]
        and any(n in sources for n, _ in plan.shapes[int(plan.shape[i])].covers)
    ]
    return max(mine)


@pytest.mark.parametrize("p2p", [MessageQueue.CHANNELS, MessageQueue.SINGLE])
def test_owners_that_finish_in_different_orders_reduce_in_one(p2p: MessageQueue) -> None:
    plan = disagreeing(p2p)
    check_plan(plan, serial=p2p is MessageQueue.SINGLE)
    assert reductions(plan, 0) == reductions(plan, 1)
    with pytest.raises(PiperError, match=r"stream dp: program 0 runs .*RS/.* before .*RS/.*, program 1 behind it"):
        check_plan(locally_ordered(plan))


@fewer
@given(
    name=st.sampled_from(["dualpipe", "1f1b", "zbv"]),
    ranks=st.sampled_from([2, 4]),
    mbs=st.integers(1, 6),
    zero=st.integers(0, 3),
    tied=st.booleans(),
)
def test_a_reduction_stands_behind_its_own_last_contribution(
    name: str, ranks: int, mbs: int, zero: int, tied: bool
) -> None:
    plan = moe_plan(name, ranks, mbs, zero=zero, tied=tied, layers=2 * ranks)
    for i in np.flatnonzero(plan.kind == OpKind.COLLECTIVE).tolist():
        if re.fullmatch(r"\d+(RS|AR)/.*", plan.text(i)):
            assert _last_w(plan, i) < i


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["dualpipe", "1f1b"])
def test_reductions_may_share_the_stream_of_the_experts(name: str, zero: int) -> None:
    """Then waiting for another program would hold up compute: they stand where the dry run has them all done."""
    for mbs in (2, 5, 8):
        plan = moe_plan(name, 4, mbs, zero=zero, layers=8, tied=True, reduce_stream="ep")
        check_plan(plan)
        assert not {"dp"} & {s.stream for s in plan.shapes if "RS" in s.text or "AR" in s.text}


def test_step_ends_with_norm_update_gather() -> None:
    for zero, gathers in ((0, False), (1, True), (2, True), (3, False)):
        plan = moe_plan("1f1b", 2, 3, zero=zero, layers=2)
        tail = [re.sub(r"\d+([A-Z]+).*", r"\1", t) for t in texts(plan, 1, ("dp", "compute"))]
        after = tail[tail.index("NORM") :]
        assert after[:2] == ["NORM", "UPDATE"]
        assert set(after[2:]) == ({"AG"} if gathers else set())


def test_without_clipping_there_is_no_norm() -> None:
    plan = moe_plan("1f1b", 2, 3, replace(PlanPolicy(), clip=False), layers=2)
    check_plan(plan)
    assert not [t for t in plan.texts if "NORM" in t]


def test_an_unknown_merge_is_not_a_policy() -> None:
    assert set(PassMerge) == {"alternate", "fused", "template", "profile"}
    assert PlanPolicy().header() == {
        "merge": "alternate",
        "backward": "cut",
        "p2p": "channels",
        "lookahead": "1",
        "clip": "on",
    }
