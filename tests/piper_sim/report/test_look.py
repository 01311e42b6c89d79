"""Lanes and classes: every row stands in one lane and has one look."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_sim.report.look import LOOKS, coverage, lanes_of, look_of, looks_of, tick_times


@pytest.mark.parametrize(
    ("stream", "op", "key"),
    [
        ("compute", "12F345", "F"),
        ("compute", "0B0", "B"),
        ("compute", "3I7/l1.experts", "I"),
        ("compute", "3W7", "W"),
        ("compute", "3R7", "R"),
        ("compute", "2RS", "other"),
        ("compute", "clip", "other"),
        ("compute", "2Fx", "other"),
        ("host", "2F0", "other"),
        ("dp", "2RS", "dp"),
        ("edp", "2RS", "dp"),
        ("dp_stream", "2RS", "dp"),
        ("send>0", "2SEND_F0", "pp"),
        ("7", "2F0", "comm"),
        ("my_stream", "2F0", "comm"),
    ],
)
def test_streams_say_what_kind_of_work_and_ops_which_pass(stream: str, op: str, key: str) -> None:
    assert look_of(stream, op).key == key


def test_glyphs_keys_and_colours_are_all_different() -> None:
    for name in ("key", "glyph", "word", "colour"):
        assert len({getattr(look, name) for look in LOOKS}) == len(LOOKS)


def test_lanes_hold_every_row_once_and_in_time(make_trace) -> None:
    trace = make_trace(ranks=3, mbs=4, p2p=0.5, comm=True, parts=2)
    lanes = lanes_of(trace)
    assert sorted(np.concatenate([lane.rows for lane in lanes]).tolist()) == list(range(len(trace)))
    for lane in lanes:
        assert {trace.stream[i] for i in lane.rows.tolist()} == {lane.stream}
        assert (np.diff(trace.start_s[lane.rows]) >= 0).all()
    assert [(lane.rank, lane.stream) for lane in lanes][:3] == [(0, "compute"), (0, "ep"), (0, "recv<1")]


def test_coverage_sums_to_the_busy_time(make_trace) -> None:
    trace = make_trace(ranks=2, mbs=5, f=0.3, b=0.7)
    edges = np.linspace(0, trace.end_s.max(), 37)
    covered = coverage(trace.start_s, trace.end_s, looks_of(trace), edges)
    assert covered.sum() == pytest.approx((trace.end_s - trace.start_s).sum())
    assert (covered > -1e-9).all()


@given(st.floats(-1e6, 1e6), st.floats(1e-9, 1e6), st.integers(2, 30))
def test_ticks_are_few_and_inside(begin: float, length: float, most: int) -> None:
    if not begin + length > begin:
        return
    ticks = tick_times(begin, begin + length, most)
    assert len(ticks) <= most + 1
    slack = 1e-6 * (abs(begin) + length)
    assert all(begin - slack <= t <= begin + length + slack for t in ticks)
