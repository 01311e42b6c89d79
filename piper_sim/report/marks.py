"""What is known of a trace beside its rows: what each waited for, what it carried, why ranks were idle."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ir.core.order import FloatArray, IntArray
from piper_sim.report.units import duration

HOST = -2


@dataclass(frozen=True, slots=True)
class TraceStretch:
    """Seconds of a rank, with the cause that they are put down to and the row behind it (-1: none in the trace)."""

    rank: int
    begin_s: float
    end_s: float
    cause: str
    row: int = -1


@dataclass(frozen=True, eq=False)
class TraceMarks:
    """Marks of a trace whose times count from its first start.

    partner: [row] the other end of a transfer, else -1. after: [row] what ended when it could start, -1: nothing in the
    trace, `HOST`: its dispatch. bytes: [row] of its message, 0 without one. gaps: (rank, begin_s, end_s, cause, row at
    fault or -1) of idle compute streams; path: (rank, begin_s, end_s, cause, row or -1) of the critical path, in time.
    kinds: what fills a rank -> [memory sample] bytes, which sum to the sample. slow: slower ranks -> speed.
    inside: [row] JSON of [begin, end, words], as shares of it: what a group's ranks do together. met: rank -> who.
    """

    partner: IntArray
    after: IntArray
    bytes: FloatArray
    gaps: Sequence[TraceStretch] = ()
    path: Sequence[TraceStretch] = ()
    kinds: Mapping[str, IntArray] = field(default_factory=dict)
    slow: Mapping[int, float] = field(default_factory=dict)
    inside: Sequence[str] = ()
    met: Mapping[int, str] = field(default_factory=dict)


def idle_rows(gaps: Sequence[TraceStretch]) -> list[dict[str, object]]:
    """Seconds of idle by rank and cause as rows of a table, largest causes first.

    >>> idle_rows([TraceStretch(0, 0.0, 2.0, "warmup"), TraceStretch(1, 0.0, 0.5, "drain")])[0]
    {'rank': 0, 'warmup': '2 s', 'drain': None, 'idle': '2 s'}
    """
    total: dict[str, float] = {}
    by: dict[int, dict[str, float]] = {}
    for g in gaps:
        took = g.end_s - g.begin_s
        total[g.cause] = total.get(g.cause, 0.0) + took
        row = by.setdefault(g.rank, {})
        row[g.cause] = row.get(g.cause, 0.0) + took
    causes = sorted(total, key=lambda c: -total[c])
    rows: list[dict[str, object]] = []
    for rank, row in sorted(by.items()):
        cells = {c.replace("_", " "): duration(row[c]) if c in row else None for c in causes}
        rows.append({"rank": rank, **cells, "idle": duration(sum(row.values()))})
    return rows
