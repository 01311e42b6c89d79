"""The trace file: a JSON line, then tab-separated rows, then memory samples; text → trace → text loses nothing.

Both engines write it and no reader can tell which did, but by the header::

    {"piper_trace": 1, "rows": 1, "memory_samples": 1, "header": {"engine": "simpy"}}
    step    rank    stream  op      post_s  start_s end_s
    0       2       compute 2F0     0.0     0.5     0.75
    rank    time_s  bytes
    2       0.5     1048576

A file comes from anywhere, so its limits are checked before anything is expanded.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from sys import float_info
from typing import NoReturn

import numpy as np

from ir.core.errors import ErrorKind, PiperError
from ir.core.files import FileErrors, parse_json, read_text
from ir.core.order import FloatArray, IntArray
from ir.trace.trace import MemorySamples, Trace

ROW_COLUMNS = ("step", "rank", "stream", "op", "post_s", "start_s", "end_s")
MEMORY_COLUMNS = ("rank", "time_s", "bytes")
MAX_BYTES = 2**30
_FIX = "the trace.tsv that `run --out DIR` leaves in DIR"
FORM = FileErrors("a trace", ErrorKind.IO, "TRACE", MAX_BYTES, _FIX, largest=float_info.max)
MAX_ROWS = 8_000_000  # what engines leave has fewer: a long run its newest steps, a simulation one step of its plan
MAX_RANKS = 65_536
MAX_TEXT = 1024
_KEYS = {"piper_trace", "rows", "memory_samples", "header"}
_INTEGER = frozenset("0123456789")
_NUMBER = frozenset("0123456789+-.e")
_BAD_TEXT = f"1 to {MAX_TEXT} printable characters without tab or newline"


def write_trace(trace: Trace) -> str:
    """The text of a trace. Refuses what `parse_trace` would refuse, so that a bad trace is found where it was made.

    >>> t = Trace.of({"engine": "simpy"}, [(0, 2, "compute", "2F0", 0.0, 0.5, 0.75)])
    >>> print(write_trace(t).expandtabs(8), end="")
    {"piper_trace": 1, "rows": 1, "memory_samples": null, "header": {"engine": "simpy"}}
    step    rank    stream  op      post_s  start_s end_s
    0       2       compute 2F0     0.0     0.5     0.75
    """
    _check(trace, None)
    memory = trace.memory
    head = {
        "piper_trace": 1,
        "rows": len(trace),
        "memory_samples": None if memory is None else len(memory),
        "header": _plain_header(trace.header),
    }
    lines = [json.dumps(head, allow_nan=False), "\t".join(ROW_COLUMNS)]
    ints = (map(str, c.tolist()) for c in (trace.step, trace.rank))
    floats = (map(repr, c.tolist()) for c in (trace.post_s, trace.start_s, trace.end_s))
    lines += map("\t".join, zip(*ints, trace.stream, trace.op, *floats, strict=True))
    if memory is not None:
        lines.append("\t".join(MEMORY_COLUMNS))
        times = map(repr, memory.time_s.tolist())
        samples = zip(map(str, memory.rank.tolist()), times, map(str, memory.bytes.tolist()), strict=True)
        lines += map("\t".join, samples)
    return "\n".join(lines) + "\n"


def read_trace(path: str | Path) -> Trace:
    """The trace in a file. Raises PiperError (io)."""
    with FORM.naming(path):
        return parse_trace(read_text(path, FORM), str(path))


def parse_trace(text: str, file: str | None = None) -> Trace:
    """The trace a text says; `file` is named in errors. The inverse of `write_trace`.

    >>> t = Trace.of({"engine": "simpy"}, [(0, 2, "compute", "2F0", 0.0, 0.1, 0.3)])
    >>> parse_trace(write_trace(t)).end_s.tolist()
    [0.3]
    """
    if len(text) > MAX_BYTES:
        _refuse(file, 1, None, "the trace is too big", f"at most {MAX_BYTES // 2**20} MB", "trace fewer steps")
    first, _, body = text.partition("\n")
    rows, samples, header = _parse_head(first, file)
    lines = _lines(body, rows + 1 + (0 if samples is None else samples + 1), file)
    step, rank, stream, op, post_s, start_s, end_s = _table(lines[: rows + 1], ROW_COLUMNS, 2, file)
    trace = Trace(
        header,
        _integers(step, "step", 3, file),
        _integers(rank, "rank", 3, file),
        stream,
        op,
        _floats(post_s, "post_s", 3, file),
        _floats(start_s, "start_s", 3, file),
        _floats(end_s, "end_s", 3, file),
        None if samples is None else _memory(lines[rows + 1 :], rows + 3, file),
    )
    _check(trace, file)
    return trace


def _memory(lines: Sequence[str], first: int, file: str | None) -> MemorySamples:
    rank, time_s, size = _table(lines, MEMORY_COLUMNS, first, file)
    return MemorySamples(
        _integers(rank, "rank", first + 1, file),
        _floats(time_s, "time_s", first + 1, file),
        _integers(size, "bytes", first + 1, file),
    )


def _lines(body: str, expected: int, file: str | None) -> list[str]:
    """The lines behind the header, after their number was checked: a split makes an object of each."""
    found = body.count("\n")
    if found != expected:
        at = min(found, expected) + 2
        _refuse(file, at, None, f"{found} lines behind the header", f"{expected}, as it says", _FIX_COUNT)
    lines = body.split("\n")
    if lines.pop():
        _refuse(file, found + 2, None, "the last line is cut off", "a newline at the end", _FIX_COUNT)
    return lines


_FIX_COUNT = "the file was cut or edited: write it again"


def _parse_head(line: str, file: str | None) -> tuple[int, int | None, Mapping[str, object]]:
    try:
        head = parse_json(line, FORM, file)
    except PiperError as e:
        _refuse(file, 1, None, f"not a header: {e.message}", "one JSON object", "is this a trace file?")
    if not isinstance(head, dict) or set(head) != _KEYS:
        _refuse(file, 1, None, "not the header of a trace", ", ".join(sorted(_KEYS)), "is this a trace file?")
    if head["piper_trace"] != 1 or isinstance(head["piper_trace"], bool):
        _refuse(file, 1, "piper_trace", f"version {head['piper_trace']!r}", "1", "write it with this piper-sim")
    if not isinstance(head["header"], dict):
        _refuse(file, 1, "header", "not an object", "a JSON object", '"header": {}')
    rows = _count(head["rows"], "rows", file)
    samples = None if head["memory_samples"] is None else _count(head["memory_samples"], "memory_samples", file)
    return rows, samples, head["header"]


def _count(value: object, key: str, file: str | None) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_ROWS:
        _refuse(file, 1, key, f"{value!r:.40} rows", f"0 to {MAX_ROWS}", "trace fewer steps")
    return value


def _table(lines: Sequence[str], names: tuple[str, ...], first: int, file: str | None) -> list[list[str]]:
    if lines[0] != "\t".join(names):
        _refuse(file, first, None, f"not the column names: {lines[0]!r:.80}", "<tab>".join(names), "do not edit it")
    rows, width = lines[1:], len(names)
    if any(line.count("\t") != width - 1 for line in rows):
        at = next(i for i, line in enumerate(rows) if line.count("\t") != width - 1)
        found = rows[at].count("\t") + 1
        _refuse(file, first + 1 + at, None, f"{found} columns", f"{width}: {', '.join(names)}", _FIX_COUNT)
    # One flat list, then strides: a list per row costs more than all the rest of the parser.
    cells = "\t".join(rows).split("\t") if rows else []
    return [cells[i::width] for i in range(width)]


def _integers(column: Sequence[str], name: str, first: int, file: str | None) -> IntArray:
    if _INTEGER.issuperset("".join(column)) and all(column) and max(map(len, column), default=0) < 19:
        return np.array(list(map(int, column)), np.int64)
    at = next(i for i, x in enumerate(column) if not (x and len(x) < 19 and _INTEGER.issuperset(x)))
    _refuse(file, first + at, name, f"not a number: {column[at]!r:.40}", "an integer from 0", "e.g. 0")


def _floats(column: Sequence[str], name: str, first: int, file: str | None) -> FloatArray:
    # The characters are checked first because float() also takes "nan", "1_0" and other alphabets' digits.
    if _NUMBER.issuperset("".join(column)):
        try:
            values = np.array(list(map(float, column)), np.float64)
        except ValueError:
            values = np.array([np.nan])
        if np.isfinite(values).all():
            return values
    at = next(i for i, x in enumerate(column) if not _is_number(x))
    _refuse(file, first + at, name, f"not a time: {column[at]!r:.40}", "finite seconds", "e.g. 0.25")


def _is_number(text: str) -> bool:
    try:
        return _NUMBER.issuperset(text) and bool(np.isfinite(float(text)))
    except ValueError:
        return False


def _check(trace: Trace, file: str | None) -> None:
    """The rules every trace obeys, whether it was just read or is about to be written."""
    memory = trace.memory
    if max(len(trace), 0 if memory is None else len(memory)) > MAX_ROWS:
        _refuse(file, 1, "rows", f"{len(trace)} rows", f"at most {MAX_ROWS}", "trace fewer steps")
    for name, texts in (("stream", trace.stream), ("op", trace.op)):
        bad = {t for t in set(texts) if not (0 < len(t) <= MAX_TEXT and t.isprintable())}
        if bad:
            _first_row([t in bad for t in texts], file, 3, name, "not a name", _BAD_TEXT, "rename it")
    _first_row(trace.step < 0, file, 3, "step", "a negative step", "from 0", "count steps from 0")
    _first_row((trace.rank < 0) | (trace.rank >= MAX_RANKS), file, 3, "rank", "no such rank", f"0 to {MAX_RANKS - 1}")
    for name, times in (("post_s", trace.post_s), ("start_s", trace.start_s), ("end_s", trace.end_s)):
        _first_row(~np.isfinite(times), file, 3, name, "not a time", "finite seconds")
    # post_s is not compared: on a GPU the host's clock posts and the device's clock starts.
    _first_row(trace.end_s < trace.start_s, file, 3, "end_s", "ends before it starts", "from start_s on")
    by = trace.sort_index()
    _first_row(by != np.arange(len(by)), file, 3, "start_s", "rows are not sorted", "by rank, start_s, stream", _SORT)
    if memory is None:
        return
    first, ranks = len(trace) + 4, memory.rank
    _first_row((ranks < 0) | (ranks >= MAX_RANKS), file, first, "rank", "no such rank", f"0 to {MAX_RANKS - 1}")
    _first_row(~np.isfinite(memory.time_s), file, first, "time_s", "not a time", "finite seconds")
    _first_row(memory.bytes < 0, file, first, "bytes", "negative bytes", "from 0")
    by = np.lexsort((memory.time_s, memory.rank))
    _first_row(by != np.arange(len(by)), file, first, "time_s", "samples are not sorted", "by rank, time_s", _SORT)


_SORT = "Trace.sorted() and MemorySamples.of() sort them"


def _first_row(
    wrong: Iterable[object], file: str | None, first: int, name: str, what: str, allowed: str, fix: str = "correct it"
) -> None:
    """Refuse the first row whose flag is set."""
    flags = np.asarray(wrong, dtype=bool)
    if flags.any():
        _refuse(file, first + int(flags.argmax()), name, what, allowed, fix)


def _plain_header(header: Mapping[str, object]) -> object:
    """The header, if JSON gives it back as it is (tuples, NaN and number keys would not come back)."""
    try:
        text = json.dumps(dict(header), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as e:
        _refuse(None, 1, "header", f"not JSON: {e}", "strings, finite numbers, lists, objects", "write plain values")
    if (back := json.loads(text)) != dict(header):
        _refuse(None, 1, "header", "JSON would change it", "lists (not tuples), string keys", "write plain values")
    return back


def _refuse(
    file: str | None, line: int, column: str | None, what: str, allowed: str = "", fix: str | None = None
) -> NoReturn:
    key = f"line {line}" + (f", column {column}" if column else "")
    raise PiperError(ErrorKind.IO, what, file=file, key=key, allowed=allowed or None, suggestion=fix)
