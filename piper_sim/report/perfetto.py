"""Traces for https://ui.perfetto.dev: Chrome's JSON, gzipped. A process per rank, a thread per stream."""

import gzip
import io
import json
import re
from collections.abc import Iterator, Mapping
from itertools import islice

import numpy as np

from ir.core.order import FloatArray, IntArray
from ir.trace.trace import Trace
from piper_sim.report.look import look_of, stream_key
from piper_sim.report.marks import TraceMarks

_BATCH = 8192
_STAGE = re.compile(r"(?:^|[(;])(\d+)(?:[A-Z]+_)?[FBIWR](\d+)")


def perfetto_gz(traces: Trace | Mapping[str, Trace], marks: TraceMarks | None = None) -> bytes:
    """The gzipped file of one trace, or of several named ones, rank by rank below each other.

    marks: of the one; then messages have their bytes, and transfers are joined by flows.

    >>> data = perfetto_gz(Trace.of({}, [(0, 2, "compute", "2F0", 0.0, 0.5, 0.75)]))
    >>> [e["name"] for e in json.loads(gzip.decompress(data))["traceEvents"] if e["ph"] == "X"]
    ['2F0']
    """
    out, named = io.BytesIO(), {"": traces} if isinstance(traces, Trace) else traces
    # mtime and name would make equal traces differ.
    with gzip.GzipFile(filename="", mode="wb", fileobj=out, compresslevel=6, mtime=0) as f:
        f.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        events, comma = _events(named, marks), b""
        while batch := list(islice(events, _BATCH)):
            f.write(comma + ",\n".join(batch).encode("ascii"))
            comma = b",\n"
        f.write(b"\n]}\n")
    return out.getvalue()


def _events(named: Mapping[str, Trace], marks: TraceMarks | None) -> Iterator[str]:
    most = max((len(set(trace.stream)) for trace in named.values()), default=0)
    for at, (name, trace) in enumerate(named.items()):
        # Rank 1 of all traces stands below rank 0 of all traces: predicted above measured.
        pids = {rank: rank * len(named) + at + 1 for rank in _ranks(trace)}
        streams = sorted(set(trace.stream), key=stream_key)
        # No tid is used twice: viewers differ in whether a tid belongs to its process.
        tids = {(r, s): pid * (most + 1) + i + 1 for r, pid in pids.items() for i, s in enumerate(streams)}
        for rank, pid in pids.items():
            label = f"{name} rank {rank}".strip()
            yield _meta("process_name", pid, 0, name=label)
            yield _meta("process_sort_index", pid, 0, sort_index=pid)
        for rank, stream in sorted({*zip(trace.rank.tolist(), trace.stream, strict=True)}):
            tid = tids[rank, stream]
            yield _meta("thread_name", pids[rank], tid, name=stream)
            yield _meta("thread_sort_index", pids[rank], tid, sort_index=tid)
        yield from _spans(trace, pids, tids, marks)
        if marks is not None:
            yield from _flows(trace, pids, tids, marks)
        yield from _counters(trace, pids)


def _ranks(trace: Trace) -> list[int]:
    more = set(trace.memory.rank.tolist()) if trace.memory is not None else set()
    return sorted(set(trace.rank.tolist()) | more)


def _meta(kind: str, pid: int, tid: int, **args: object) -> str:
    return json.dumps({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}, separators=(",", ":"))


def _flows(
    trace: Trace, pids: Mapping[int, int], tids: Mapping[tuple[int, str], int], marks: TraceMarks
) -> Iterator[str]:
    """An arrow from each send to its receive."""
    zero = _zero(trace)
    start, end = _ns(trace.start_s, zero), _ns(trace.end_s, zero)
    for i, to in enumerate(marks.partner.tolist()):
        if to < 0 or not trace.stream[i].startswith("send"):
            continue
        # Inside the receive: at its end a viewer has come to the next one already, where they touch.
        for phase, row, at in (("s", i, start[i]), ("f", to, max(start[to], end[to] - 1))):
            rank = int(trace.rank[row])
            place = f'"pid":{pids[rank]},"tid":{tids[rank, trace.stream[row]]},"ts":{_us(int(at))}'
            more = ',"bp":"e"' if phase == "f" else ""
            yield f'{{"ph":"{phase}","cat":"transfer","name":"transfer","id":{i},{place}{more}}}'


def _about(op: str) -> str:
    """What an op's text says of its stage and microbatch, as members of a JSON object.

    >>> _about("2SEND_F7"), _about("(0F7;7B3)OVERLAP_F_B"), _about("update")
    (',"stage":"2","microbatch":"7"', ',"stage":"0;7","microbatch":"7;3"', '')
    """
    found = _STAGE.findall(op.partition("/")[0])
    if not found:
        return ""
    stages, microbatches = (";".join(x) for x in zip(*found, strict=True))
    return f',"stage":"{stages}","microbatch":"{microbatches}"'


def _spans(
    trace: Trace, pids: Mapping[int, int], tids: Mapping[tuple[int, str], int], marks: TraceMarks | None
) -> Iterator[str]:
    zero = _zero(trace)
    # Ends are rounded, then subtracted: two ops that touch must not overlap by a rounding.
    start, end = _ns(trace.start_s, zero), _ns(trace.end_s, zero)
    waited = _ns(trace.start_s, 0.0) - _ns(trace.post_s, 0.0)
    heads: dict[tuple[str, str], str] = {}
    carried = np.zeros(len(trace)) if marks is None else marks.bytes
    columns = (c.tolist() for c in (trace.rank, start, end - start, waited, trace.step, carried.astype(np.int64)))
    for stream, op, rank, ts, dur, wait, step, size in zip(trace.stream, trace.op, *columns, strict=True):
        if (head := heads.get((stream, op))) is None:
            name, category = json.dumps(op), look_of(stream, op).word
            head = heads[stream, op] = f'{{"ph":"X","name":{name},"cat":"{category}","pid":'
        posted = f',"posted_before_us":{_us(wait)}' if wait else ""
        carries = f',"bytes":{size}' if size else ""
        args = f'"args":{{"step":{step}{posted}{carries}{_about(op)}}}'
        yield f'{head}{pids[rank]},"tid":{tids[rank, stream]},"ts":{_us(ts)},"dur":{_us(dur)},{args}}}'


def _counters(trace: Trace, pids: Mapping[int, int]) -> Iterator[str]:
    if trace.memory is None:
        return
    m = trace.memory
    for rank, ts, size in zip(m.rank.tolist(), _ns(m.time_s, _zero(trace)).tolist(), m.bytes.tolist(), strict=True):
        args = f'{{"allocated bytes":{size}}}'
        yield f'{{"ph":"C","name":"memory","pid":{pids[rank]},"ts":{_us(ts)},"args":{args}}}'


def _zero(trace: Trace) -> float:
    """What is taken off all times: Chrome's format knows none before zero (a clock offset may make some)."""
    times = [trace.start_s] + ([trace.memory.time_s] if trace.memory is not None else [])
    return min((float(t.min()) for t in times if len(t)), default=0.0) if any((t < 0).any() for t in times) else 0.0


def _ns(times: FloatArray, zero: float) -> IntArray:
    found = np.rint((times - zero) * 1e9)
    fits = bool((np.abs(found) < 2.0**63).all())  # a schedule's times are in units of anything
    return found.astype(np.int64) if fits else np.array([int(x) for x in found.tolist()], dtype=object)


def _us(ns: int) -> str:
    """Nanoseconds as microseconds, exactly.

    >>> _us(1234500), _us(2000), _us(-1)
    ('1234.5', '2', '-0.001')
    """
    if ns < 0:
        return "-" + _us(-ns)
    whole, rest = divmod(ns, 1000)
    return f"{whole}.{rest:03d}".rstrip("0") if rest else str(whole)
