"""A run's columns for the page: small numbers, gzipped, base64; `report_data.js` is the other half."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ir.core.order import FloatArray, IntArray
from ir.trace.trace import Trace
from piper_sim.report.look import lanes_of, looks_of, span, stream_key


@dataclass(frozen=True, eq=False)
class ReportTrace:
    """One trace of a report, with what is said about it.

    facts are shown as they are, in their order. waits, cost_source: one text per row of the trace, shown when the
    pointer is on it (what the op waited for; where its duration comes from). critical: rows of the critical path.
    capacity_bytes draws a line into the memory curves.
    """

    name: str
    trace: Trace
    facts: dict[str, object] = field(default_factory=dict)
    waits: Sequence[str] | None = None
    cost_source: Sequence[str] | None = None
    critical: Sequence[int] | None = None
    capacity_bytes: float | None = None


class _Blob:
    """Columns one behind the other. Eight-byte columns must come first: the page reads them in place."""

    def __init__(self) -> None:
        self.columns: list[tuple[str, str, int]] = []
        self.parts: list[bytes] = []

    def add(self, name: str, values: IntArray | FloatArray, dtype: str) -> None:
        array = np.ascontiguousarray(values, dtype="<" + dtype)
        self.columns.append((name, dtype, len(array)))
        self.parts.append(array.tobytes())

    def add_texts(self, name: str, texts: Sequence[str]) -> None:
        data = json.dumps(texts, ensure_ascii=True).encode("ascii")
        self.columns.append((name, "json", len(data)))
        self.parts.append(data)

    def text(self) -> str:
        return base64.b64encode(gzip.compress(b"".join(self.parts), 6, mtime=0)).decode("ascii")


def run_object(run: ReportTrace) -> dict[str, object]:
    """What the page needs of a run, as one JSON object.

    >>> run = ReportTrace("one", Trace.of({}, [(0, 0, "compute", "0F0", 0.0, 0.0, 1.0)]))
    >>> data = run_object(run)
    >>> data["name"], data["lanes"], data["zero"]
    ('one', [[0, 0, 1]], 0.0)
    """
    trace, lanes = run.trace, lanes_of(run.trace)
    streams = sorted(set(trace.stream), key=stream_key)
    rows = np.concatenate([x.rows for x in lanes]) if lanes else np.zeros(0, np.int64)
    texts = {"op": trace.op, "waits": run.waits, "cost": run.cost_source}
    coded = {k: _coded(v, rows) for k, v in texts.items() if v is not None}
    blob = _Blob()
    timing = _add_times(blob, trace, rows)
    memory_lanes = _add_memory(blob, trace)
    for name, (codes, _) in coded.items():
        blob.add(name, np.diff(codes, prepend=0), "i4")  # mostly ones, which gzip folds to nothing
    blob.add("step", np.diff(trace.step[rows], prepend=0), "i4")
    blob.add("look", looks_of(trace)[rows], "u1")
    if run.critical is not None:
        flags = np.zeros(len(trace), np.int64)
        flags[np.asarray(run.critical, np.int64)] = 1
        blob.add("critical", flags[rows], "u1")
    for name, (_, known) in coded.items():
        blob.add_texts(name + "_texts", known)
    begin, end = span(trace)
    return {
        "name": run.name,
        "header": _plain(trace.header),
        "zero": begin,
        "length": end - begin,
        "streams": streams,
        "lanes": [[x.rank, streams.index(x.stream), len(x.rows)] for x in lanes],
        "memory_lanes": memory_lanes,
        "capacity": run.capacity_bytes,
        "timing": timing,
        "columns": blob.columns,
        "blob": blob.text(),
    }


def _add_times(blob: _Blob, trace: Trace, rows: IntArray) -> str:
    """Gaps and durations if adding them up again gives the very times (as on the simulator's grid), else the times."""
    start, end = trace.start_s[rows], trace.end_s[rows]
    steps = np.empty(2 * len(rows))
    steps[0::2] = start - np.concatenate(([0.0], end[:-1])) if len(rows) else 0.0
    steps[1::2] = end - start
    again = np.cumsum(steps)
    exact = bool((again[0::2] == start).all() and (again[1::2] == end).all())
    blob.add("start", steps[0::2] if exact else start, "f8")
    blob.add("end", steps[1::2] if exact else end, "f8")
    blob.add("wait", start - trace.post_s[rows], "f8")
    return "gaps" if exact else "times"


def _add_memory(blob: _Blob, trace: Trace) -> list[tuple[int, int]]:
    memory = trace.memory
    if memory is None or not len(memory):
        return []
    ranks, counts = np.unique(memory.rank, return_counts=True)
    blob.add("memory_time", memory.time_s, "f8")
    blob.add("memory_bytes", memory.bytes, "f8")
    return list(zip(ranks.tolist(), counts.tolist(), strict=True))


def _coded(texts: Sequence[str], rows: IntArray) -> tuple[IntArray, list[str]]:
    """Every text once, in order of first use, and each row's place among them."""
    place: dict[str, int] = {}
    codes = [place.setdefault(texts[i], len(place)) for i in rows.tolist()]
    return np.array(codes, np.int64), list(place)


def _plain(header: object) -> object:
    try:
        return json.loads(json.dumps(header, allow_nan=False))
    except (TypeError, ValueError):
        return {}
