"""A host that executes compute itself: which plans it can finish, and one that only free streams can."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ir.core.errors import ErrorKind, PiperError
from ir.lower import MessageQueue, PlanPolicy
from ir.plan.host import host_reads
from ir.plan.plan import OpKind, OpLists, Plan
from ir.verify import check_plan
from ir.verify.deadlock import OpDispatch, check_progress
from piper_sim.engine import EngineScenario, play
from piper_sim.pricing.hosts import inline
from tests.ir.plans import FIXED, fewer, moe_plan, stage_plan
from tests.refusals import refusal


@fewer
@given(
    name=st.sampled_from(FIXED),
    ranks=st.integers(1, 6),
    mbs=st.integers(1, 9),
    zero=st.integers(0, 3),
    lookahead=st.integers(0, 3),
)
def test_every_plan_of_ours_finishes_under_an_inline_host(
    name: str, ranks: int, mbs: int, zero: int, lookahead: int
) -> None:
    ranks += ranks % 2 if name == "dualpipe" else 0
    check_plan(stage_plan(name, ranks, mbs, None, PlanPolicy(lookahead=lookahead, clip=False)), inline=True)
    if ranks in (2, 4):
        check_plan(moe_plan(name, ranks, mbs, PlanPolicy(), zero=zero, layers=max(3, 2 * ranks)), inline=True)


def late_receives(plan: Plan) -> Plan:
    """Receives that the program dispatches only behind the next compute op, and that wait for nothing.

    Free streams do not care when they were dispatched; a host that is executing compute never gets to them.
    """
    order = list(range(len(plan)))
    for a, b in zip(plan.bounds[:-1].tolist(), plan.bounds[1:].tolist(), strict=True):
        for i in range(b - 2, a - 1, -1):
            if plan.kind[order[i]] == OpKind.RECV and plan.kind[order[i + 1]] == OpKind.COMPUTE:
                order[i], order[i + 1] = order[i + 1], order[i]
    by = np.array(order)
    new = np.argsort(by)
    rows, items = plan.waits.rows(), plan.waits.items
    kept = plan.kind[rows] != OpKind.RECV
    waits = OpLists.of(len(plan), new[rows[kept]], new[items[kept]])
    partner = np.where(plan.partner >= 0, new[plan.partner], -1)[by]
    columns = {c: getattr(plan, c)[by] for c in ("program", "shape", "mb", "mb2", "collective", "unit")}
    return replace(plan, waits=waits, partner=partner, **columns)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zbv"])
def test_what_free_streams_finish_an_inline_host_may_not(name: str) -> None:
    late = late_receives(stage_plan(name, 3, 4, None, PlanPolicy(p2p=MessageQueue.CHANNELS, clip=False)))
    check_progress(late)
    refused = refusal(check_progress, late, OpDispatch.INLINE, match="compute executed by the host")
    assert refused.kind is ErrorKind.DEADLOCK
    duration = np.ones(len(late))
    assert (play(EngineScenario.of(late), duration).end > 0).all()
    with pytest.raises(PiperError, match=r"host stands at .*, which waits for ") as stuck:
        play(EngineScenario.of(late, host=inline(late)), duration)
    assert stuck.value.kind is ErrorKind.DEADLOCK


def test_a_host_that_must_read_counts_first_may_be_stuck_where_free_streams_are_not() -> None:
    plan = moe_plan("dualpipe", 2, 8, PlanPolicy(clip=False), layers=4)
    computes = np.flatnonzero(plan.kind == OpKind.COMPUTE)
    reads = zip(*(x.tolist() for x in host_reads(plan)), strict=True)
    pairs = ((on, int(computes[np.searchsorted(computes, at)]), at) for at, on in reads)
    on, behind = next((on, b) for on, b, at in pairs if plan.mb[b] != plan.mb[at])  # another microbatch's compute
    rows, items = np.append(plan.waits.rows(), on), np.append(plan.waits.items, behind)
    late = replace(plan, waits=OpLists.of(len(plan), rows, items))
    check_progress(late)
    refusal(check_progress, late, OpDispatch.INLINE, match="compute executed by the host")
    with pytest.raises(PiperError, match=r"host stands at .*dispatch, which waits for .*counts"):
        play(EngineScenario.of(late, host=inline(late)), np.ones(len(late)))


def test_every_forward_exchange_of_rows_reads_its_own_counts() -> None:
    plan = moe_plan("zbv", 2, 3, PlanPolicy(clip=False), layers=6, recompute=("full",))
    pairs = {plan.text(a): plan.text(b) for a, b in zip(*(x.tolist() for x in host_reads(plan)), strict=True)}
    assert len(pairs) == 6 * 3 and all(b == a.replace("dispatch", "counts") for a, b in pairs.items())
    assert pairs.keys() == {t for t in plan.texts if t.endswith("dispatch") and "F" in t.split("/")[0]}
