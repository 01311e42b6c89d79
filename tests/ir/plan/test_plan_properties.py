"""What holds for every schedule and shape: schedules.md, section 5, on lowered plans."""

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from ir.lower import MessageQueue, PassMerge, PlanPolicy
from ir.plan.plan import OpKind, Plan
from ir.plan.text import parse_plan, plan_text
from ir.schedules.registry import NAMES
from ir.schedules.schedule import Schedule
from ir.verify import check_plan
from tests.ir.plans import FIXED, WHOLE, schedule_of, stage_plan
from tests.ir.verify.edits import differences
from tests.ir.verify.replay import replay, serial

SINGLE = PlanPolicy(PassMerge.FUSED, whole_backward=True, p2p=MessageQueue.SINGLE, clip=False)
POLICIES = (
    WHOLE,
    PlanPolicy(),
    SINGLE,
    PlanPolicy(p2p=MessageQueue.SINGLE),
    PlanPolicy(lookahead=0),
    PlanPolicy(lookahead=3),
)
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


@dataclass(frozen=True)
class Case:
    """One plan, of which all is asked that holds for every plan. buffered: how `ran` replays it."""

    shape: tuple[str, int, int]
    policy: PlanPolicy
    buffered: bool

    @cached_property
    def plan(self) -> Plan:
        return stage_plan(*self.shape, None, self.policy)

    @property
    def schedule(self) -> Schedule:
        return schedule_of(*self.shape)

    @cached_property
    def ran(self) -> tuple[list[float], list[float]]:
        """Start and end of every op."""
        ran = replay(self.plan, seconds(self.plan), self.buffered)
        assert ran is not None
        return ran


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


def every_pass_is_there_once_on_its_stage_s_rank(case: Case) -> None:
    plan, schedule = case.plan, case.schedule
    op = passes(plan)
    assert len(op) == 3 * schedule.stages * schedule.microbatches
    for placement in schedule.placements:
        for stage, rank in enumerate(placement.rank_of_stage):
            assert {int(plan.program[op[stage, k, m]]) for k in "FIW" for m in placement.mbs} <= {rank}


def every_plan_passes_the_rules(case: Case) -> None:
    check_plan(case.plan, serial=case.policy.p2p is MessageQueue.SINGLE)


def data_is_there_before_it_is_read(case: Case) -> None:
    plan, (start, end) = case.plan, case.ran
    op, last = passes(plan), case.schedule.stages - 1
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


def a_channel_has_one_order_at_both_ends(case: Case) -> None:
    plan = case.plan
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


def one_queue_is_enough_channels_are_and_so_are_buffers(case: Case) -> None:
    plan, took = case.plan, seconds(case.plan)
    if case.policy.p2p is MessageQueue.SINGLE:
        assert replay(plan, took, queues=serial(plan)) is not None  # unbuffered, everything in one order
    assert replay(plan, took, not case.buffered) is not None  # the other way: see `ran`


def no_plan_is_faster_than_its_work(case: Case) -> None:
    plan, schedule, (start, end) = case.plan, case.schedule, case.ran
    duration = seconds(plan)
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


def activations_end_where_they_began_and_stay_within_the_table(case: Case) -> None:
    plan = case.plan
    b = plan.buffers
    assert (b.free >= b.alloc).all()
    wide = 2 * (1 + max(len(s.covers) for s in plan.shapes))
    time = np.concatenate([b.alloc * wide + 2 * b.alloc_cover, b.free * wide + 2 * b.free_cover + 1])
    change = np.concatenate([b.bytes, -b.bytes])
    program = np.concatenate([plan.program[b.alloc], plan.program[b.free]])
    for p, limit in enumerate(limits(*case.shape)):
        mine = np.flatnonzero(program == p)
        level = np.cumsum(change[mine[np.argsort(time[mine], kind="stable")]])
        assert level[-1] == 0 and level.min() >= 0
        assert level.max() <= limit
    fused = [s for s in plan.shapes if s.text.startswith("(")]
    assert all(str(plan.graph.nodes[s.covers[0][0]].kind) == "F" for s in fused)  # F allocates before B frees


def messages_are_two_per_microbatch_and_border(case: Case) -> None:
    plan, schedule = case.plan, case.schedule
    borders = sum(len(p.mbs) * sum(a != b for a, b in pairwise(p.rank_of_stage)) for p in schedule.placements)
    count = Counter(plan.kind.tolist())
    assert count[OpKind.SEND] == count[OpKind.RECV] == 2 * borders


def text_loses_nothing(case: Case) -> None:
    plan = case.plan
    text = plan_text(plan)
    back = parse_plan(text, plan.graph)
    assert not differences(plan, back)
    assert plan_text(back) == text


STRUCTURE = (
    every_pass_is_there_once_on_its_stage_s_rank,
    every_plan_passes_the_rules,
    a_channel_has_one_order_at_both_ends,
    activations_end_where_they_began_and_stay_within_the_table,
    messages_are_two_per_microbatch_and_border,
    text_loses_nothing,
)
TIMES = (
    data_is_there_before_it_is_read,
    one_queue_is_enough_channels_are_and_so_are_buffers,
    no_plan_is_faster_than_its_work,
)


@given(st.builds(Case, shapes(), st.sampled_from(POLICIES), st.booleans()))
def test_what_holds_for_every_plan(case: Case) -> None:
    """One plan is made and asked everything; those that are replayed in time stay small."""
    _, ranks, mbs = case.shape
    for check in (*STRUCTURE, *(TIMES if ranks <= 6 and mbs <= 16 else ())):
        check(case)


@given(shapes())
def test_the_text_of_receives_at_their_use_loses_nothing(shape: tuple[str, int, int]) -> None:
    text_loses_nothing(Case(shape, PlanPolicy(p2p=MessageQueue.USE), False))
