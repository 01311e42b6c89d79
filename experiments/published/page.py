"""docs/PUBLISHED.md, written from the scores."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from experiments.published.report import Found, confusion, summary, without
from experiments.published.score import PredictionErrors, times
from experiments.published.sure import coverage

PAGE = Path(__file__).parents[2] / "docs" / "PUBLISHED.md"
PICTURE = PAGE.with_name("published.png")

_INTRO = """# How far off the predictions are

Written by `python -m experiments.published --write`; no figure of the tables is typed in. Every row of
`experiments/published/data` becomes a job and is predicted with **one frozen hardware file per GPU and one software
file per framework** (at most eight constants, each with its source in the file). An error is predicted / measured − 1;
the table shows the median, 90th percentile and worst of its size, and the median with its sign. A step's time is what
is scored, never MFU; memory is the peak of allocated bytes, per pipeline rank where the source gives it.

*fit* is half of a table, every other row (of the next four the others). The numbers of the software files are fitted
to it by `python -m experiments.published.fit FRAMEWORK` (nemo has none); which constants there are, and the hardware
files, were chosen by someone who had seen all rows of these tables. *held out* is the rest. Rows of two large
tables that were never copied here, nor fitted to, but scored three times on the way: 176 of Ultra-Scale, time median
6.1 %, p90 20.6 %, memory median 5.6 %, p90 16.1 %; 43 of llm-foundry, time median 3.3 %, p90 9.4 %; all 219 are said to
fit, as they did.
"""

_FITS = """## Said to fit

A run that ran must be said to fit (capacity less a margin of 2 GiB, reserved bytes by a replay of the allocator). What
ended the failed runs is not known: out of memory, out of time, or a crash; the table is no score.
"""

_SURE = """## How sure

`iteration_s_interval` is the middle 80 % of measured / predicted of rows like the job (docs/COSTS.md). How many rows
lie in theirs: half of the tables by the other half, and each table by all the others, as a table nobody has seen.
"""

_CONTROLS = """## Controls

Median error of step times where a prediction is made worse on purpose. *plain*: without software files. *swapped*:
A100 predicted as H100 and the other way round, B200 as H100. *constant*: every product and attention at 55 % of the
peak, all else free.
"""


def page(found: Found, controls: Mapping[str, Found]) -> str:
    """The whole page."""
    said = "\n".join(f"- **{s.name}**: {s.title}. {s.assumed}".rstrip() for s in found)
    return "\n".join(
        [
            _INTRO,
            f"![predicted against measured, one mark per source]({PICTURE.name})",
            "",
            summary(found),
            "",
            _FITS,
            confusion(found),
            "",
            _SURE,
            *coverage(found),
            "",
            "## What is missing",
            "",
            *(without(found) or ["Nothing."]),
            "",
            "## What was assumed",
            "",
            "Where a source leaves something open, the job says the same for every row of its table.",
            "",
            said,
            "",
            _CONTROLS,
            control_table(found, controls),
            "",
        ]
    )


def control_table(found: Found, controls: Mapping[str, Found]) -> str:
    """Median errors of time by data set, as they are and under each control."""
    out = ["| data set | frozen files | " + " | ".join(controls) + " |", "|---|--:|" + "--:|" * len(controls)]
    for s in found:
        spreads = [PredictionErrors.of(times(f[s])) for f in (found, *controls.values())]
        if all(spreads):
            out.append(f"| {s.name} | " + " | ".join(f"{100 * x.median:.1f} %" for x in spreads if x) + " |")
    return "\n".join(out)
