"""What the report draws beside the ops: it must be of the very step that it is drawn on."""

import json

import numpy as np
import pytest

from piper_sim import explain, load_job, predict
from piper_sim.report.marks import HOST
from piper_sim.study.explain.marks import marks_of
from tests.piper_sim.report.test_browser import JOB


@pytest.fixture(scope="module")
def both():
    p = predict(load_job(JOB))
    return p, marks_of(p)


def test_kinds_of_memory_sum_to_every_sample(both) -> None:
    p, marks = both
    assert (sum(marks.kinds.values()) == p.last_step.memory.bytes).all()
    assert all((v >= 0).all() for v in marks.kinds.values())
    # At each rank's peak they are the breakdown that `simulate` prints.
    for rank, parts in p.to_dict()["memory"]["breakdown_bytes"].items():
        mine = np.flatnonzero(p.last_step.memory.rank == int(rank))
        top = mine[p.last_step.memory.bytes[mine].argmax()]
        assert {k: int(v[top]) for k, v in marks.kinds.items()} == {k: parts[k] for k in marks.kinds}


def test_rows_wait_for_what_ended_before_them(both) -> None:
    p, marks = both
    trace = p.last_step
    of_compute = np.array([s == "compute" for s in trace.stream])
    known = np.flatnonzero((marks.after >= 0) & of_compute)
    late = trace.start_s[known] - trace.end_s[marks.after[known]]
    assert len(known) > len(trace) / 20 and abs(late).max() < 1e-12
    assert (marks.after == HOST).any()
    ends = np.flatnonzero(marks.partner >= 0)
    assert (marks.partner[marks.partner[ends]] == ends).all()
    assert {trace.op[i].replace("SEND", "RECV") == trace.op[marks.partner[i]] for i in ends if "SEND" in trace.op[i]}


def test_gaps_are_the_idle_time_and_the_path_fills_the_step(both) -> None:
    p, marks = both
    trace = p.last_step
    for g in marks.gaps:  # nothing computes in a gap
        inside = (trace.rank == g.rank) & (trace.start_s < g.end_s - 1e-12) & (trace.end_s > g.begin_s + 1e-12)
        assert not any(trace.stream[i] == "compute" and trace.start_s[i] >= g.begin_s for i in np.flatnonzero(inside))
    assert "straggler" in {g.cause for g in marks.gaps} and marks.slow == {1: 0.5}
    path = marks.path
    assert abs(path[-1].end_s - path[0].begin_s - p.iteration_s) < 1e-12
    assert [x.cause for x in path] == [x["cause"] for x in explain(load_job(JOB)).critical_path]


@pytest.mark.parametrize("axes", [{"tp": 2}, {"cp": 2}, {"tp": 2, "cp": 2, "dp": 2}])
def test_what_is_inside_ops_sums_to_what_the_breakdown_says(axes) -> None:
    alone = {"costs": {"interference": "none"}}  # an op that others slow down is longer, and so are its parts
    p = predict(load_job({**JOB, **alone, "parallel": {"pp": 4, **axes}, "cluster": {}}))
    marks, trace, found = marks_of(p, why=False), p.last_step, np.zeros(4)
    for i, text in enumerate(marks.inside):
        parts = json.loads(text or "[]")
        assert all(0 <= a < b <= 1 for a, b, _ in parts) and sorted(parts) == parts
        found[trace.rank[i]] += sum(b - a for a, b, _ in parts) * (trace.end_s[i] - trace.start_s[i])
    wanted = sum(p.breakdown[f"exposed_{axis}"].to_numpy() for axis in ("tp", "cp"))
    assert found.min() > 0 and found == pytest.approx(wanted, rel=2e-3)  # shares are told to four digits
    size = int(np.prod([axes.get(a, 1) for a in ("tp", "cp")]))
    assert marks.met[1].split()[1] == f"{size * axes.get('dp', 1)}–{size * axes.get('dp', 1) + size - 1}"


def test_where_nobody_meets_inside_ops_nothing_is_said(both) -> None:
    assert (both[1].inside, both[1].met) == ([], {})
