"""The engine against a second computation, and what must hold for any plan and any durations."""

import random
from collections import defaultdict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ir.core.errors import ErrorKind, PiperError
from ir.core.order import FloatArray
from ir.graph.sync import buckets
from ir.plan.plan import OpKind, Plan
from ir.schedules.registry import NAMES, build
from ir.schedules.schedule import OpTimes
from piper_sim import compiled
from piper_sim.engine import EngineRun, EngineScenario, MessageMode, play, run
from piper_sim.engine.scenario import carried
from piper_sim.pricing.hosts import inline
from piper_sim.study.pipeline import PassTimes, run_schedule
from tests.ir.plans import moe_plan, stage_plan, with_waits
from tests.piper_sim.engine.cases import CUT, HEAVY, LAYERS, STAGES, durations, layers, stages
from tests.piper_sim.engine.longest_paths import Cell, paragraph, times
from tests.refusals import refusal


def agrees(plan: Plan, duration: FloatArray, wire: MessageMode, steps: int) -> None:
    over = defaultdict(list)
    for i, on in zip(*(x.tolist() for x in carried(plan)), strict=True):
        over[i].append(on)
    start, end = times(plan, duration.tolist(), wire is MessageMode.BUFFERED, steps, over)
    found = run(plan, duration, wire, steps)
    assert found.start.tolist() == start
    assert found.end.tolist() == end


@HEAVY
@given(case=STAGES, seed=st.integers(0, 2**32), wire=st.sampled_from(MessageMode), steps=st.integers(1, 3))
def test_all_schedules_run_as_the_second_computation_says(case: Any, seed: int, wire: MessageMode, steps: int) -> None:
    plan = stages(*case)
    agrees(plan, durations(plan, seed), wire, steps)


@HEAVY
@given(case=LAYERS, seed=st.integers(0, 2**32), steps=st.integers(1, 3))
def test_collectives_across_programs_run_as_the_second_computation_says(case: Any, seed: int, steps: int) -> None:
    plan = layers(**case)
    agrees(plan, durations(plan, seed), MessageMode.RENDEZVOUS, steps)


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_next_step_waits_for_its_weights_and_nothing_else(name: str, zero: int) -> None:
    """First readers wait for the step's last gather of their bucket; leading communication for the update."""
    for tied in (False, True):
        plan = moe_plan(name, 4, 6, zero=zero, tied=tied, bucket_MiB=0.0005)
        ops = zip(*(x.tolist() for x in carried(plan)), strict=True)
        pairs = [(plan.text(i), plan.text(on), i, on) for i, on in ops]
        assert all(plan.program[i] == plan.program[on] for _, _, i, on in pairs)
        gathers = [i for i in range(len(plan)) if plan.kind[i] == OpKind.COLLECTIVE and "AG/" in plan.text(i)]
        assert sorted(on for _, _, _, on in pairs if plan.kind[on] != OpKind.COMPUTE) == gathers
        assert bool(gathers) == (zero in (1, 2))
        for reader, gather, i, on in pairs:
            if on in gathers:
                parts = parts_of(plan, gather.replace("AG", "").replace(f".p{plan.program[on]}", ""))
                mine = [k for k in range(len(plan)) if plan.program[k] == plan.program[i] and covered(plan, k) & parts]
                assert i == mine[0] and plan.kind[i] == OpKind.COMPUTE, (reader, gather)
            else:
                assert plan.text(on).endswith(f"UPDATE/p{plan.program[on]}")
                mine = np.flatnonzero((plan.kind == OpKind.COMPUTE) & (plan.program == plan.program[i]))
                assert plan.kind[i] != OpKind.COMPUTE and i < mine[0]
        leading = sum(bool(plan.kind[i] != OpKind.COMPUTE) for i in plan.bounds[:-1].tolist())
        assert leading == len({plan.program[i] for _, _, i, on in pairs if on not in gathers})


def parts_of(plan: Plan, key: str) -> set[tuple[int, str]]:
    """(stage, part) of everything that reads a bucket's weights."""
    bucket = next(b for b in buckets(plan.graph) if b.key == key)
    return {(plan.graph.entries[k].stage, plan.graph.entries[k].name) for k in bucket.members}


def covered(plan: Plan, i: int) -> set[tuple[int, str]]:
    return {(plan.graph.nodes[n].stage, plan.graph.nodes[n].part) for n, _ in plan.shapes[plan.shape[i]].covers}


def test_the_layer_plans_do_have_meetings_across_programs() -> None:
    """DualPipe's pairs reduce together, tied ends too, and clipping is everybody's."""
    assert moe_plan("dualpipe", 4, 6, CUT).collective.max() >= 0
    assert moe_plan("1f1b", 4, 6, CUT).collective.max() == -1
    assert moe_plan("1f1b", 4, 6, CUT, tied=True).collective.max() >= 0
    assert np.bincount(moe_plan("1f1b", 4, 6).collective + 1)[1:].tolist() == [4]


TIMES = ("F=1,B=2", "F=1,B=2,p2p=0.25", "F=2,I=1,W=3,p2p=1,FB=7", "F=3,I=4,W=2,p2p=2", "F=1,I=0,W=0,p2p=2")


@HEAVY
@given(
    name=st.sampled_from(NAMES),
    ranks=st.integers(1, 8),
    mbs=st.integers(1, 16),
    text=st.sampled_from(TIMES),
    wire=st.sampled_from(MessageMode),
)
def test_schedule_does_what_the_contract_says_in_words(
    name: str, ranks: int, mbs: int, text: str, wire: MessageMode
) -> None:
    ranks += ranks % 2 if name == "dualpipe" else 0
    t = PassTimes.parse(text)

    def seconds(cell: Cell) -> float:
        if len(cell) > 1:
            return float(t.FB)
        return float({"F": t.F, "I": t.I, "W": t.W, "B": t.I + t.W}[cell[0].token.name])

    out = run_schedule(name, ranks, mbs, None, t, wire)
    plan, compute = out.plan, out.plan.kind == OpKind.COMPUTE
    expected = paragraph(out.schedule, seconds, float(t.p2p), wire is MessageMode.RENDEZVOUS)
    for rank, rows in enumerate(expected):
        ops = np.flatnonzero(compute & (plan.program == rank)).tolist()
        start, end = (x[0] * out.scale for x in (out.run.start, out.run.end))
        assert [(plan.text(i), start[i], end[i]) for i in ops] == rows


@HEAVY
@given(case=STAGES, seed=st.integers(0, 2**32), k=st.integers(2, 9))
def test_time_is_monotone_scales_and_repeats(case: Any, seed: int, k: int) -> None:
    plan = stages(*case)
    duration, rng = durations(plan, seed), random.Random(seed)
    base = run(plan, duration, MessageMode.BUFFERED)
    again, scaled = run(plan, duration, MessageMode.BUFFERED), run(plan, duration * k, MessageMode.BUFFERED)
    assert same(base, again) and same(EngineRun(base.start * k, base.end * k), scaled)
    longer = duration.copy()
    i = rng.randrange(len(plan))
    longer[[i, int(plan.partner[i])] if plan.partner[i] >= 0 else i] += rng.randint(1, 9)
    late = run(plan, longer, MessageMode.BUFFERED)
    assert (late.end >= base.end).all() and (late.start >= base.start).all()
    assert (run(plan, duration, MessageMode.RENDEZVOUS).end >= base.end).all()
    load = np.bincount(plan.stream, weights=duration * (plan.kind == OpKind.COMPUTE))
    assert base.end.max() >= load.max()


def same(a: EngineRun, b: EngineRun) -> bool:
    return a.start.tobytes() == b.start.tobytes() and a.end.tobytes() == b.end.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_makespan_is_at_least_one_microbatch_through_all_stages(name: str) -> None:
    for ranks, mbs in ((2, 1), (4, 3), (6, 12)):
        out = run_schedule(name, ranks, mbs, times=PassTimes.parse("F=3,I=4,W=2,p2p=1,FB=9"))
        s = out.schedule
        rank = s.placements[0].rank_of_stage
        hops = sum(a != b for a, b in pairwise(rank))
        assert out.run.end.max() >= s.stages * (3 + 4) + 2 + 2 * hops
        for r in range(ranks):
            mine = (out.plan.program == r) & (out.plan.kind == OpKind.COMPUTE)
            assert out.run.end.max() >= out.run.start[0, mine].min() + out.duration[mine].sum()


def test_one_rank_takes_the_sum_of_its_ops() -> None:
    for name in NAMES:
        if name != "dualpipe":
            out = run_schedule(name, 1, 5, times=PassTimes.parse("F=3,I=4,W=2,p2p=1"))
            assert out.run.end.max() == out.schedule.stages * 5 * 9


def crossed() -> Plan:
    """Two ranks whose second waits, before its first forward, for what that forward makes possible."""
    plan = stage_plan("1f1b", 2, 2)
    at = {(int(plan.program[i]), plan.text(i)): i for i in range(len(plan))}
    return with_waits(plan, at[1, "1F0"], at[1, "1SEND_B0"])


def test_a_deadlock_names_every_rank_and_op_and_what_it_waits_for() -> None:
    stuck = crossed()
    for wire in MessageMode:
        caught = refusal(run, stuck, np.ones(len(stuck)), wire)
        assert caught.kind is ErrorKind.DEADLOCK
        story = caught.message.splitlines()
        assert story[0] == "no stream can move:"
        assert "  rank 1 compute stands at 1F0, which waits for 1SEND_B0" in story
        assert "  rank 0 compute stands at 0B0, which waits for 0RECV_B0" in story
        assert "  rank 0 recv<1 stands at 0RECV_B0, which waits for 1SEND_B0 of rank 1" in story


def test_a_deadlock_names_what_each_host_waits_for() -> None:
    stuck = crossed()
    for engine in (play, compiled.play):
        caught = refusal(engine, EngineScenario.of(stuck, host=inline(stuck)), np.ones(len(stuck)), 1)
        assert caught.message.splitlines()[-2:] == [
            "  rank 0 host stands at 0B1, which waits for 0B0",
            "  rank 1 host stands at 1RECV_F1, which waits for 1F0",
        ]


def test_a_deadlock_in_a_meeting_names_who_has_not_come() -> None:
    plan = moe_plan("1f1b", 2, 3)
    norm, update = [[i for i in range(len(plan)) if plan.text(i).startswith(t)] for t in ("0NORM", "1UPDATE")]
    assert plan.program[norm].tolist() == [0, 1]
    with pytest.raises(PiperError, match=r"rank 0 dp stands at 0NORM, which waits for 0NORM of rank 1"):
        run(with_waits(plan, norm[1], update[0]), np.ones(len(plan)))


def test_a_deadlock_of_a_later_step_is_found_too() -> None:
    plan = stage_plan("1f1b", 2, 2)
    assert run(plan, np.ones(len(plan)), steps=4).end.shape == (4, len(plan))


def test_a_buffered_receive_that_is_posted_late_or_out_of_order_ends_when_its_stream_gets_there() -> None:
    """Messages of one channel that overtake each other: the reader waits for its receive, not for the wire."""
    plan = stage_plan("1f1b", 2, 4)
    duration = np.where(plan.kind == OpKind.COMPUTE, 1.0, 0.0)
    sends = [i for i in range(len(plan)) if plan.kind[i] == OpKind.SEND and plan.program[i] == 0]
    duration[sends[0]] = 10.0
    agrees(plan, duration, MessageMode.BUFFERED, 2)


def test_a_searched_order_is_run_with_the_times_it_was_made_for() -> None:
    for name in ("zb2p", "v-half", "v-min"):
        out = run_schedule(name, 4, 9, times=PassTimes.parse("F=3,I=4,W=2,p2p=1"))
        assert [o.cells() for o in out.schedule.orders] == [
            o.cells() for o in build(name, 4, 9, None, OpTimes(3, 4, 2, 1)).orders
        ]
