"""The trace file gives back what it was given, and refuses everything else by line and column."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ir.core.errors import ErrorKind, PiperError
from ir.trace import text as trace_text
from ir.trace.text import parse_trace, read_trace, write_trace
from ir.trace.trace import MemorySamples, Trace
from tests.refusals import refusal

WORDS = st.characters(exclude_categories=("Cs",), exclude_characters="\0")  # as the loader takes them
NAMES = st.text(WORDS, min_size=1, max_size=12).filter(str.isprintable)
TIMES = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | TIMES | st.text(WORDS, max_size=5),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(WORDS, max_size=4), x, max_size=3),
    max_leaves=6,
)


@st.composite
def rows(draw: st.DrawFn) -> tuple[int, int, str, str, float, float, float]:
    start, end = sorted((draw(TIMES), draw(TIMES)))
    step, rank = draw(st.integers(0, 2**40)), draw(st.integers(0, 65_535))
    return step, rank, draw(NAMES), draw(NAMES), draw(TIMES), start, end


SAMPLES = st.lists(st.tuples(st.integers(0, 65_535), TIMES, st.integers(0, 2**59)), max_size=5)
TRACES = st.builds(
    Trace.of,
    st.dictionaries(st.text(WORDS, max_size=5), JSON, max_size=4),
    st.lists(rows(), max_size=8),
    st.none() | st.builds(MemorySamples.of, SAMPLES),
)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


@given(TRACES)
def test_text_gives_back_the_very_bits(trace: Trace) -> None:
    text = write_trace(trace)
    back = parse_trace(text)
    assert write_trace(back) == text
    assert back.header == trace.header
    assert (tuple(back.stream), tuple(back.op)) == (tuple(trace.stream), tuple(trace.op))
    for name in ("step", "rank", "post_s", "start_s", "end_s"):
        assert same_bits(getattr(back, name), getattr(trace, name)), name
    assert (back.memory is None) == (trace.memory is None)
    if trace.memory is not None and back.memory is not None:
        for name in ("rank", "time_s", "bytes"):
            assert same_bits(getattr(back.memory, name), getattr(trace.memory, name)), name


GOOD = write_trace(
    Trace.of(
        {"engine": "simpy"},
        [(0, 0, "compute", "0F0", 0.0, 0.0, 1.0), (0, 1, "compute", "1F0", 1.0, 1.0, 2.5)],
        MemorySamples.of([(0, 0.0, 10), (1, 0.5, 20)]),
    )
)

REFUSED = {
    "nan": ("2.5\n", "nan\n", "line 4, column end_s"),
    "infinity by size": ("2.5\n", "1e999\n", "line 4, column end_s"),
    "another alphabet's digits": ("2.5\n", "٢\n", "line 4, column end_s"),
    "underscore": ("2.5\n", "2_5\n", "line 4, column end_s"),
    "no float": ("2.5\n", "2.5.1\n", "line 4, column end_s"),
    "negative step": ("0\t1\tcompute", "-1\t1\tcompute", "line 4, column step"),
    "huge step": ("0\t1\tcompute", "9" * 5000 + "\t1\tcompute", "line 4, column step"),
    "empty rank": ("0\t1\tcompute", "0\t\tcompute", "line 4, column rank"),
    "rank too large": ("0\t1\tcompute", "0\t65536\tcompute", "line 4, column rank"),
    "ends before start": ("2.5\n", "0.5\n", "line 4, column end_s"),
    "empty op": ("1F0", "", "line 4, column op"),
    "op with a carriage return": ("1F0", "1F0\r", "line 4, column op"),
    "long op": ("1F0", "x" * 1025, "line 4, column op"),
    "column missing": ("\t2.5\n", "\n", "line 4"),
    "rows not sorted": ("0\t0\tcompute", "0\t7\tcompute", "line 3, column start_s"),
    "other columns": ("step\trank", "rank\tstep", "line 2"),
    "bytes as float": ("0.5\t20", "0.5\t20.0", "line 7, column bytes"),
    "samples not sorted": ("0\t0.0\t10", "3\t0.0\t10", "line 6, column time_s"),
    "sample time nan": ("0.5\t20", "nan\t20", "line 7, column time_s"),
    "cut off": ("0.5\t20\n", "0.5", "line 7"),
    "sample missing": ("1\t0.5\t20\n", "", "line 7"),
    "one row more": ("1\t0.5\t20\n", "1\t0.5\t20\n" * 3, "line 8"),
    "no json": ('{"piper', "{piper", "line 1"),
    "nan in header": ('"simpy"', "NaN", "line 1"),
    "key twice": ('"rows": 2', '"rows": 2, "rows": 2', "line 1"),
    "unknown key": ('"rows": 2', '"rows": 2, "x": 2', "line 1"),
    "version": ('"piper_trace": 1', '"piper_trace": 2', "line 1, column piper_trace"),
    "rows not counted": ('"rows": 2', '"rows": 8000001', "line 1, column rows"),
    "rows true": ('"rows": 2', '"rows": true', "line 1, column rows"),
    "header a list": ('{"engine": "simpy"}', "[]", "line 1, column header"),
    "deep header": ('"simpy"', "[" * 100_000, "line 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_file_is_refused_by_line_and_column(case: str) -> None:
    old, new, where = REFUSED[case]
    assert old in GOOD
    head, _, tail = GOOD.rpartition(old)
    e = refusal(parse_trace, head + new + tail, "run/trace.tsv")
    assert e.kind is ErrorKind.IO
    assert (e.file, e.key) == ("run/trace.tsv", where)
    assert e.suggestion


@given(st.integers(0, len(GOOD)), st.text(WORDS, max_size=3), st.integers(0, 5))
def test_a_mutated_file_is_read_or_refused_and_never_crashes(at: int, new: str, drop: int) -> None:
    try:
        parse_trace(GOOD[:at] + new + GOOD[at + drop :])
    except PiperError as e:
        assert e.kind is ErrorKind.IO


def test_limits_stand_before_expansion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trace_text, "MAX_BYTES", 100)
    refusal(parse_trace, "x" * 101, match="too big")
    (tmp_path / "t").write_text("x" * 101)
    refusal(read_trace, tmp_path / "t", match="too big")


def test_what_a_long_run_leaves_is_written_and_read() -> None:
    """A thousand steps of eight ranks: more rows than a million, with times of many digits."""
    n = 1_100_000
    start = np.arange(n) / 7.0
    names = ["compute"] * n, [f"{i % 8}F{i % 128}/layers.attention" for i in range(n)]
    zeros = np.zeros(n, np.int64)
    trace = Trace({}, zeros, zeros, *names, start, start, start + 1 / 7)
    text = write_trace(trace)
    again = parse_trace(text)
    assert len(text) > 64 * 2**20 and len(again) == n and (again.end_s == trace.end_s).all()


@pytest.mark.parametrize("header", [{"a": (1, 2)}, {"a": math.nan}, {"a": {1: 2}}, {"a": object()}])
def test_a_header_that_json_would_change_is_not_written(header: dict[str, object]) -> None:
    refusal(write_trace, Trace.of(header, []), match=re.escape("line 1, column header"))


def test_reading_names_the_file(tmp_path: Path) -> None:
    refusal(read_trace, tmp_path / "missing.tsv", match=r"missing\.tsv: TRACE: cannot read")
    (tmp_path / "bad").write_bytes(GOOD.encode() + b"\xff\n")
    refusal(read_trace, tmp_path / "bad", match="line 8: not UTF-8")
    (tmp_path / "good").write_bytes(GOOD.encode())
    assert len(read_trace(tmp_path / "good")) == 2


def test_200_000_rows_are_read_as_they_were_written() -> None:
    n = 200_000
    start = np.arange(n) * math.pi
    zeros = np.zeros(n, np.int64)
    trace = Trace({}, zeros, zeros, ["compute"] * n, [f"0F{i}" for i in range(n)], start, start, start + 1 / 3)
    back = parse_trace(write_trace(trace))
    assert same_bits(back.end_s, trace.end_s)
