"""Traces sort their rows, and leave equal ones alone."""

from ir.trace.trace import MemorySamples, Trace


def test_rows_of_one_instant_keep_their_streams_order() -> None:
    rows = [(0, 0, "compute", f"0F{i}", 0.0, 0.0, 0.0) for i in range(5)]
    assert list(Trace.of({}, rows).op) == [r[3] for r in rows]


def test_a_sorted_trace_is_itself() -> None:
    trace = Trace.of({}, [(0, 1, "ep", "a", 0.0, 0.0, 1.0), (0, 1, "compute", "b", 0.0, 0.0, 1.0)])
    assert list(trace.op) == ["b", "a"]
    assert trace.sorted() is trace


def test_empty_traces_exist() -> None:
    assert len(Trace.of({}, [], MemorySamples.of([]))) == 0
