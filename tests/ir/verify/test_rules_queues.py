"""Which plans finish on a GPU, whatever hardware queues its streams fall on; and that each hang is found and told."""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ir.core.errors import ErrorKind, PiperError
from ir.lower import MessageQueue, PlanPolicy
from ir.plan.plan import OpLists, Plan
from ir.verify.check import check_plan
from ir.verify.deadlock import OpDispatch, check_progress, takes_turns
from ir.verify.queues import DeviceQueues, check_device
from tests.ir.plans import FIXED, fewer, moe_plan, stage_plan


def plan_of(name: str, ranks: int = 4, mbs: int = 8) -> Plan:
    return stage_plan(name, ranks + ranks % 2 if name == "dualpipe" else ranks, mbs, None, PlanPolicy())


def stops(plan: Plan, device: DeviceQueues) -> str | None:
    try:
        check_device(plan, device)
    except PiperError as error:
        assert error.kind is ErrorKind.DEADLOCK and error.suggestion
        return error.message
    return None


@pytest.mark.parametrize("queues", [1, 2, 3, 8, 32])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_1f1b_finishes_on_any_queues_even_if_messages_never_overlap(queues: int, ranks: int) -> None:
    for together in (True, False):
        assert stops(plan_of("1f1b", ranks), DeviceQueues(queues, together=together)) is None


@pytest.mark.parametrize("name", ["looped-bfs", "dualpipe", "dualpipev"])
def test_one_queue_stops_these_and_who_waits_for_whom_comes_round(name: str) -> None:
    message = stops(plan_of(name), DeviceQueues(1))
    assert message is not None and "hardware queue 0 behind" in message
    lines = message.splitlines()[1:]
    ends = [re.search(r"(\S+) of program (\d+)$", line) for line in lines]
    starts = [re.match(r"  program (\d+) (\S+) ", line) for line in lines]
    assert all(ends) and all(starts)
    follow = [(m[1], m[2]) for m in ends if m]
    assert follow == [(m[2], m[1]) for m in [*starts[1:], starts[0]] if m]
    assert stops(plan_of(name), DeviceQueues(32)) is None


@pytest.mark.parametrize("name", [n for n in FIXED if n != "1f1b"])
def test_where_communicators_take_turns_only_1f1b_finishes(name: str) -> None:
    assert stops(plan_of(name), DeviceQueues(32, together=False)) is not None


ORDERED = PlanPolicy(p2p=MessageQueue.SINGLE)


def ordered(name: str, ranks: int, mbs: int, zero: int | None) -> Plan:
    ranks += ranks % 2 if name == "dualpipe" else 0
    if zero is None:
        return stage_plan(name, ranks, mbs, None, ORDERED)
    return moe_plan(name, ranks, mbs, ORDERED, zero=zero)


@fewer
@given(
    name=st.sampled_from([*FIXED, "zb2p", "v-half", "v-min"]),
    ranks=st.integers(1, 5),
    mbs=st.integers(1, 9),
    zero=st.sampled_from([None, 0, 1, 2, 3]),
    queues=st.sampled_from([1, 3, 8, 32]),
    seed=st.none() | st.integers(0, 99),
    warm=st.booleans(),
    together=st.booleans(),
)
def test_ordered_transfers_finish_on_every_device(
    name: str, ranks: int, mbs: int, zero: int | None, queues: int, seed: int | None, warm: bool, together: bool
) -> None:
    plan = ordered(name, ranks, mbs, zero)
    check_plan(plan, serial=True, inline=True)
    assert takes_turns(plan) and stops(plan, DeviceQueues(queues, seed, warm=warm, together=together)) is None


@pytest.mark.parametrize("name", ["zbv", "dualpipe", "interleaved-1f1b"])
def test_an_order_that_two_ranks_disagree_on_stops(name: str) -> None:
    """The control: two transfers of one rank change places, in their dispatch order."""
    plan = ordered(name, 4, 6, None)
    moves = np.flatnonzero((plan.partner >= 0) & (plan.program == 1)).tolist()
    peer = plan.program[plan.partner]
    assert not all(takes_turns(_swapped(plan, a, b)) for a, b in pairwise(moves) if peer[a] != peer[b])


def _swapped(plan: Plan, a: int, b: int) -> Plan:
    """Two ops of a plan in each other's places; who waits for one, or is its partner, follows it."""
    at = np.arange(len(plan))
    at[[a, b]] = b, a
    waits = OpLists.of(len(plan), at[plan.waits.rows()], at[plan.waits.items])
    moved = {k: getattr(plan, k)[at] for k in ("shape", "mb", "mb2", "unit", "collective")}
    partner = np.where(plan.partner >= 0, at[plan.partner], -1)[at]
    return replace(plan, waits=waits, partner=partner, **moved)


@fewer
@given(name=st.sampled_from(FIXED), ranks=st.integers(1, 5), mbs=st.integers(1, 9), queues=st.integers(1, 16))
def test_queues_cut_in_two_never_stop_what_finished(name: str, ranks: int, mbs: int, queues: int) -> None:
    plan = plan_of(name, ranks, mbs)
    if stops(plan, DeviceQueues(queues)) is None:
        assert stops(plan, DeviceQueues(2 * queues)) is None
    assert stops(plan, DeviceQueues(64)) is None  # a queue for each stream: what `check_plan` has proved


@fewer
@given(name=st.sampled_from(FIXED), mbs=st.integers(2, 6), seed=st.integers(0, 99))
def test_a_plan_that_runs_as_one_stream_finishes_on_any_queues(name: str, mbs: int, seed: int) -> None:
    plan = plan_of(name, 4, mbs)
    try:
        check_progress(plan, OpDispatch.SERIAL)
    except PiperError:
        return
    assert stops(plan, DeviceQueues(1)) is None and stops(plan, DeviceQueues(3, seed=seed)) is None


def test_chance_stops_what_turns_do_not() -> None:
    plan = plan_of("dualpipe")
    assert stops(plan, DeviceQueues(8)) is None
    assert any(stops(plan, DeviceQueues(8, seed=seed)) for seed in range(60))


def test_a_cold_device_stops_where_receives_spin_before_the_first_kernel() -> None:
    for name in ("zbv", "dualpipe"):
        message = stops(plan_of(name), DeviceQueues(32, warm=False))
        assert message is not None and "is held by the host for" in message
        assert stops(plan_of(name), DeviceQueues(32)) is None


def test_thread_blocks_of_all_streams_leave_some_to_compute() -> None:
    plan = plan_of("1f1b")
    assert stops(plan, DeviceQueues(blocks=32)) is None
    message = stops(plan, DeviceQueues(blocks=33))
    assert message is not None and "none of 132 SMs" in message


def test_who_waits_for_whom_is_told_as_it_was(golden: Callable[[str, str], None]) -> None:
    said = []
    for n in range(60):
        rng = Random(n)
        picked = {"queues": (1, 2, 4), "seed": (3, None), "warm": (False,), "together": (False,), "blocks": (44, 66)}
        device = DeviceQueues(**{k: rng.choice(v) for k, v in picked.items() if rng.random() < 0.4})
        name, ranks, mbs = rng.choice(FIXED), rng.randint(2, 4), rng.randint(1, 6)
        plan = plan_of(name, ranks, mbs) if n % 4 else ordered(name, ranks, mbs, n % 3)
        try:
            check_device(plan, device)
            said.append(f"{name} P{ranks} M{mbs} {device}: finishes\n")
        except PiperError as error:
            said.append(f"{name} P{ranks} M{mbs} {device}: {error}\n")
    golden("hangs.txt", "".join(said))
