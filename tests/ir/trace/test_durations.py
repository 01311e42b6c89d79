"""Given times of ops: sums over layers, whatever the ops cover; and traces turned back into seconds."""

import numpy as np
import pytest

from ir.core.errors import PiperError
from ir.job.build import prepare
from ir.job.load import job_from
from ir.plan.plan import OpKind, Plan
from ir.trace.durations import emulated_seconds, replayed_seconds
from ir.trace.trace import Trace


def plan_of(name: str, pp: int = 2, layers: int = 4, **model: object) -> Plan:
    table = {
        "model": {"config": "tiny-llama", "num_hidden_layers": layers, **model},
        "parallel": {"pp": pp, "layers": "even"},
        "schedule": {"name": name, "microbatches": 4},
    }
    return prepare(job_from(table)).plan()


@pytest.mark.parametrize("config", ["tiny-llama", "tiny-moe"])
@pytest.mark.parametrize("name", ["1f1b", "zb1p", "zbv", "dualpipe", "interleaved-1f1b"])
def test_a_step_takes_three_passes_of_each_layer_and_microbatch_however_it_is_cut(name: str, config: str) -> None:
    plan = plan_of(name, config=config)
    seconds = emulated_seconds(plan, 0.25)
    assert seconds.sum() == pytest.approx(0.25 * 3 * 4 * 4, abs=len(plan) * 2.0**-40)  # F, I, W; layers; microbatches
    assert not seconds[plan.kind != OpKind.COMPUTE].any()


def test_a_stage_of_one_layer_has_unit_ops_and_ends_take_nothing() -> None:
    plan = plan_of("zb1p", pp=4)
    seconds = dict(zip(plan.texts, emulated_seconds(plan, 0.5).tolist(), strict=True))
    assert {seconds[f"{s}F{m}"] for s in range(4) for m in range(4)} == {0.5}
    assert {seconds[f"{s}W{m}"] for s in range(1, 4) for m in (0, 1) if f"{s}W{m}" in seconds} <= {0.5}
    assert seconds["3UPDATE/p3"] == 0.0
    whole = plan_of("gpipe", pp=4)
    assert dict(zip(whole.texts, emulated_seconds(whole, 0.5).tolist(), strict=True))["0B0"] == 1.0


def test_recomputed_layers_take_their_forward_again() -> None:
    job = {
        "model": {"config": "tiny-llama", "num_hidden_layers": 4},
        "parallel": {"pp": 2, "layers": "even"},
        "schedule": {"name": "1f1b", "microbatches": 2, "recompute": "attention"},
    }
    plan = prepare(job_from(job)).plan()
    assert emulated_seconds(plan, 1.0).sum() == (3 + 0.5) * 4 * 2  # attention is one of a layer's two parts


def test_transfers_take_theirs_once_and_collectives_of_a_step_none() -> None:
    plan = plan_of("dualpipe")
    seconds = emulated_seconds(plan, 0.0, 0.125)
    assert (seconds[plan.kind == OpKind.SEND] == 0.125).all() and seconds.sum() == 0.125 * (
        plan.kind == OpKind.SEND
    ).sum()


def _trace(plan: Plan, steps: int = 2, drop: str = "") -> Trace:
    rows = [
        (s, int(plan.program[i]), plan.shapes[plan.shape[i]].stream, plan.text(i), 0.0, 1.0, 1.0 + i + s)
        for s in range(steps)
        for i in range(len(plan))
        if plan.text(i) != drop
    ]
    return Trace.of({}, rows)


def test_a_trace_gives_back_what_each_compute_op_took() -> None:
    plan = plan_of("zbv")
    seconds = replayed_seconds(plan, _trace(plan))
    compute = plan.kind == OpKind.COMPUTE
    assert seconds.shape == (2, len(plan)) and not seconds[:, ~compute].any()
    assert np.array_equal(seconds[:, compute], (np.arange(len(plan)) + np.array([[0.0], [1.0]]))[:, compute])


@pytest.mark.parametrize("trace", [lambda p: _trace(p, drop="1F2"), lambda p: Trace.of({}, [])])
def test_a_trace_that_lacks_an_op_is_refused(trace: object) -> None:
    plan = plan_of("1f1b")
    with pytest.raises(PiperError, match="lacks"):
        replayed_seconds(plan, trace(plan))  # type: ignore[operator]
