"""Recorded routing: a CSV of token counts, checked against the job that it is to drive.

The header is `layer,microbatch,source,expert,tokens`, in any order. Without `microbatch` a line holds for all
microbatches, without `source` for all sources; counts left out are 0. Layers are decoder layers, from 0. Each layer
with experts is there, and for every microbatch and source its counts sum to the source's tokens times top-k.
"""

import io
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ir.core.errors import ErrorKind, PiperError, job_error, nearest
from ir.core.files import FileErrors, named_path, read_text
from ir.core.order import IntArray
from ir.job import Job
from ir.job.routing.counts import ExpertCounts, ExpertLayer, distinct
from ir.workload.config.spec import ExpertConfig

COLUMNS = ("layer", "microbatch", "source", "expert", "tokens")
OPTIONAL = ("microbatch", "source")
FORM = FileErrors(
    "the routing", ErrorKind.JOB, "routing.file", 256 * 10**6, 'routing.file = "tokens.csv", beside the job'
)
LIMIT_COUNTS = 2**28


@dataclass(frozen=True, eq=False)
class _Table:
    """A file's columns as whole numbers; those left out are absent."""

    file: str
    body: str
    columns: dict[str, IntArray]

    def bad(self, message: str, row: int | None, allowed: str | None, fix: str | None) -> PiperError:
        """An error, at a data row where there is one."""
        if row is not None:
            numbers = [n for n, line in enumerate(self.body.splitlines(), 2) if line.strip()]  # empty lines are no rows
            message = f"line {numbers[row]}: {message}"
        return refuse(self.file, message, allowed, fix)


def refuse(file: str, message: str, allowed: str | None, fix: str | None) -> PiperError:
    """A file that does not hold what it should."""
    return job_error("routing.file", message, fix, allowed, file=file)


def counts_text(rows: Iterable[tuple[int, int, int, Sequence[int]]]) -> str:
    """Such a file, from (layer, microbatch, source, tokens by expert).

    >>> print(counts_text([(0, 1, 0, [3, 0, 1])]), end="")
    layer,microbatch,source,expert,tokens
    0,1,0,0,3
    0,1,0,2,1
    """
    lines = [(*at, e, n) for *at, counts in sorted(rows) for e, n in enumerate(counts) if n]
    return "\n".join([",".join(COLUMNS), *(",".join(map(str, line)) for line in lines), ""])


def read_counts(job: Job, moe: ExpertConfig, layers: Sequence[ExpertLayer], sources: int, mbs: int) -> ExpertCounts:
    """The counts in the file that `[routing]` names, relative to the job's file."""
    assert job.routing.file is not None
    file = named_path(job.file, job.routing.file)
    with FORM.naming(file):
        return _counts(_parse(file, read_text(file, FORM)), moe, layers, sources, mbs)


def _counts(table: _Table, moe: ExpertConfig, layers: Sequence[ExpertLayer], sources: int, mbs: int) -> ExpertCounts:
    numbers = [x.number for x in layers]
    sizes = {"microbatch": mbs, "source": sources, "expert": moe.experts}
    for name, size in sizes.items():
        _check_range(table, name, size)
    layer = _layer_index(table, numbers)
    cases, own = (sizes[n] if n in table.columns else 1 for n in OPTIONAL)
    if len(layers) * cases * own * moe.experts > LIMIT_COUNTS:
        fix = "leave out the column source or microbatch"
        raise table.bad(f"{len(layers) * cases * own * moe.experts} counts are too many", None, str(LIMIT_COUNTS), fix)
    zero = np.zeros_like(layer)
    mb, source = (table.columns.get(n, zero) for n in OPTIONAL)
    block = (layer * cases + mb) * own + source
    tokens = np.array([x.tokens for x in layers])
    dense = _dense(table, block, len(layers) * cases * own, moe.experts)
    _check_sums(table, dense, tokens * moe.top_k, numbers, cases, own, block)
    _check_caps(table, tokens[layer])
    rows, at = distinct(dense)
    shape = (len(layers), cases, sources)
    return ExpertCounts(tuple(numbers), rows, np.broadcast_to(at.reshape(len(layers), cases, own), shape))


def _parse(file: str, text: str) -> _Table:
    head, _, body = text.partition("\n")
    names = [c.strip() for c in head.strip().split(",")]
    _check_header(file, names)
    lines = io.StringIO(body)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # an empty file, and numbers such as 1.0, only warn
            found = np.loadtxt(lines, dtype=np.int64, delimiter=",", comments=None, ndmin=2)
    except (ValueError, OverflowError, UserWarning, DeprecationWarning):
        raise _unreadable(file, names, body.splitlines()) from None
    if found.shape[1] != len(names):
        raise _unreadable(file, names, body.splitlines())
    return _Table(file, body, {n: found[:, i] for i, n in enumerate(names)})


def _check_header(file: str, names: Sequence[str]) -> None:
    allowed = "a header of " + ", ".join(COLUMNS)
    for name in names:
        if name not in COLUMNS:
            near = nearest(name, COLUMNS)
            raise refuse(file, f"line 1: unknown column {name[:40]!r}", allowed, near or ",".join(COLUMNS))
        if names.count(name) > 1:
            raise refuse(file, f"line 1: column {name!r} stands there twice", allowed, ",".join(COLUMNS))
    for name in COLUMNS:
        if name not in names and name not in OPTIONAL:
            raise refuse(file, f"line 1: no column {name!r}", allowed, ",".join(COLUMNS))


def _unreadable(file: str, names: Sequence[str], lines: Sequence[str]) -> PiperError:
    """The first line that is no row of whole numbers."""
    for n, line in enumerate(lines, 2):
        cells = [c.strip() for c in line.split(",")]
        if line.strip() and len(cells) != len(names):
            return refuse(file, f"line {n}: {len(cells)} cells under {len(names)} columns", None, ",".join(names))
        for name, cell in zip(names, cells, strict=False):
            if line.strip() and not (cell.isascii() and cell.isdigit() and len(cell) < 19):
                return refuse(file, f"line {n}: {name} is {cell[:40]!r}", "whole numbers from 0", None)
    return refuse(file, "no counts", "a line for each count", None)


def _check_range(table: _Table, name: str, size: int) -> None:
    column = table.columns.get(name, np.zeros(0, dtype=np.int64))
    bad = np.flatnonzero((column < 0) | (column >= size))
    if len(bad):
        value = int(column[bad[0]])
        near = f"{name} {min(max(value, 0), size - 1)}"
        raise table.bad(f"{name} {value}", int(bad[0]), f"0 to {size - 1}", near)
    tokens = table.columns["tokens"]
    if (tokens < 0).any():
        row = int(np.flatnonzero(tokens < 0)[0])
        raise table.bad(f"{int(tokens[row])} tokens", row, "whole numbers from 0", None)


def _layer_index(table: _Table, numbers: Sequence[int]) -> IntArray:
    """[row] index of its layer among those with experts."""
    column, known = table.columns["layer"], np.array(numbers)
    at = np.minimum(np.searchsorted(known, column), len(known) - 1)
    bad = np.flatnonzero(known[at] != column)
    if len(bad):
        value = int(column[bad[0]])
        near = min(numbers, key=lambda n: abs(n - value))
        raise table.bad(f"layer {value} has no experts", int(bad[0]), _ranges(numbers), f"layer {near}")
    missing = sorted(set(numbers) - set(known[np.unique(at)].tolist()))
    if missing:
        raise table.bad(f"layer {missing[0]} is not there", None, _ranges(numbers), "a line for each of its counts")
    return at.astype(np.int64)


def _ranges(numbers: Sequence[int]) -> str:
    whole = list(numbers) == list(range(numbers[0], numbers[-1] + 1))
    return f"layers {numbers[0]} to {numbers[-1]}" if whole else "layers " + ", ".join(map(str, numbers))


def _dense(table: _Table, block: IntArray, blocks: int, experts: int) -> IntArray:
    key = block * experts + table.columns["expert"]
    if np.bincount(key).max(initial=0) > 1:
        order = np.argsort(key, kind="stable")
        row = int(order[1:][np.diff(key[order]) == 0].min())
        raise table.bad("this count stands there already", row, "each count once", "drop one of the lines")
    out = np.zeros(blocks * experts, dtype=np.int64)
    out[key] = table.columns["tokens"]
    return out.reshape(blocks, experts)


def _check_sums(
    table: _Table, dense: IntArray, wanted: IntArray, numbers: Sequence[int], cases: int, own: int, block: IntArray
) -> None:
    found = dense.sum(axis=1)
    want = np.repeat(wanted, cases * own)
    bad = np.flatnonzero(found != want)
    if not len(bad):
        return
    b = int(bad[0])
    where = [f"layer {numbers[b // (cases * own)]}"]
    where += [f"microbatch {b // own % cases}"] if "microbatch" in table.columns else []
    where += [f"source {b % own}"] if "source" in table.columns else []
    rows = np.flatnonzero(block == b)
    message = f"the counts of {', '.join(where)} sum to {found[b]}"
    row = int(rows[0]) if len(rows) else None
    raise table.bad(message, row, f"tokens of a source times top-k = {want[b]}", f"{want[b] - found[b]:+d} tokens")


def _check_caps(table: _Table, most: IntArray) -> None:
    tokens = table.columns["tokens"]
    bad = np.flatnonzero(tokens > most)
    if len(bad):
        row = int(bad[0])
        message = f"{int(tokens[row])} tokens to one expert, but the source has {int(most[row])}"
        raise table.bad(message, row, f"0 to {int(most[row])}", f"{int(most[row])} tokens")
