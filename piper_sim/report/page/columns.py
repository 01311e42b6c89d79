"""A run's columns for the page: small numbers, gzipped, base64; `report_data.js` is the other half."""

import base64
import gzip
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ir.core.order import FloatArray, IntArray
from ir.trace.trace import Trace
from piper_sim.report.look import lanes_of, looks_of, span, stream_key
from piper_sim.report.marks import TraceMarks, TraceStretch

_MB = re.compile(r"(?<=[FBIWR])\d+")


@dataclass(frozen=True, eq=False)
class ReportTrace:
    """One trace of a report, with what is said about it.

    facts are shown as they are, in their order. cost_source: one text per row of the trace, shown when the pointer is
    on it (where its duration comes from). capacity_bytes draws a line into the memory curves.
    """

    name: str
    trace: Trace
    facts: dict[str, object] = field(default_factory=dict)
    cost_source: Sequence[str] | None = None
    capacity_bytes: float | None = None
    marks: TraceMarks | None = None


class _Blob:
    """Columns one behind the other. Eight-byte columns must come first: the page reads them in place."""

    def __init__(self) -> None:
        self.columns: list[tuple[str, str, int]] = []
        self.parts: list[bytes] = []

    def add(self, name: str, values: IntArray | FloatArray | Sequence[float], dtype: str) -> None:
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
    patterns, first, second = _stamped(trace.op)
    texts = {"op": patterns, "cost": run.cost_source, "inside": run.marks.inside if run.marks else None}
    coded = {k: _coded(v, rows) for k, v in texts.items() if v}
    blob = _Blob()
    timing = _add_times(blob, trace, rows)
    memory_lanes = _add_memory(blob, trace)
    causes = _add_marks(blob, run.marks, rows)
    steps = {"mb": first[rows], "mb2": second[rows], "step": trace.step[rows]} | {k: v for k, (v, _) in coded.items()}
    for name, values in steps.items():
        blob.add(name, np.diff(values, prepend=0), "i4")  # small steps, which gzip folds to little
    for i, kind in enumerate(run.marks.kinds.values() if run.marks else ()):
        blob.add(f"kind{i}", kind, "f4")
    blob.add("look", looks_of(trace)[rows], "u1")
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
        "slow": {str(k): v for k, v in run.marks.slow.items()} if run.marks else {},
        "met": {str(k): v for k, v in run.marks.met.items()} if run.marks else {},
        "kinds": list(run.marks.kinds) if run.marks and trace.memory is not None else [],
        "causes": causes,
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


def _stamped(texts: Sequence[str]) -> tuple[list[str], IntArray, IntArray]:
    """Ops as what those of all microbatches have in common (`2F*`), and up to two microbatches, else -1.

    >>> [x if isinstance(x, list) else x.tolist() for x in _stamped(["2F7", "(0F7;7B3)OVERLAP_F_B", "update"])]
    [['2F*', '(0F*;7B*)OVERLAP_F_B', 'update'], [7, 7, -1], [-1, 3, -1]]
    """
    patterns, first, second = [], [], []
    for text in texts:
        head, slash, rest = text.partition("/")
        found = [] if "*" in head else _MB.findall(head)
        if len(found) > 2 or any((x != "0" and x[0] == "0") or len(x) > 9 for x in found):
            found = []
        patterns.append(_MB.sub("*", head) + slash + rest if found else text)
        first.append(int(found[0]) if found else -1)
        second.append(int(found[1]) if len(found) > 1 else -1)
    return patterns, np.array(first, np.int64), np.array(second, np.int64)


def _add_marks(blob: _Blob, marks: TraceMarks | None, rows: IntArray) -> list[str]:
    """Why it was so; names of causes. Rows are told as the page counts them, as distances."""
    if marks is None:
        return []
    causes = sorted({s.cause for s in (*marks.gaps, *marks.path)})
    place = np.zeros(len(rows), np.int64)
    place[rows] = np.arange(len(rows))
    both: dict[str, Sequence[TraceStretch]] = {"gap": marks.gaps, "path": marks.path}
    for name, stretches in both.items():
        blob.add(f"{name}_begin", [s.begin_s for s in stretches], "f8")
        blob.add(f"{name}_end", [s.end_s for s in stretches], "f8")
    blob.add("bytes", marks.bytes[rows], "f8")
    for name, stretches in both.items():
        blob.add(f"{name}_rank", [s.rank for s in stretches], "i4")
        blob.add(f"{name}_row", [place[s.row] if s.row >= 0 else -1 for s in stretches], "i4")
        blob.add(f"{name}_cause", [causes.index(s.cause) for s in stretches], "i4")
    for name, values in (("partner", marks.partner), ("after", marks.after)):
        mine = values[rows]
        blob.add(name, np.where(mine >= 0, place[mine] - np.arange(len(rows)), mine - 2**30), "i4")
    return causes


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
