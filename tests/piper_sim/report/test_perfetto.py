"""Perfetto's file: every row a slice, nothing overlaps by rounding, same bytes for the same trace."""

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import numpy as np

from ir.trace.trace import MemorySamples, Trace
from piper_sim.report.marks import TraceMarks
from piper_sim.report.perfetto import perfetto_gz


def events(data: bytes) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(data))["traceEvents"]


def test_every_row_is_a_slice_of_its_stream(make_trace) -> None:
    trace = make_trace(ranks=3, mbs=4, f=0.1, b=0.2, p2p=0.01, comm=True)
    found = events(perfetto_gz(trace))
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in found if e["name"] == "thread_name"}
    ranks = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    slices = [e for e in found if e["ph"] == "X"]
    assert [e["name"] for e in slices] == list(trace.op)
    assert [names[e["pid"], e["tid"]] for e in slices] == list(trace.stream)
    assert [ranks[e["pid"]] for e in slices] == [f"rank {r}" for r in trace.rank.tolist()]
    assert [e["ts"] for e in slices] == [round(t * 1e6, 3) for t in trace.start_s.tolist()]
    counters = [e["args"]["allocated bytes"] for e in found if e["ph"] == "C"]
    assert trace.memory is not None
    assert counters == trace.memory.bytes.tolist()
    assert len({e["tid"] for e in found if e["name"] == "thread_name"}) == len(names)


def test_ops_that_touch_do_not_overlap() -> None:
    times = [i / 7e9 for i in range(200)]
    rows = [(0, 0, "compute", f"0F{i}", a, a, b) for i, (a, b) in enumerate(pairwise(times))]
    last: dict[int, float] = defaultdict(float)
    for e in events(perfetto_gz(Trace.of({}, rows))):
        if e["ph"] == "X":
            assert round(e["ts"] * 1000) >= last[e["tid"]]
            last[e["tid"]] = round((e["ts"] + e["dur"]) * 1000)


def test_times_before_zero_are_shifted_together() -> None:
    rows = [(0, 0, "compute", "0F0", -1.0, -1.0, 0.0)]
    found = events(perfetto_gz(Trace.of({}, rows, MemorySamples.of([(0, -0.5, 7)]))))
    assert [e["ts"] for e in found if "ts" in e] == [0, 500000]


def test_the_same_trace_gives_the_same_bytes(make_trace) -> None:
    assert perfetto_gz(make_trace(comm=True)) == perfetto_gz(make_trace(comm=True))


def test_two_traces_stand_rank_by_rank() -> None:
    trace = Trace.of({}, [(0, r, "compute", f"{r}F0", 0.0, 0.0, 1.0) for r in range(2)])
    found = events(perfetto_gz({"predicted": trace, "measured": trace}))
    order = {e["pid"]: e["args"]["sort_index"] for e in found if e["name"] == "process_sort_index"}
    names = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    shown = [names[pid] for pid in sorted(names, key=order.__getitem__)]
    assert shown == [f"{whose} rank {rank}" for rank in (0, 1) for whose in ("predicted", "measured")]


def test_no_thread_of_two_traces_is_another_ones() -> None:
    """One has a stream, the other four: both counted from their own."""
    streams = ("compute", "dp", "tp", "send>1")
    one = Trace.of({}, [(0, r, "compute", "0F0", 0.0, 0.0, 1.0) for r in range(9)])
    many = Trace.of({}, [(0, r, s, "0F0", 0.0, 0.0, 1.0) for r in range(9) for s in streams])
    found = [e["tid"] for e in events(perfetto_gz({"a": one, "b": many})) if e["name"] == "thread_name"]
    assert len({*found}) == len(found) == 9 * 5


def arrows(found: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Flows as Perfetto binds them: by time, to the slice of their thread that began last and has not been closed by a
    later one; of equal times, in the file's order (`FlowTracker`, `SliceTracker` of its trace processor).
    """
    open_at: dict[int, str] = {}
    begun: dict[int, str] = {}
    out = []
    for e in sorted((e for e in found if e["ph"] in "Xsf"), key=lambda e: round(e["ts"] * 1000)):
        if e["ph"] == "X":
            open_at[e["tid"]] = e["name"]
        elif e["ph"] == "s":
            begun[e["id"]] = open_at[e["tid"]]
        else:
            out.append((begun[e["id"]], open_at[e["tid"]]))
    return out


def test_arrows_lead_to_their_receives_where_these_touch() -> None:
    """The receive of microbatch 1 begins as that of 0 ends: posted early, it waits for its send."""
    sends = [(0, 0, "send>1", f"0SEND_F{mb}", mb, mb + 0.75, mb + 1) for mb in range(3)]
    receives = [(0, 1, "recv<0", f"1RECV_F{mb}", mb, mb, mb + 1) for mb in range(3)]
    trace = Trace.of({}, [*sends, *receives])
    marks = TraceMarks(np.array([3, 4, 5, 0, 1, 2]), np.full(6, -1), np.zeros(6))
    found = arrows(events(perfetto_gz(trace, marks)))
    assert found == [(f"0SEND_F{mb}", f"1RECV_F{mb}") for mb in range(3)]


def test_names_are_given_as_they_are() -> None:
    op = 'a"b\\c</script>é'
    [e] = [e for e in events(perfetto_gz(Trace.of({}, [(0, 0, 's"', op, 0, 0, 1)]))) if e["ph"] == "X"]
    assert e["name"] == op
    assert events(perfetto_gz(Trace.of({}, []))) == []


def test_times_past_what_nanoseconds_fit_in_64_bits_are_told_all_the_same() -> None:
    """`schedule --times F=1e12` is allowed: units of anything."""
    rows = [(0, 0, "compute", f"0F{mb}", 1e12 * mb, 1e12 * mb, 1e12 * (mb + 1)) for mb in range(2)]
    found = [e for e in events(perfetto_gz(Trace.of({}, rows))) if e["ph"] == "X"]
    assert [(e["ts"], e["dur"]) for e in found] == [(0, 1e18), (1e18, 1e18)]
