"""Your own schedules: PyTorch's CSV, or a Python builder; both are orders from which the placement is read."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from ir.errors import ErrorKind, PiperError
from ir.order import Order
from ir.schedules.evaluate import check_complete
from ir.schedules.schedule import Placement, Schedule


def from_csv(path: str | Path) -> Schedule:
    """A schedule from PyTorch's compute-only CSV: one row per rank, empty cells are bubbles."""
    try:
        with open(path, newline="") as f:
            rows = [[c.strip() for c in row if c.strip()] for row in csv.reader(f)]
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        raise PiperError(ErrorKind.IO, f"cannot read the schedule: {e}", file=str(path), key="schedule.csv") from None
    try:
        return from_rows(rows, f"csv:{Path(path).name}")
    except PiperError as e:
        raise e.at(file=str(path), key="schedule.csv") from None


def from_builder(reference: str, ranks: int, microbatches: int, base: Path) -> Schedule:
    """A schedule from `file.py:function`, called as function(ranks, microbatches).

    It returns a `Schedule`, or one list of op texts per rank. Runs the user's code: only where a job names it.
    """
    file, _, name = reference.partition(":")
    path = base / file
    if not name or not path.is_file():
        raise PiperError(ErrorKind.JOB, f"{reference!r} names no function", key="schedule.builder", allowed="file.py:function")
    spec = importlib.util.spec_from_file_location("piper_sim_user_schedule", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise PiperError(ErrorKind.JOB, f"{file} has no function {name!r}", key="schedule.builder")
    made = function(ranks, microbatches)
    if isinstance(made, Schedule):
        return made
    rows = [made[r] for r in sorted(made)] if isinstance(made, Mapping) else list(made)
    return from_rows(rows, f"builder:{name}")


def from_rows(rows: Sequence[Sequence[str]], name: str) -> Schedule:
    """A schedule from each rank's op texts; where stages live is read off them.

    >>> from_rows([["0F0", "0B0"], ["1F0", "1B0"]], "mine").placements[0].rank_of_stage
    (0, 1)
    """
    if not rows or not all(rows):
        raise PiperError(ErrorKind.JOB, "a rank has no ops", suggestion="one row of ops per rank")
    orders = tuple(Order.of(list(r)) for r in rows)
    stages = 1 + max(int(o.stage.max()) for o in orders)
    mbs = 1 + max(int(o.mb.max()) for o in orders)
    if stages * mbs > 10_000_000:
        raise PiperError(ErrorKind.JOB, f"{stages} stages x {mbs} microbatches", allowed="10 million actions")
    home: dict[int, dict[int, int]] = {m: {} for m in range(mbs)}
    for rank, order in enumerate(orders):
        for s, m in zip(order.stage.tolist(), order.mb.tolist(), strict=True):
            if home[m].setdefault(s, rank) != rank:
                raise PiperError(ErrorKind.JOB, f"stage {s} of microbatch {m} is on ranks {home[m][s]} and {rank}")
    placements: list[Placement] = []
    for m in range(mbs):
        where = tuple(home[m].get(s, -1) for s in range(stages))
        if -1 in where:
            raise PiperError(ErrorKind.JOB, f"stage {where.index(-1)} of microbatch {m} is in no rank's row")
        if placements and placements[-1].rank_of_stage == where:
            placements[-1] = Placement(range(placements[-1].mbs.start, m + 1), where)
        else:
            placements.append(Placement(range(m, m + 1), where))
    check_complete(orders, placements)
    return Schedule(name, len(rows), mbs, max(1, stages // len(rows)), tuple(placements), orders)
