"""What holds for every schedule and shape: schedules.md, section 5, on lowered plans."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from ir.lower import P2P, Merge, Policy
from ir.plan.plan import OpKind, Plan
from ir.plan.text import parse_plan, plan_text
from ir.schedules.registry import NAMES
from ir.verify import check_plan
from tests.ir.plans import FIXED, WHOLE, schedule_of, stage_plan
from tests.ir.verify.edits import differences
from tests.ir.verify.replay import replay, serial

SINGLE = Policy(Merge.FUSED, whole_backward=True, p2p=P2P.SINGLE, clip=False)
POLICIES = (WHOLE, Policy(), SINGLE, Policy(p2p=P2P.SINGLE), Policy(lookahead=0), Policy(lookahead=3))
SECONDS = {"F": 4.0, "I": 5.0, "W": 3.0}
P2P_SECONDS = 1.0


@st.composite
def shapes(draw: st.DrawFn, ranks: int = 8, mbs: int = 32) -> tuple[str, int, int]:
    """A schedule, its ranks (odd ones too) and microbatches. The searched ones stay small: they are slow to make."""
    name = draw(st.sampled_from(NAMES))
    p = draw(st.integers(1, ranks if name in FIXED else 3))
    assume(name != "dualpipe" or p % 2 == 0)
    few = st.integers(1, 6)
    return name, p, draw(few | st.integers(1, mbs) if name in FIXED else few)


def seconds(plan: Plan) -> list[float]:
    nodes = plan.graph.nodes
    per_shape = [sum(SECONDS[str(nodes[n].kind)] for n, _ in s.covers) or P2P_SECONDS for s in plan.shapes]
    return [per_shape[s] for s in plan.shape.tolist()]


def passes(plan: Plan) -> dict[tuple[int, str, int], int]:
    """(stage, pass, microbatch) -> op."""
    out: dict[tuple[int, str, int], int] = {}
    for i in np.flatnonzero(plan.kind == OpKind.COMPUTE).tolist():
        for stage, letter, mb in re.findall(r"(\d+)([FIWB])(\d+)", plan.text(i)):
            for kind in "IW" if letter == "B" else letter:
                assert out.setdefault((int(stage), kind, int(mb)), i) == i
    return out


@given(shape=shapes(), policy=st.sampled_from(POLICIES))
def test_every_pass_is_there_once_on_its_stage_s_rank(shape: tuple[str, int, int], policy: Policy) -> None:
    plan, schedule = stage_plan(*shape, None, policy), schedule_of(*shape)
    op = passes(plan)
    assert len(op) == 3 * schedule.stages * schedule.microbatches
    for placement in schedule.placements:
        for stage, rank in enumerate(placement.rank_of_stage):
            assert {int(plan.program[op[stage, k, m]]) for k in "FIW" for m in placement.mbs} <= {rank}


@given(shape=shapes(), policy=st.sampled_from(POLICIES))
def test_every_plan_passes_the_rules(shape: tuple[str, int, int], policy: Policy) -> None:
    check_plan(stage_plan(*shape, None, policy), serial=policy.p2p is P2P.SINGLE)


@given(shape=shapes(ranks=6, mbs=16), policy=st.sampled_from(POLICIES), buffered=st.booleans())
def test_data_is_there_before_it_is_read(shape: tuple[str, int, int], policy: Policy, buffered: bool) -> None:
    plan = stage_plan(*shape, None, policy)
    ran = replay(plan, seconds(plan), buffered)
    assert ran is not None
    start, end = ran
    op, last = passes(plan), schedule_of(*shape).stages - 1
    for stage, kind, mb in op:
        here = op[stage, kind, mb]
        wanted = []
        if kind == "F" and stage:
            wanted.append(op[stage - 1, "F", mb])
        if kind == "I" and stage < last:
            wanted.append(op[stage + 1, "I", mb])
        before = {"F": [], "I": ["F"], "W": ["F", "I"]}[kind]
        for there in (*wanted, *(op[stage, k, mb] for k in before)):
            far = P2P_SECONDS if plan.program[there] != plan.program[here] else 0.0
            assert there == here or end[there] + far <= start[here]
    # Nobody but the step's end waits for a W: what follows one never needs its result.
    assert not any(
        "W" in plan.text(w) and plan.kind[i] == OpKind.SEND for i in range(len(plan)) for w in plan.waits.row(i)
    )


@given(shape=shapes(), policy=st.sampled_from(POLICIES))
def test_a_channel_has_one_order_at_both_ends(shape: tuple[str, int, int], policy: Policy) -> None:
    plan = stage_plan(*shape, None, policy)
    sent, got = defaultdict(list), defaultdict(list)
    for i in range(len(plan)):
        s = plan.shapes[int(plan.shape[i])]
        if m := re.fullmatch(r"(\d+)(SEND|RECV)_([FB])(\d+)", plan.text(i)):
            boundary = int(m[1]) + (0 if m[2] == "SEND" else -1 if m[3] == "F" else 1)
            message = f"{boundary}{m[3]}{m[4]}"  # called after the sending stage at both ends
            (sent if m[2] == "SEND" else got)[frozen(plan, i, s.peer, m[2])].append(message)
    assert dict(sent) == dict(got)


def frozen(plan: Plan, i: int, peer: int, way: str) -> tuple[int, int]:
    here = int(plan.program[i])
    return (here, peer) if way == "SEND" else (peer, here)


@given(shape=shapes(ranks=6, mbs=16), cut=st.booleans())
def test_one_queue_is_enough_channels_are_and_so_are_buffers(shape: tuple[str, int, int], cut: bool) -> None:
    one = stage_plan(*shape, None, Policy(p2p=P2P.SINGLE) if cut else SINGLE)
    pairs = stage_plan(*shape, None, Policy() if cut else WHOLE)
    assert replay(one, seconds(one), queues=serial(one)) is not None  # unbuffered, everything in one order
    assert replay(one, seconds(one)) is not None
    assert replay(pairs, seconds(pairs)) is not None
    assert replay(pairs, seconds(pairs), buffered=True) is not None


@given(shape=shapes(ranks=6, mbs=16), policy=st.sampled_from(POLICIES[:4]))
def test_no_plan_is_faster_than_its_work(shape: tuple[str, int, int], policy: Policy) -> None:
    plan, schedule = stage_plan(*shape, None, policy), schedule_of(*shape)
    duration = seconds(plan)
    ran = replay(plan, duration)
    assert ran is not None
    start, end = ran
    compute = np.flatnonzero(plan.kind == OpKind.COMPUTE)
    makespan = max(end)
    busy = np.bincount(plan.program[compute], weights=np.array(duration)[compute])
    assert makespan >= busy.max()
    ranks = schedule.placements[0].rank_of_stage
    borders = sum(a != b for a, b in pairwise(ranks))
    one = schedule.stages * (SECONDS["F"] + SECONDS["I"]) + SECONDS["W"] + 2 * borders * P2P_SECONDS
    assert makespan >= one
    if schedule.ranks == 1:
        assert makespan == busy.sum()
    for p in range(plan.programs):
        mine = compute[plan.program[compute] == p]
        assert makespan >= min(start[i] for i in mine) + busy[p]


def limits(name: str, ranks: int, mbs: int) -> list[int]:
    """Most activations alive on each rank, by the table of schedules.md (its worst rank where it has but that)."""
    table = {
        "gpipe": [mbs] * ranks,
        "1f1b": [min(ranks - r, mbs) for r in range(ranks)],
        "zb1p": [ranks] * ranks,
        "looped-bfs": [2 * mbs] * ranks,
        "zbv": [2 * ranks] * ranks,
        "dualpipe": [ranks + 1] * ranks,
        "dualpipev": [2 * ranks + 1] * ranks,
        "zb2p": [2 * ranks] * ranks,
        "v-half": [2 * ((ranks + 2) // 2)] * ranks,
        "v-min": [2 * ((ranks + 4) // 3)] * ranks,
    }
    return table.get(name, [2 * mbs] * ranks)


@given(shape=shapes(), policy=st.sampled_from(POLICIES))
def test_activations_end_where_they_began_and_stay_within_the_table(
    shape: tuple[str, int, int], policy: Policy
) -> None:
    plan = stage_plan(*shape, None, policy)
    b = plan.buffers
    assert (b.free >= b.alloc).all()
    wide = 2 * (1 + max(len(s.covers) for s in plan.shapes))
    time = np.concatenate([b.alloc * wide + 2 * b.alloc_cover, b.free * wide + 2 * b.free_cover + 1])
    change = np.concatenate([b.bytes, -b.bytes])
    program = np.concatenate([plan.program[b.alloc], plan.program[b.free]])
    for p, limit in enumerate(limits(*shape)):
        mine = np.flatnonzero(program == p)
        level = np.cumsum(change[mine[np.argsort(time[mine], kind="stable")]])
        assert level[-1] == 0 and level.min() >= 0
        assert level.max() <= limit
    fused = [s for s in plan.shapes if s.text.startswith("(")]
    assert all(str(plan.graph.nodes[s.covers[0][0]].kind) == "F" for s in fused)  # F allocates before B frees


@given(shape=shapes(), policy=st.sampled_from(POLICIES))
def test_messages_are_two_per_microbatch_and_border(shape: tuple[str, int, int], policy: Policy) -> None:
    plan, schedule = stage_plan(*shape, None, policy), schedule_of(*shape)
    borders = sum(len(p.mbs) * sum(a != b for a, b in pairwise(p.rank_of_stage)) for p in schedule.placements)
    count = Counter(plan.kind.tolist())
    assert count[OpKind.SEND] == count[OpKind.RECV] == 2 * borders


@given(shape=shapes(), policy=st.sampled_from([*POLICIES, Policy(p2p=P2P.USE)]))
def test_text_loses_nothing(shape: tuple[str, int, int], policy: Policy) -> None:
    plan = stage_plan(*shape, None, policy)
    text = plan_text(plan)
    back = parse_plan(text, plan.graph)
    assert not differences(plan, back)
    assert plan_text(back) == text
