"""Your own schedules: PyTorch's CSV, or a Python builder; both are orders from which the placement is read."""

import contextlib
import csv
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ir.core.errors import ErrorKind, PiperError, job_error
from ir.core.files import FileErrors, read_text, run_file
from ir.core.limits import check_passes
from ir.core.order import Order
from ir.schedules.schedule import Schedule, StagePlacement, check_complete

_BUILDER = "schedule.builder"
FORM = FileErrors("a schedule", ErrorKind.JOB, "schedule.csv", fix="PyTorch's CSV: one row of ops per rank")


def from_csv(path: str | Path) -> Schedule:
    """A schedule from PyTorch's compute-only CSV: one row per rank, empty cells are bubbles.

    Raises PiperError (io): unreadable; (job): too large, or no legal schedule.
    """
    text = read_text(path, FORM)
    try:
        rows = [[c.strip() for c in row if c.strip()] for row in csv.reader(text.splitlines())]
    except csv.Error as e:
        raise FORM.wrong(f"not CSV: {e}", str(path), None, "a row of op texts for each rank") from None
    while rows and not rows[-1]:  # a last line break
        rows.pop()
    with FORM.naming(path):
        return from_rows(rows, f"csv:{Path(path).name}")


def from_builder(reference: str, ranks: int, microbatches: int) -> Schedule:
    """A schedule from `file.py:function`, called as function(ranks, microbatches).

    It returns a `Schedule`, or one list of op texts per rank. Runs the user's code: only where a job names it.
    """
    file, _, name = reference.rpartition(":")
    path = Path(file)
    if not name or not path.is_file():
        message = f"{reference!r} names no function of a file"
        raise job_error(_BUILDER, message, allowed="file.py:function").at(file=str(path))
    try:
        made = _run(path, name, ranks, microbatches)
    except PiperError as e:
        raise e.at(file=str(path), key="schedule.builder") from None
    except (Exception, SystemExit) as e:
        frame = traceback.extract_tb(e.__traceback__)[-1]
        message = f"{name}({ranks}, {microbatches}) raised {type(e).__name__}: {e} ({frame.filename}:{frame.lineno})"
        raise job_error(_BUILDER, message).at(file=str(path)) from e
    return made


def _run(path: Path, name: str, ranks: int, microbatches: int) -> Schedule:
    if path.suffix != ".py":
        raise job_error(_BUILDER, f"{path.name} is no Python file", allowed="file.py:function")
    with _quietly():
        module = run_file("piper_sim_user_schedule", path)
        function = getattr(module, name, None)
        if not callable(function):
            raise job_error(_BUILDER, f"{path.name} has no function {name!r}")
        made = function(ranks, microbatches)
    if isinstance(made, Schedule):
        check_passes(made.stages, made.microbatches)
        check_complete(made.orders, made.placements)
        return made
    rows = [made[r] for r in sorted(made)] if isinstance(made, Mapping) else made
    if not isinstance(rows, list | tuple) or not all(_is_row(r) for r in rows):
        allowed = "a Schedule, or a list of op texts per rank"
        raise job_error(_BUILDER, f"{name} returned {type(made).__name__}, not that", allowed=allowed)
    return from_rows(rows, f"builder:{name}")


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Stdout belongs to the command; and nothing is written beside the user's file, no bytecode either."""
    was, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.dont_write_bytecode = was


def _is_row(row: object) -> bool:
    return isinstance(row, list | tuple) and all(isinstance(c, str) for c in row)


def from_rows(rows: Sequence[Sequence[str]], name: str) -> Schedule:
    """A schedule from each rank's op texts; where stages live is read off them.

    Raises PiperError (job): a rank without ops, uneven stages, or passes that are missing or repeated.

    >>> from_rows([["0F0", "0B0"], ["1F0", "1B0"]], "mine").placements[0].rank_of_stage
    (0, 1)
    """
    if not rows or not all(rows):
        empty = next((r for r, row in enumerate(rows) if not row), 0)
        raise PiperError(ErrorKind.JOB, f"rank {empty} has no ops", suggestion="one row of ops per rank")
    orders = tuple(Order.of(list(r)) for r in rows)
    stages = 1 + max(int(o.stage.max()) for o in orders)
    mbs = 1 + max(int(o.mb.max()) for o in orders)
    check_passes(stages, mbs)
    if stages % len(rows):
        message = f"{stages} stages on {len(rows)} ranks"
        raise PiperError(ErrorKind.JOB, message, allowed="as many stages on each rank", suggestion="one row per rank")
    home: dict[int, dict[int, int]] = {m: {} for m in range(mbs)}
    for rank, order in enumerate(orders):
        for s, m in zip(order.stage.tolist(), order.mb.tolist(), strict=True):
            if home[m].setdefault(s, rank) != rank:
                message = f"stage {s} of microbatch {m} is on ranks {home[m][s]} and {rank}"
                raise job_error(None, message, "all passes of a stage and microbatch in one row")
    placements: list[StagePlacement] = []
    for m in range(mbs):
        where = tuple(home[m].get(s, -1) for s in range(stages))
        if -1 in where:
            message = f"stage {where.index(-1)} of microbatch {m} is in no rank's row"
            raise PiperError(ErrorKind.JOB, message, suggestion=f"{where.index(-1)}F{m} and {where.index(-1)}B{m}")
        if placements and placements[-1].rank_of_stage == where:
            placements[-1] = StagePlacement(range(placements[-1].mbs.start, m + 1), where)
        else:
            placements.append(StagePlacement(range(m, m + 1), where))
    check_complete(orders, placements)
    return Schedule(name, len(rows), mbs, stages // len(rows), tuple(placements), orders)
