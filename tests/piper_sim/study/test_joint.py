"""Joint scheduling against what is published: DeepSeek's trace, and what must lose."""

from dataclasses import replace

import numpy as np
import pytest

from experiments.joint import breakeven, paper, trace
from ir.core.errors import ErrorKind
from ir.directives import ReplicateDirective
from ir.job.load import job_from
from ir.lower import PassMerge, PlanPolicy, merge
from ir.plan.plan import OpLists
from ir.verify import check_plan
from piper_sim.engine import EngineScenario, HostModel, play
from piper_sim.pricing.hosts import one_queue
from piper_sim.pricing.prepare import hardware_of
from piper_sim.study.planned import PlannedJob
from piper_sim.study.predict import predict, timed
from tests.refusals import refusal

TEMPLATE = PlanPolicy(PassMerge.TEMPLATE, delay_wgrad=True)


def test_the_template_plays_deepseek_s_trace_within_two_percent() -> None:
    found = {label: (wanted, ours) for label, wanted, ours in trace.rows()}
    scaled = (f"all-to-all x {k}" for k in ("0", "1.5", "2"))
    for label in ("chunk, streams 7 and 23 as one", "chunk, as two", *scaled, "serial: one stream"):
        wanted, ours = found[label]
        assert ours == pytest.approx(wanted, rel=0.02), label
    for wanted, ours in (found["idle of 7 and 23, %"], found["idle of 27, %"]):
        assert abs(wanted - ours) < 3


def test_a_layer_that_is_modelled_takes_what_deepseek_s_does_and_less_where_messages_are_not_slowed() -> None:
    assert trace.modelled() == pytest.approx(trace.PUBLISHED_MS, rel=0.03)
    assert trace.modelled(comm_slowed={"all_to_all": 0.0}, all_to_all_spread=0.0) < 0.97 * trace.PUBLISHED_MS


def rotated(by: int) -> str:
    """DeepSeek's cycle with the forward's turns rotated."""
    f = [t for t in merge.CYCLE.split() if t.startswith("F")]
    turns = iter(f[by:] + f[:by])
    return " ".join(next(turns) if t.startswith("F") else t for t in merge.CYCLE.split())


@pytest.mark.parametrize("by", [1, 2, 3])
def test_a_rotated_template_and_turns_at_each_exchange_lose(by: int, monkeypatch: pytest.MonkeyPatch) -> None:
    good = [trace.play(TEMPLATE, k).span for k in (1.0, 1.5)]
    turns = [trace.play(PlanPolicy(), k).span for k in (1.0, 1.5)]
    assert all(t > 1.1 * g for t, g in zip(turns, good, strict=True))
    monkeypatch.setattr(merge, "CYCLE", rotated(by))
    assert all(trace.play(TEMPLATE, k).span > 1.04 * g for k, g in zip((1.0, 1.5), good, strict=True))


JOB = {
    "model": {"config": "deepseek-v3", "num_hidden_layers": 8, "first_k_dense_replace": 0},
    "cluster": {"gpu": "h800-sxm"},
    "parallel": {"pp": 2, "dp": 16, "ep": 8, "zero": 2},
    "schedule": {"name": "dualpipe", "merge": "template", "microbatches": 8},
}


def test_data_and_expert_parallel_traffic_on_one_stream_loses_the_overlap() -> None:
    """The directive decides: ZeRO-2's reductions on the experts' stream hold up the next exchange."""
    apart = predict(job_from(JOB))
    hardware = hardware_of(apart.prepared.job)
    mine = [
        replace(d, reduce_stream="ep", gather_stream="ep") if isinstance(d, ReplicateDirective) else d
        for d in apart.prepared.strategy
    ]
    shared = replace(apart.prepared, strategy=tuple(mine))
    check_plan(shared.plan())
    assert {s.stream for s in shared.plan().shapes if "RS" in s.text} == {"ep"}
    assert timed(PlannedJob.of(shared, hardware)).iteration_s > 1.03 * apart.iteration_s


@pytest.mark.parametrize("policy", [TEMPLATE, PlanPolicy()], ids=["template", "alternate"])
def test_on_one_queue_ops_start_in_launch_order_and_the_step_is_no_quicker(policy: PlanPolicy) -> None:
    plan = trace.pair_plan(policy)
    of = trace.seconds(plan, 2.0, two=False)
    took = np.array([sum(of(n) for n, _ in s.covers) for s in plan.shapes])[plan.shape]
    free = HostModel(np.zeros(len(plan)), OpLists.of(len(plan), *np.zeros((2, 0), dtype=np.int64)))
    plain, queued = (play(EngineScenario.of(plan, host=h), took, 1) for h in (free, one_queue(plan, free)))
    assert (np.diff(queued.start[0]) >= 0).all() and not (np.diff(plain.start[0]) >= 0).all()
    assert queued.end.max() >= plain.end.max()


def test_two_way_transfers_on_one_queue_are_refused_as_the_deadlock_they_are() -> None:
    e = refusal(predict, job_from(JOB | {"costs": {"host_model": "one-queue"}}), match="rank 0 host stands at")
    assert e.kind is ErrorKind.DEADLOCK


def test_piper_s_schedules_stand_in_its_order_where_experts_are_padded_as_there() -> None:
    plain, chunked, v = (
        paper.timed(paper.plan_of(paper.job("1B", 8, name)), padded=True).iteration_s
        for name in ("1f1b", "interleaved-1f1b", "dualpipev")
    )
    assert v < chunked < plain and plain / v == pytest.approx(1.13, abs=0.02)
    bare = [paper.timed(paper.plan_of(paper.job("1B", 8, name))).iteration_s for name in ("1f1b", "dualpipev")]
    assert bare[0] / bare[1] < 1.05  # without what the padding adds there is too little to hide exchanges under


def test_reductions_slow_all_to_alls_beside_them_and_on_one_stream_do_not() -> None:
    (apart, quick), (together, slow) = paper.slowed("dp"), paper.slowed("ep")
    assert apart == pytest.approx(1.46, abs=0.15) and together == 1.0 and slow > quick


def test_who_leads_depends_on_what_messages_cost_and_on_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breakeven, "SCHEDULES", ("1f1b", "zbv", "interleaved-1f1b-overlap"))
    monkeypatch.setattr(breakeven, "WIRES", (0.01, 1.0))
    found = breakeven.lines_of(breakeven.BreakEven("small", ranks=4, microbatches=2))
    assert [s for _, s in found.leaders()] == ["zbv", "interleaved-1f1b-overlap"]
    least = min(p.peak_GiB for p in found.points)
    assert found.leaders(least) == [(0.0, "1f1b")] and not found.leaders(least - 1)
    assert len(breakeven.table([found]).splitlines()) == 7 and breakeven.picture([found])[1:4] == b"PNG"
    assert len(list(breakeven.told(found))) == 5


def test_without_interference_overlap_gains_more_than_it_does_and_balanced_routing_flatters_everybody() -> None:
    schedule = {"name": "dualpipe", "merge": "template", "microbatches": 12}
    job = JOB | {"parallel": {"pp": 2, "dp": 16, "ep": 16, "zero": 1}, "schedule": schedule}
    plain = job | {"schedule": schedule | {"name": "1f1b", "merge": "alternate"}}

    def steps(**sections: dict[str, object]) -> list[float]:
        return [predict(job_from(table | sections)).iteration_s for table in (job, plain)]

    found, optimistic, uneven = steps(), steps(costs={"interference": "none"}), steps(routing={"kind": "zipf"})
    assert 0.1 < 1 - found[0] / found[1] < 1 - optimistic[0] / optimistic[1]
    assert optimistic[0] < found[0] < 0.8 * uneven[0] and found[1] < 0.8 * uneven[1]
