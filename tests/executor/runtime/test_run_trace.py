"""A run's trace: the plan's own ops, each once, in the simulator's format."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from ir.job import load_job
from ir.plan.plan import OpKind
from ir.trace.text import read_trace, write_trace
from ir.trace.trace import Trace
from piper_sim.app.commands.output import trace_files
from piper_sim.report.timeline import text_timeline
from piper_sim.study.predict import predict
from tests.executor.runs import Ran, job_file, run

STEPS = 3


@pytest.fixture(scope="module", params=["1f1b", "dualpipe", "zbv"])
def ran(request: pytest.FixtureRequest) -> Ran:
    return run(f"schedule.name={request.param}", steps=STEPS)


def test_every_op_of_the_plan_is_there_once_per_step_and_rank(ran: Ran) -> None:
    plan, trace = ran.plan, ran.trace
    found = Counter(zip(trace.step.tolist(), trace.rank.tolist(), trace.stream, trace.op, strict=True))
    streams = [plan.shapes[s].stream for s in plan.shape.tolist()]
    ops = list(zip(plan.program.tolist(), streams, plan.texts, strict=True))
    assert found == Counter((step, *op) for step in range(STEPS) for op in ops)


def test_ops_wait_start_and_end_in_this_order_and_streams_never_overlap(ran: Ran) -> None:
    trace = ran.trace
    assert (trace.post_s <= trace.start_s).all() and (trace.start_s <= trace.end_s).all() and trace.post_s.min() == 0.0
    for rank, stream in set(zip(trace.rank.tolist(), trace.stream, strict=True)):
        mine = np.array([r == rank and s == stream for r, s in zip(trace.rank, trace.stream, strict=True)])
        assert (trace.start_s[mine][1:] >= trace.end_s[mine][:-1]).all()


def test_nothing_begins_before_what_the_plan_lets_it_wait_for(ran: Ran) -> None:
    plan, trace = ran.plan, ran.trace
    rows = zip(trace.step.tolist(), trace.rank.tolist(), trace.op, strict=True)
    at = {key: k for k, key in enumerate(rows)}
    keys = list(zip(plan.program.tolist(), plan.texts, strict=True))
    for step in range(STEPS):
        row = np.array([at[step, *key] for key in keys])
        post, start, end = trace.post_s[row], trace.start_s[row], trace.end_s[row]
        assert (start[plan.waits.rows()] >= end[plan.waits.items]).all()
        recv = np.flatnonzero(plan.kind == OpKind.RECV)
        assert (end[recv] >= post[plan.partner[recv]]).all()  # no message before its send


def _seconds(path: Path) -> dict[tuple[int, str, str], float]:
    """A trace's last step by (rank, stream, op): what any reader does, whoever wrote the file."""
    trace = read_trace(path)
    last = trace.step == trace.step.max()
    rows = zip(trace.rank[last].tolist(), (trace.end_s - trace.start_s)[last].tolist(), strict=True)
    names = [(s, o) for s, o, keep in zip(trace.stream, trace.op, last, strict=True) if keep]
    return {(rank, *name): seconds for (rank, seconds), name in zip(rows, names, strict=True)}


def test_both_engines_traces_are_read_by_the_same_code_and_join_on_op_text(ran: Ran, tmp_path: Path) -> None:
    predicted: Trace = predict(load_job(str(job_file(tmp_path)), ran.sets)).last_step
    (tmp_path / "predicted.tsv").write_text(write_trace(predicted))
    (tmp_path / "measured.tsv").write_text(write_trace(ran.trace))
    theirs, ours = _seconds(tmp_path / "predicted.tsv"), _seconds(tmp_path / "measured.tsv")
    assert theirs.keys() == ours.keys() and len(ours) == len(ran.plan)
    assert predicted.header.keys() >= {"writer", "clock_offset_s", "clock_uncertainty_s", "schedule"}
    assert ran.trace.header.keys() >= {"writer", "clock_offset_s", "clock_uncertainty_s", "schedule"}


def test_the_report_draws_it(ran: Ran) -> None:
    assert text_timeline(ran.trace, 100).count("rank") >= 2
    assert all(trace_files(ran.trace, "a run").values())


def test_the_step_time_lies_within_the_trace(ran: Ran) -> None:
    assert 0 < ran.object["iteration_s"] <= float(ran.trace.end_s.max()) and ran.object["connect_s"] > 0


def test_memory_is_measured_rank_by_rank() -> None:
    def peak(*sets: str) -> list[int]:
        ran = run(*sets, "model.seq_len=64", "schedule.microbatches=6", steps=1, memory=True)
        found = ran.object["memory"]["peak_allocated_bytes"]
        assert list(found) == ["0", "1"]
        return [*found.values()]

    few, many = peak("schedule.name=1f1b"), peak("schedule.name=gpipe")
    assert all(a < b for a, b in zip(few, many, strict=True))
    assert all(a < b for a, b in zip(peak("schedule.name=gpipe", "schedule.recompute=full"), many, strict=True))
