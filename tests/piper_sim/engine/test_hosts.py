"""Host models: what holds a host, checked by hand and by brute force, and what that does to a step."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import load_hardware
from cost_models.compute.host import HostCosts
from ir.lower import PlanPolicy
from ir.plan.plan import OpKind, Plan
from piper_sim.compiled.choose import steady
from piper_sim.engine import EngineScenario, HostModel, MessageMode, play
from piper_sim.pricing.hosts import ahead, inline, launches
from tests.ir.plans import FIXED, fewer, moe_plan, stage_plan

FREE = HostCosts(0.0, 0.0, 1 << 40)
TICK = 2.0**-20


def held(plan: Plan, host: HostModel, i: int) -> list[str]:
    """What holds op i, an apostrophe for the step before."""
    n = len(plan)
    return [plan.text(j % n) + "'" * (j >= n) for j in host.hold.row(i).tolist()]


def test_an_inline_host_executes_compute_itself() -> None:
    plan = stage_plan("1f1b", 2, 2)
    host = inline(plan)
    assert [f"{plan.text(i)} {held(plan, host, i)}" for i in range(*plan.bounds[:2])] == [
        '0F0 ["0B1\'"]',
        "0SEND_F0 ['0F0']",
        "0RECV_B0 ['0F0']",
        "0F1 ['0F0']",
        "0SEND_F1 ['0F1']",
        "0RECV_B1 ['0F1']",
        "0B0 ['0F1']",
        "0B1 ['0B0']",
    ]


def test_a_forward_dispatch_holds_the_host_until_its_counts_are_there() -> None:
    plan = moe_plan("1f1b", 2, 2, PlanPolicy(clip=False), layers=3)
    for host in (ahead(plan, FREE), inline(plan)):
        found = {plan.text(i): [h for h in held(plan, host, i) if "counts" in h] for i in range(len(plan))}
        forward = [t for t in found if t.endswith("dispatch") and "F" in t.split("/")[0]]
        assert len(forward) == 2 * 3
        for text, reads in found.items():
            assert reads == ([text.replace("dispatch", "counts")] if text in forward else []), text


@fewer
@given(name=st.sampled_from(FIXED), ranks=st.sampled_from([2, 4]), mbs=st.integers(1, 5), window=st.integers(1, 200))
def test_no_more_kernels_than_the_window_stand_behind_what_holds_the_host(
    name: str, ranks: int, mbs: int, window: int
) -> None:
    plan = moe_plan(name, ranks, mbs, PlanPolicy(clip=False))
    kernels = np.clip(launches(plan), 1, max(1, window // 2)).tolist()
    host = ahead(plan, replace(FREE, window=window))
    for a, b in zip(plan.bounds[:-1].tolist(), plan.bounds[1:].tolist(), strict=True):
        twice = [*range(len(plan) + a, len(plan) + b), *range(a, b)]  # the step before, then this one
        for i in range(a, b):
            mine = b - a + i - a
            room = [j for j in host.hold.row(i).tolist() if "counts" not in plan.text(j % len(plan))]
            place = max((twice.index(j) for j in room), default=-1)
            if place < 0:  # what must have gone are the first ops of the step before, and none of them computes
                assert not (plan.kind[a : i + 1] == OpKind.COMPUTE).any()
                continue
            assert plan.kind[twice[place] % len(plan)] == OpKind.COMPUTE
            assert place < mine, "it never waits for itself"
            # The first compute op behind it could still be pending: with it, the window would be exceeded.
            behind = range(place + 1, mine)
            later = next((x for x in behind if plan.kind[twice[x] % len(plan)] == OpKind.COMPUTE), mine)
            pending = sum(kernels[j % len(plan)] for j in twice[later : mine + 1])
            assert pending <= window or later == mine
            if place > mine - (b - a) and twice[place] not in plan.waits.row(i):
                assert pending + sum(kernels[j % len(plan)] for j in twice[place:later]) > window, "held for nothing"


@fewer
@given(name=st.sampled_from(FIXED), ranks=st.integers(1, 4), mbs=st.integers(1, 6), seed=st.integers(0, 99))
def test_a_host_never_makes_a_step_quicker_and_a_free_one_changes_nothing(
    name: str, ranks: int, mbs: int, seed: int
) -> None:
    ranks += ranks % 2 if name == "dualpipe" else 0
    plan = stage_plan(name, ranks, mbs, None, PlanPolicy(clip=False))
    duration = np.random.default_rng(seed).integers(0, 9, len(plan)) * TICK
    alone = play(EngineScenario.of(plan), duration, 2)
    free = play(EngineScenario.of(plan, host=ahead(plan, FREE)), duration, 2)
    capped = np.array_equal(free.end[0], alone.end[0])  # the window spans a step: only the second could be held
    assert capped and (free.end >= alone.end).all()
    for host in (inline(plan), ahead(plan, HostCosts(TICK, 3 * TICK, 8))):
        ran = play(EngineScenario.of(plan, host=host), duration, 2)
        assert (ran.end >= alone.end).all()
        assert ran.post is not None and (ran.start >= ran.post).all()


def test_where_launches_cost_most_the_host_sets_the_pace() -> None:
    plan = stage_plan("1f1b", 1, 6)
    host = ahead(plan, HostCosts(5 * TICK, 5 * TICK))
    host = replace(host, launch=np.full(len(plan), 5 * TICK))
    ran, steps = steady(EngineScenario.of(plan, host=host), np.full(len(plan), TICK), clipped=False)
    assert np.ptp(ran.end[1] - ran.end[0]) == 0
    assert (ran.end[1] - ran.end[0])[0] == 5 * TICK * len(plan)
    assert steps == 3, "one queue: each step behind the first is the step before it, shifted"


def test_launches_hidden_behind_the_device_cost_nothing() -> None:
    plan = stage_plan("1f1b", 1, 6)
    host = replace(ahead(plan, FREE), launch=np.full(len(plan), TICK))
    ran, steps = steady(EngineScenario.of(plan, host=host), np.full(len(plan), 5 * TICK), clipped=False)
    assert (ran.end[1] - ran.end[0])[0] == 5 * TICK * len(plan)
    assert steps == 3, "one queue: each step behind the first is the step before it, shifted"


def test_a_pass_starts_with_its_first_kernel() -> None:
    plan = moe_plan("1f1b", 2, 2, PlanPolicy(clip=False), layers=3)
    kernels, costs = launches(plan), HostCosts(TICK, 0.0)
    launch = np.round(ahead(plan, costs).launch / TICK).astype(int)
    for a, b in zip(plan.bounds[:-1], plan.bounds[1:], strict=True):
        compute = plan.kind[a:b] == OpKind.COMPUTE
        assert launch[a:b].sum() == kernels[a:b][compute].sum(), "none is lost"
        assert (np.cumsum(launch[a:b]) <= np.cumsum(np.where(compute, kernels[a:b], 0))).all(), "no op is later"
    first = int(np.flatnonzero(plan.kind == OpKind.COMPUTE)[0])
    assert launch[first] == 1 and launch[first + 1] >= kernels[first] - 1 > 0
    for i in range(1, len(plan)):  # what the host reads, it has launched
        if any("counts" in h for h in held(plan, ahead(plan, costs), i)) and plan.kind[i - 1] == OpKind.COMPUTE:
            assert launch[i] == 0
    turning = ahead(plan, HostCosts(TICK, 0.0, turn=TICK))
    assert (turning.launch[plan.kind == OpKind.COMPUTE] >= TICK).all(), "a host that waits has nothing left to launch"


def test_there_is_no_host_for_buffered_messages() -> None:
    plan = stage_plan("1f1b", 2, 2)
    with pytest.raises(ValueError, match="no host to wait for"):
        EngineScenario.of(plan, MessageMode.BUFFERED, host=inline(plan))


def test_what_a_launch_costs_comes_from_the_hardware_file() -> None:
    assert HostCosts.of(load_hardware("cpu")).launch == 0.0
    assert 0 < HostCosts.of(load_hardware("h100-sxm")).launch < 1e-4
