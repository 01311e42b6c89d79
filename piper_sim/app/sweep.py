"""`piper-sim sweep JOB --try key=[…]`: every combination of some keys, simulated; one row each, kept as it goes."""

import argparse
import json
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from ir.core.errors import ErrorKind, PiperError, usage_error
from ir.core.files import writing
from ir.job.build import blaming
from ir.job.load import load_job as read_job
from piper_sim.app.captured import load_job
from piper_sim.app.commands.output import print_json, progress, refuse_existing, show, write
from piper_sim.formats.tables import parquet_files
from piper_sim.report.table import compare_table
from piper_sim.study.explain.what_if import settings
from piper_sim.study.history.backtest import backtest
from piper_sim.study.history.show import applied
from piper_sim.study.inputs import FILES, inputs_digest
from piper_sim.study.predict import predict
from piper_sim.study.simulate import Object

MOST = 100_000
KEPT = "rows.jsonl"
_TABLES = ("rows.parquet", "rows.csv")
_ROW = '{"key": '  # how a line of rows.jsonl starts


def main(args: argparse.Namespace) -> int:
    """Simulate what is not in --out yet, write the table, print it, the fastest first; 3 where nothing fits."""
    grid = _grid(args.tries)
    known = _known(args.out, args.force)
    base = inputs_digest(load_job(args.job, args.sets))
    for changes in grid:  # each value once, before hours of work: a typo in the last one would end them
        if sum(changes[k] != first for k, first in grid[0].items()) <= 1:
            read_job(args.job, [*args.sets, *settings(changes)])
    rows = list[Object]()
    for changes in grid:
        key = json.dumps([base, *_files(args, changes), changes], sort_keys=True)
        if key not in known:
            with progress(f"simulating {', '.join(settings(changes))}"):
                known[key] = _row(args, changes)
            _keep(args.out, key, known[key])
        rows.append({**changes, **known[key]})
    if args.out is not None:
        write(args.out, _table(rows), force=True)
    rows.sort(key=lambda r: (not r["fits"], r["iteration_s"] is None, r["iteration_s"] or 0.0))
    if args.json:
        print_json({"schema_version": 1, "rows": rows})
    else:
        names = [", ".join(f"{k.partition('.')[2]}={r[k]}" for k in grid[0]) for r in rows]
        show(compare_table([{**r, "schedule": n} for r, n in zip(rows, names, strict=True)], args.job))
    return 0 if any(r["fits"] for r in rows) else 3


def _files(args: argparse.Namespace, changes: Mapping[str, Any]) -> tuple[str, ...]:
    """What the files hold that a point names, if it names some."""
    if not set(FILES) & set(changes):
        return ()
    return (inputs_digest(read_job(args.job, [*args.sets, *settings(changes)])),)


def _row(args: argparse.Namespace, changes: Mapping[str, Any]) -> Object:
    """What `simulate` says, or why it cannot.

    Raises PiperError: a key or a value that no job may have, which is the sweep's mistake and not a row of it.
    """
    job = load_job(args.job, [*args.sets, *settings(changes)])
    try:
        with blaming(job):
            return applied(predict(job).to_dict(), job, backtest(job) if job.history.apply else None)
    except PiperError as e:
        if e.kind in (ErrorKind.USAGE, ErrorKind.IO):
            raise
        return {"schema_version": 1, "iteration_s": None, "fits": False, "reason": e.message}


def _grid(tries: Sequence[str]) -> list[dict[str, Any]]:
    """Every combination of the keys' values, the last key fastest.

    >>> _grid(["parallel.tp=[1, 2]", "schedule.name=['1f1b']"])
    [{'parallel.tp': 1, 'schedule.name': '1f1b'}, {'parallel.tp': 2, 'schedule.name': '1f1b'}]
    """
    values: dict[str, list[Any]] = {}
    for text in tries:
        key, equals, listed = text.partition("=")
        if key.strip() in values:
            message, fix = f"{key.strip()} is given twice", f"--try '{key.strip()}=[…]' with all of its values"
            raise usage_error("--try", message, fix)
        with suppress(ValueError, TypeError, RecursionError):
            read = tomllib.loads(f"v = {listed}")["v"]
            values[key.strip()] = json.loads(json.dumps(read, allow_nan=False))  # as rows say it: no dates, no nan
        found = values.get(key.strip())
        if not equals or "." not in key or not isinstance(found, list) or not found:
            allowed, fix = "section.key=[value, value]", "--try 'parallel.tp=[1, 2, 4]'"
            message = f"no list of values: {text!r}"
            raise usage_error("--try", message, fix, allowed)
    count = 1
    for found in values.values():
        count *= len(found)
    if count > MOST:
        raise usage_error("--try", f"{count:,} combinations", allowed=f"up to {MOST:,}")
    return [dict(zip(values, point, strict=True)) for point in product(*values.values())]


class _RowAtLeast(msgspec.Struct):
    """What every row has, whatever else stands in it."""

    schema_version: int
    fits: bool
    iteration_s: float | None
    reason: str | None = None


def _known(out: str | None, force: bool) -> dict[str, Object]:
    """Rows that an earlier sweep left; what a kill left of its last line is not one.

    Raises PiperError (io): a file there that no sweep wrote. With force, it will be overwritten.
    """
    if out is None:
        return {}
    path, found = Path(out) / KEPT, dict[str, Object]()
    try:
        if path.is_symlink():
            raise ValueError("a symbolic link")
        if path.exists():
            *lines, rest = path.read_text("utf-8").split("\n")
            if not (rest.startswith(_ROW) or _ROW.startswith(rest)):
                raise ValueError("another last line")
            rows = [msgspec.json.decode(line) for line in lines]
            msgspec.convert([row["found"] for row in rows], list[_RowAtLeast])
            found = {row["key"]: row["found"] for row in rows}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        if not force:
            message, fix = f"no rows of a sweep: {e}", "--force replaces it; or choose another --out"
            raise PiperError(ErrorKind.IO, message, file=str(path), key="--out", suggestion=fix) from None
        with suppress(OSError):  # what cannot be removed is refused when it is written
            path.unlink()
    refuse_existing(out, () if found else _TABLES, force)  # a table without rows is not a sweep's
    return found


def _keep(out: str | None, key: str, found: Object) -> None:
    if out is None:
        return
    path = Path(out) / KEPT
    with writing(path, "--out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:  # which writes at the end, wherever it has read
            file.seek(max(0, file.tell() - 1))
            if file.read() not in (b"", b"\n"):  # a kill left half a line
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
            file.write(json.dumps({"key": key, "found": found}).encode() + b"\n")


def _table(rows: Sequence[Object]) -> Mapping[str, bytes | str]:
    """rows.parquet, or rows.csv without pyarrow: a column a key; what a key holds more than one value of is JSON."""
    from pandas import DataFrame

    found = DataFrame([{k: json.dumps(v) if isinstance(v, dict | list) else v for k, v in row.items()} for row in rows])
    return parquet_files({"rows": found}) if find_spec("pyarrow") else {"rows.csv": found.to_csv(index=False)}
