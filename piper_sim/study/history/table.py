"""The table of past runs: strict rows, each error with file, line, column and the nearest fix."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ir.core.errors import ErrorKind, PiperError, job_error, nearest
from ir.core.files import FileErrors, parse_csv, read_text
from ir.job.schema import OPEN, SECTIONS
from ir.job.table import keys_of

STEP, PEAK, CLASS, NOTE = "iteration_s", "peak_allocated_GiB", "class", "note"
OOM = "oom"
GIB = 2**30
_OWN = (STEP, PEAK, CLASS, NOTE)
_CODE = ("schedule.builder", "model.module")
FORM = FileErrors("past runs", ErrorKind.JOB, "history.file", 10**7, f"a table of {STEP} and, say, parallel.pp")
_WRITTEN = re.compile(r"-?([0-9]+\.?[0-9]*(?:[eE][-+]?[0-9]{1,3})?)\s*(ms|s|sec|secs|seconds|GiB|)")
_LIMITS = {STEP: 1e7, PEAK: 1e4}


@dataclass(frozen=True)
class PastStep:
    """One row. settings: `section.key` -> value, as `--set` takes it, of what differs from the job.

    line: in the file. iteration_s: measured seconds; None where the run ran out of memory. peak: bytes allocated on the
    fullest rank, None where not said.
    """

    line: int
    settings: Mapping[str, str]
    iteration_s: float | None
    peak: float | None = None
    label: str = ""
    note: str = ""


def read_runs(path: str | Path) -> list[PastStep]:
    """All rows of a file; a bad one is refused, none is dropped. Raises PiperError (io, job)."""
    with FORM.naming(path):
        return parse_runs(read_text(path, FORM))


def parse_runs(text: str) -> list[PastStep]:
    """The rows of a table.

    Raises PiperError (job): a row that is no run, with its line and column.

    >>> [run] = parse_runs("parallel.pp, iteration_s, note\\n4, 1.5, mine\\n")
    >>> run.line, run.settings, run.iteration_s, run.note
    (2, {'parallel.pp': '4'}, 1.5, 'mine')
    >>> parse_runs("paralel.pp,iteration_s\\n4,1.5\\n")
    Traceback (most recent call last):
    ...
    ir.core.errors.PiperError: line 1, column paralel.pp: unknown column
    allowed: iteration_s, peak_allocated_GiB, class, note, or a job's section.key
    fix: parallel.pp
    """
    lines = parse_csv(text, FORM)
    if not lines:
        raise job_error("line 1", "no columns", allowed=f"{STEP}, and keys of the job")
    (first, columns), *rows = lines
    _check_columns(first, columns)
    if not rows:
        raise job_error(f"line {first + 1}", "no past run", "leave [history] out")
    return [_run(line, columns, cells) for line, cells in rows]


def _check_columns(line: int, columns: Sequence[str]) -> None:
    for name in columns:
        if columns.count(name) > 1:
            raise _wrong(line, name or "(empty)", "given twice", suggestion="once")
        if name in _CODE:
            raise _wrong(line, name, "a table runs no code", suggestion="name it in the job")
        section, _, key = name.partition(".")
        key = key.partition(".")[0]
        known = section in SECTIONS and section != "history" and key
        if name not in _OWN and not (known and (section in OPEN or key in keys_of(section))):
            every = [f"{s}.{k}" for s in SECTIONS if s != "history" for k in keys_of(s)]
            allowed = f"{', '.join(_OWN)}, or a job's section.key"
            raise _wrong(line, name or "(empty)", "unknown column", allowed, nearest(name, [*_OWN, *every]))
    if STEP not in columns:
        raise _wrong(line, STEP, "missing", suggestion=f"add it: measured seconds of a step, or {OOM}")


def _run(line: int, columns: Sequence[str], cells: Sequence[str]) -> PastStep:
    if len(cells) != len(columns):
        message = f"{len(cells)} cells under {len(columns)} columns"
        fix = "quote cells that hold a comma" if len(cells) > len(columns) else "one comma for each empty cell"
        raise job_error(f"line {line}", message, fix)
    row = dict(zip(columns, cells, strict=True))
    settings = {k: v for k, v in row.items() if k not in _OWN and v}
    step = None if row[STEP].lower() == OOM else _number(line, STEP, row[STEP])
    peak = _number(line, PEAK, row[PEAK]) * GIB if row.get(PEAK) else None
    if step is None and peak is not None:
        raise _wrong(line, PEAK, "a run that ran out of memory has no peak of its own", suggestion="leave it empty")
    return PastStep(line, settings, step, peak, row.get(CLASS, ""), row.get(NOTE, ""))


def _number(line: int, column: str, text: str) -> float:
    unit, most = column.rpartition("_")[2], _LIMITS[column]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= most:
        words = f", or {OOM}" if column == STEP else ""
        allowed = f"a number of {'seconds' if unit == 's' else unit}, more than 0 and at most {most:g}{words}"
        raise _wrong(line, column, f"{text!r:.60}" if text else "empty", allowed, _digits(text, most))
    return value


def _digits(text: str, most: float) -> str | None:
    """The number that a cell with a unit or a decimal comma seems to mean.

    >>> _digits("1,5 s", 1e7), _digits("250 ms", 1e7), _digits("1e-3 s", 1e7), _digits("3 min", 1e7)
    ('1.5', '0.25', '0.001', None)
    """
    m = _WRITTEN.fullmatch(text.replace(",", "."))
    kept = 0.0 if m is None else float(m[1]) * (1e-3 if m[2] == "ms" else 1)
    return f"{kept:.10g}" if 0 < kept <= most else None


def _wrong(
    line: int, column: str, message: str, allowed: str | None = None, suggestion: str | None = None
) -> PiperError:
    return job_error(f"line {line}, column {column}", message, suggestion, allowed)
