"""Blocking transfers: no stage computes beside one of its own, and what they hold up is known beforehand."""

import numpy as np
import pytest

from ir.core.errors import ErrorKind
from ir.job.build import prepare
from ir.job.load import job_from
from ir.plan.plan import OpKind, Plan
from ir.verify import check_plan
from piper_sim.engine import run
from tests.refusals import refusal


def plan_of(name: str, p2p: str, pp: int = 4, mbs: int = 6) -> Plan:
    table = {
        "model": {"config": "tiny-llama", "num_hidden_layers": 8, "seq_len": 64},
        "parallel": {"pp": pp},
        "schedule": {"name": name, "microbatches": mbs, "p2p": p2p},
    }
    return prepare(job_from(table)).plan()


def beside(plan: Plan, transfer: float) -> float:
    """For how long programs compute while a transfer of their own moves; ops take 1, transfers as given."""
    kind = np.array([s.kind for s in plan.shapes])[plan.shape]
    moving = (kind == OpKind.SEND) | (kind == OpKind.RECV)
    found = run(plan, np.where(moving, transfer, (kind == OpKind.COMPUTE).astype(float)))
    total = 0.0
    for p in range(plan.programs):
        mine = plan.program == p
        start, end = found.start[0], found.end[0]
        for s, e in zip(end[mine & moving] - transfer, end[mine & moving], strict=True):  # it moves when both are there
            at = mine & (kind == OpKind.COMPUTE)
            total += float(np.clip(np.minimum(end[at], e) - np.maximum(start[at], s), 0, None).sum())
    return total


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb1p"])
@pytest.mark.parametrize(("pp", "mbs"), [(2, 1), (3, 2), (4, 7)])
def test_nothing_is_computed_beside_a_transfer(name: str, pp: int, mbs: int) -> None:
    plan = plan_of(name, "blocking", pp, mbs)
    check_plan(plan)
    check_plan(plan, inline=True)
    assert plan.header["blocking"] == "on" and beside(plan, 0.5) == 0
    if mbs > 2:
        assert beside(plan_of(name, "overlapped", pp, mbs), 0.5) > 0


@pytest.mark.parametrize("name", ["interleaved-1f1b", "dualpipe", "zbv"])
def test_neighbours_that_both_send_first_would_wait_for_ever_and_are_refused(name: str) -> None:
    assert refusal(check_plan, plan_of(name, "blocking", mbs=8)).kind is ErrorKind.DEADLOCK
    check_plan(plan_of(name, "overlapped", mbs=8))
