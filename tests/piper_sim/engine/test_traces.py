"""A run as a trace: each op one row, times from the step's first start, memory beside them."""

from pathlib import Path

import numpy as np
import pytest

from ir.job.load import job_from
from ir.plan.plan import OpKind
from ir.trace.text import read_trace, write_trace
from piper_sim.study.pipeline import PassTimes, run_schedule
from piper_sim.study.predict import predict
from piper_sim.study.prediction import Prediction


@pytest.fixture(scope="module")
def predicted() -> Prediction:
    table = {
        "model": {"config": "tiny-moe", "seq_len": 128},
        "cluster": {"gpu": "h100-sxm"},
        "parallel": {"pp": 2, "dp": 4, "ep": 2, "layers": "even"},
        "schedule": {"name": "dualpipe", "microbatches": 6},
    }
    return predict(job_from(table))


def test_a_trace_has_each_op_of_the_step_once_where_it_ran(predicted: Prediction) -> None:
    plan, trace = predicted.plan, predicted.last_step
    start, end = predicted.run.start[-1], predicted.run.end[-1]
    names = [name for _, name in plan.streams]
    rows = sorted(zip(trace.rank, trace.stream, trace.op, trace.start_s, trace.end_s, strict=True))
    expected = sorted(
        (plan.program[i], names[plan.stream[i]], plan.text(i), start[i] - start.min(), end[i] - start.min())
        for i in range(len(plan))
    )
    assert rows == expected
    assert trace.start_s.min() == 0 and (trace.end_s >= trace.start_s).all()
    assert (trace.post_s == trace.start_s).all() and set(trace.step) == {1}


def test_two_ends_of_a_transfer_end_together_and_streams_are_in_order(predicted: Prediction) -> None:
    plan, run = predicted.plan, predicted.run
    pair = np.flatnonzero(plan.partner >= 0)
    assert (run.end[-1][pair] == run.end[-1][plan.partner[pair]]).all()
    for queue in plan.queues:
        assert (run.start[-1][queue][1:] >= run.end[-1][queue][:-1]).all()


def test_the_highest_memory_sample_is_the_peak(predicted: Prediction) -> None:
    memory = predicted.last_step.memory
    assert memory is not None and memory.time_s.min() >= 0
    for rank in range(2):
        mine = memory.rank == rank
        assert memory.bytes[mine].max() == predicted.planned.memory.peak[rank]
        assert (np.diff(memory.time_s[mine]) >= 0).all()
        assert memory.bytes[mine].min() >= predicted.planned.memory.state[rank].total


def test_a_trace_is_the_same_after_writing_and_reading(predicted: Prediction, tmp_path: Path) -> None:
    text = write_trace(predicted.last_step)
    (tmp_path / "trace.tsv").write_text(text, encoding="utf-8")
    assert write_trace(read_trace(tmp_path / "trace.tsv")) == text


def test_a_schedule_s_trace_is_in_the_unit_of_its_times() -> None:
    out = run_schedule("1f1b", 2, 3, times=PassTimes.parse("F=0.1,B=0.2"))
    trace = out.trace()
    compute = [s == "compute" for s in trace.stream]
    assert trace.end_s.max() == pytest.approx(0.1 * 4 * 3)
    assert sum(compute) == np.count_nonzero(out.plan.kind == OpKind.COMPUTE) == 12
