"""Where time went, counted again interval by interval; and whether the reported step is the one that repeats."""

import random
from collections import defaultdict
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ir.job.load import job_from
from ir.plan.plan import OpKind, OpLists, Plan
from piper_sim.compiled.choose import steady
from piper_sim.engine import EngineRun, EngineScenario, HostModel, KernelInterference, MessageMode, play, run
from piper_sim.pricing.costs import OpCosts
from piper_sim.pricing.scenario import scenario_of
from piper_sim.pricing.structure import CostShare
from piper_sim.study.breakdown import KEYS, breakdown
from piper_sim.study.predict import predict
from piper_sim.study.prediction import Prediction
from tests.piper_sim.engine.cases import HEAVY, LAYERS, durations, layers

Interval = tuple[float, float]
SPENT = {
    "COMPUTE": "compute",
    "RECOMPUTE": "recompute",
    "TP": "exposed_tp",
    "CP": "exposed_cp",
    "OPTIMIZER": "optimizer",
}


def by_hand(scenario: EngineScenario, ran: EngineRun, costs: OpCosts) -> list[dict[str, float]]:
    """The breakdown from its definition: walk each compute stream, look at each gap, and at what was on the wire."""
    plan, n = scenario.plan, len(scenario.plan)
    over = defaultdict(list)
    for i, on in zip(scenario.late.tolist(), scenario.before.tolist(), strict=True):
        over[i].append(on)
    met: dict[tuple[str, int], list[int]] = defaultdict(list)
    for i in range(n):
        if plan.partner[i] >= 0:
            met["pair", min(i, int(plan.partner[i]))].append(i)
        elif plan.collective[i] >= 0:
            met["group", int(plan.collective[i])].append(i)
        else:
            met["alone", i].append(i)
    wires: dict[int, list[Interval]] = defaultdict(list)
    for step in (-2, -1)[-len(ran.end) :]:
        for group in met.values():
            moving = max(ran.start[step][i] for i in group)
            for i in group:
                wires[int(plan.stream[i])].append((moving, ran.end[step][i]))
    out = []
    for p in range(plan.programs):
        ops = [i for i in range(n) if plan.program[i] == p and plan.kind[i] == OpKind.COMPUTE]
        row = dict.fromkeys(KEYS, 0.0)
        time = ran.end[-2][ops[-1]] if len(ran.end) > 1 else 0.0
        for i in ops:
            start, end = ran.start[-1][i], ran.end[-1][i]
            assert start >= time
            if start > time:
                waits = [(ran.end[-1][w], w, -1) for w in plan.waits.row(i)]
                waits += [(ran.end[-2][w], w, -2) for w in over[i] if len(ran.end) > 1]
                latest = max((t for t, _, _ in waits), default=time)
                post = latest if ran.post is None else ran.post[-1][i]
                assert max(time, latest, post) == start, "nothing else keeps an op from starting"
                ready = max(time, latest)
                row["host"] += start - ready
                if ready > time:
                    on, step = next((w, k) for t, w, k in waits if t == latest)
                    stream, begun, done = int(plan.stream[on]), time, time
                    if scenario.host is not None and ran.post is not None:
                        done = min(max(ran.post[step][on], time), ready)
                        begun = min(max(ran.post[step][on] - scenario.host.launch[on], time), ready)
                    row["host"] += done - begun
                    for lo, hi in ((time, begun), (done, ready)):
                        moving = sum(max(0.0, min(hi, b) - max(lo, a)) for a, b in wires[stream])
                        row[axis(plan, stream)] += moving
                        row["dependency"] += hi - lo - moving
            for share in CostShare:
                row[SPENT[share.name]] += costs.shares[i][share]
            row["slowdown"] += end - start - costs.duration[i]
            time = end
        out.append(row)
    return out


def axis(plan: Plan, stream: int) -> str:
    name = plan.streams[stream][1]
    return "exposed_pp" if name[:4] in ("send", "recv", "p2p") else f"exposed_{name}"


def agrees(scenario: EngineScenario, ran: EngineRun, costs: OpCosts) -> None:
    found, expected = breakdown(scenario, ran, costs), by_hand(scenario, ran, costs)
    for row, want in zip(found.seconds, expected, strict=True):
        rest = found.iteration_s - sum(want.values())  # of a rank that has not settled
        assert rest >= -1e-9
        assert list(row) == list(KEYS)
        assert row == pytest.approx({**want, "dependency": want["dependency"] + rest}, abs=1e-9)
        assert sum(row.values()) == pytest.approx(found.iteration_s, abs=1e-9)
        assert min(row.values()) >= 0.0


def costs_of(plan: Plan, seed: int) -> OpCosts:
    """Random whole durations, each compute op's in one random share."""
    duration, rng = durations(plan, seed, 30), random.Random(seed)
    shares = np.zeros((len(plan), len(CostShare)))
    for i in np.flatnonzero(plan.kind == OpKind.COMPUTE).tolist():
        shares[i, rng.randrange(len(CostShare))] = duration[i]
    return OpCosts(duration, shares)


@HEAVY
@given(case=LAYERS, seed=st.integers(0, 2**32))
def test_every_second_of_a_step_is_where_an_interval_count_puts_it(case: Any, seed: int) -> None:
    plan = layers(**case)
    world, costs = EngineScenario.of(plan), costs_of(plan, seed)
    ran, _ = steady(world, costs.duration, case["clip"])
    agrees(world, ran, costs)
    cold = play(world, costs.duration)
    agrees(world, cold, costs)
    assert breakdown(world, cold, costs).iteration_s == cold.end[0][plan.kind == OpKind.COMPUTE].max()


@HEAVY
@given(case=LAYERS, seed=st.integers(0, 2**32), busy=st.booleans(), slowed=st.booleans())
def test_what_hosts_and_neighbours_cost_has_its_place(case: Any, seed: int, busy: bool, slowed: bool) -> None:
    """A host that is late, kernels slowed by messages: their seconds stand under their own names, counted by hand."""
    plan = layers(**case)
    costs, rng, n = costs_of(plan, seed), random.Random(seed), len(plan)
    some = np.arange(0, n, 7)  # held by the same op of the step before
    host = HostModel(np.array([rng.choice([0.0, 0.0, 1.0, 4.0]) for _ in range(n)]), OpLists.of(n, some, n + some))
    half = np.array([[0.5]])
    slow = KernelInterference(np.zeros(n, dtype=np.int64), half, half, half)
    world = EngineScenario.of(plan, host=host if busy else None, slow=slow if slowed else None)
    ran = play(world, costs.duration, 3).last(2)
    agrees(world, ran, costs)
    rows = breakdown(world, ran, costs).seconds
    assert (sum(r["host"] for r in rows) > 0) <= busy and (sum(r["slowdown"] for r in rows) > 0) <= slowed


@HEAVY
@given(case=LAYERS, seed=st.integers(0, 2**32))
def test_the_reported_step_is_the_one_that_repeats(case: Any, seed: int) -> None:
    """Further steps only shift the reported one, by its own length."""
    plan = layers(**case)
    world, costs = EngineScenario.of(plan), costs_of(plan, seed)
    ran, steps = steady(world, costs.duration, case["clip"])
    longer = run(plan, costs.duration, MessageMode.RENDEZVOUS, steps + 3)
    compute = plan.kind == OpKind.COMPUTE
    step = ran.end[-1] - ran.end[-2]
    last = [np.flatnonzero(compute & (plan.program == p))[-1] for p in range(plan.programs)]
    assert np.ptp(step[last]) == 0
    for k in (1, 2, 3):
        assert (longer.end[steps - 1 + k] - longer.end[steps - 2 + k] == step[last[0]])[last].all()
    assert breakdown(world, ran, costs).iteration_s == step[last[0]]
    again = breakdown(world, EngineRun(longer.start[-2:], longer.end[-2:]), costs)
    assert again == breakdown(world, ran, costs)


@lru_cache(maxsize=64)
def predicted(config: str, schedule: str, zero: int, clip: float = 1.0, **parallel: Any) -> Prediction:
    table = {
        "model": {"config": config, "seq_len": 512},
        "cluster": {"gpu": "h800-sxm"},
        "parallel": {"pp": 4, "dp": 4, "zero": zero, "layers": "even", **parallel},
        "schedule": {"name": schedule, "microbatches": 8, "recompute": ("norm",)},
        "optimizer": {"clip_norm": clip},
    }
    return predict(job_from(table))


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
def test_breakdowns_of_jobs_sum_to_the_step_and_hide_nothing(schedule: str, zero: int, clip: float) -> None:
    p = predicted("tiny-moe", schedule, zero, clip, ep=2)
    agrees(scenario_of(p.planned.model, p.plan, p.planned.classes, p.costs.duration), p.run, p.costs)
    found: Any = p.to_dict()
    rows = found["time_breakdown"].values()
    assert all(sum(row.values()) == pytest.approx(p.iteration_s, abs=1e-9) for row in rows)
    assert found["bubble_fraction"] == pytest.approx(sum(r["dependency"] for r in rows) / (4 * p.iteration_s))
    exposed = sum(v for r in rows for k, v in r.items() if k.startswith("exposed"))
    assert found["exposed_comm_s"] == pytest.approx(exposed / 4)
    assert found["ops"] == p.steps * len(p.plan)
    scenario = scenario_of(p.planned.model, p.plan, p.planned.classes, p.costs.duration)
    longer = play(scenario, p.costs.duration, p.steps + 4)
    compute = np.flatnonzero(p.plan.kind == OpKind.COMPUTE)
    assert (longer.end[-1] - longer.end[-2])[compute] == pytest.approx(p.iteration_s, abs=1e-12)


def test_what_is_gathered_after_the_update_is_waited_for_by_the_next_step() -> None:
    """The last transfer of a ZeRO-1 step is not free: the next forward needs those weights."""
    p = predicted("tiny-moe", "1f1b", 1, 1.0, ep=2)
    plan = p.plan
    gathers = [i for i in range(len(plan)) if "AG/" in plan.text(i) and plan.program[i] == 0]
    slow = OpCosts(p.costs.duration.copy(), p.costs.shares)
    slow.duration[gathers] += 1.0
    world = scenario_of(p.planned.model, p.plan, p.planned.classes, p.costs.duration)
    ran, _ = steady(world, slow.duration, True)
    longer = breakdown(world, ran, slow)
    assert longer.iteration_s == pytest.approx(p.iteration_s + len(gathers), rel=1e-3)
    exposed = [b.seconds[0]["exposed_dp"] for b in (longer, p.times)]
    assert exposed[0] == pytest.approx(exposed[1] + len(gathers), rel=1e-3)
    agrees(world, ran, slow)


def test_tensor_and_context_parallel_time_is_named_by_its_axis() -> None:
    p = predicted("tiny-llama", "1f1b", 1, tp=2, cp=2, dp=1)
    rows = p.times.seconds
    assert all(r["exposed_tp"] > 0 and r["exposed_cp"] > 0 and r["recompute"] > 0 and r["optimizer"] > 0 for r in rows)
    agrees(scenario_of(p.planned.model, p.plan, p.planned.classes, p.costs.duration), p.run, p.costs)
    q = predicted("tiny-llama", "1f1b", 1)
    assert all(r["exposed_tp"] == r["exposed_cp"] == r["exposed_ep"] == 0 for r in q.times.seconds)
