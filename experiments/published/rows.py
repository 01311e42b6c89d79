"""What a published line becomes: a job and what was measured of it, or the reason why no job says the same."""

import csv
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
FULLEST = -1
GIB, MIB = 2**30, 2**20

Table = dict[str, dict[str, Any]]  # a job as TOML would give it
Line = Mapping[str, str]


@dataclass(frozen=True)
class Row:
    """One published run. seconds: of a step. memory: bytes allocated at the peak, by pipeline rank or of the FULLEST.

    job: None where it cannot be expressed, and `why` says why. failed: it crashed, or ran out of
    memory or time: only whether it is said to fit is asked. publisher: "" where the table has one only.
    """

    name: str
    job: Table | None = None
    seconds: float | None = None
    memory: Mapping[int, float] = field(default_factory=dict)
    why: str = ""
    failed: bool = False
    publisher: str = ""


@dataclass(frozen=True)
class DataSet:
    """A table of figures. row: what a line becomes. assumed: what its source does not say and the jobs had to choose.

    bars: what the median, p90 or worst of "time" and "memory" is asked to reach, in words. never_fitted: no constant
    may be fitted to a row of it, nor was one.
    """

    name: str
    title: str
    row: Callable[[Line], Row]
    assumed: str
    bars: str = ""
    never_fitted: bool = False

    def fit(self, rows: Iterable[Row]) -> set[str]:
        """Names of the rows that constants may be fitted to."""
        return set() if self.never_fitted else fitted(rows)

    def rows(self, folder: Path = DATA) -> list[Row]:
        """All of its rows, in the table's order."""
        return [self.row(line) for line in lines(folder / f"{self.name}.csv")]


def lines(path: Path) -> list[dict[str, str]]:
    """The lines of a table, by column."""
    with path.open(newline="") as f:
        return list(csv.DictReader(x for x in f if not x.startswith("#")))


def fitted(rows: Iterable[Row]) -> set[str]:
    """Names of the half that constants may be fitted to: every other row, of the next four the others. Tables repeat.

    >>> sorted(int(x) for x in fitted(Row(str(i)) for i in range(8)))
    [0, 2, 5, 7]
    """
    return {r.name for i, r in enumerate(rows) if (i + i // 4) % 2 == 0}


def ints(line: Line, *columns: str) -> tuple[int, ...]:
    """Whole numbers of some columns.

    >>> ints({"tp": "8", "pp": "2"}, "tp", "pp")
    (8, 2)
    """
    return tuple(int(line[c]) for c in columns)
