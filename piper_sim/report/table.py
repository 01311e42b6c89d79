"""Predictions as tables for the terminal; their rows are `simulate`'s and `compare`'s JSON objects."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from piper_sim.report.units import GIB, MISSING, count, gib, percent

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

# What a device holds at its peak. cache: of the allocator, beyond what is asked for.
MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers", "workspace", "context", "cache")
_GLYPHS = dict(zip(MEMORY_PARTS, "PGOABWCR", strict=True))
_BAR = 24
_GAP = (0, 1, 0, 0)  # narrow: the whole comparison must fit 80 columns
_SHORT = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "activ",
    "workspace": "work",
    "buffers": "bufs",
    "context": "ctx",
}
_HEADS = {
    "schedule": "schedule",
    "step s": "step s",
    "tokens/s/GPU": "tokens/s\n/GPU",
    "MFU %": "MFU %",
    "bubble %": "bubble %",
    "exposed comm s": "exposed\ncomm s",
    "peak GiB (rank)": "peak GiB\n(rank)",
    "fits": "fits",
}
_JUSTIFY: dict[str, Literal["left", "center"]] = {"schedule": "left", "fits": "center"}


def compare_cells(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """One dict of texts per row, for the terminal's table and the report's alike; what does not fit stands last.

    >>> [c] = compare_cells([{"schedule": "1f1b", "iteration_s": 1.5, "mfu": 0.4, "fits": True}])
    >>> c["schedule"], c["step s"], c["MFU %"], c["bubble %"], c["fits"]
    ('1f1b', '1.500', '40.0', '–', '✓')
    """
    ordered = sorted(rows, key=_feasible_first)
    steps = [r["iteration_s"] for r in ordered if r.get("iteration_s")]
    # All steps get as many places as the smallest needs for four digits, so that the points align.
    places = max(0, 3 - math.floor(math.log10(min(steps)))) if steps else 0
    return [_cells(row, places) for row in ordered]


def _feasible_first(row: Mapping[str, Any]) -> tuple[bool, float]:
    step = row.get("iteration_s")
    return (row.get("fits") is False or step is None, float("inf") if step is None else float(step))


def _cells(row: Mapping[str, Any], places: int) -> dict[str, str]:
    step, comm, peak, fits = (row.get("iteration_s"), row.get("exposed_comm_s"), _worst_peak(row), row.get("fits"))
    return {
        "schedule": str(row.get("schedule", MISSING)),
        "step s": MISSING if step is None else f"{step:.{places}f}",
        "tokens/s/GPU": count(row.get("tokens_per_s_per_gpu")),
        "MFU %": percent(row.get("mfu")),
        "bubble %": percent(row.get("bubble_fraction")),
        "exposed comm s": MISSING if comm is None else f"{comm:.{places}f}",
        "peak GiB (rank)": MISSING if peak is None else f"{gib(peak[1])} ({peak[0]})",
        "fits": MISSING if fits is None else ("✗" if not fits else "(✓)" if tight(row) else "✓"),
        "reason": str(row.get("reason") or tight(row)),
    }


def tight(row: Mapping[str, Any]) -> str:
    """Of what fits, but may not: less is left than the band its peak lies in is wide above it. Else nothing.

    >>> G = 2**30
    >>> memory = {"capacity_bytes": 80 * G, "margin_bytes": 2 * G, "reserved_band_bytes": {"0": [60 * G, 79 * G]}}
    >>> memory |= {"breakdown_bytes": {"0": {"context": G}}, "device_peak_bytes": {"0": 77 * G}}
    >>> tight({"fits": True, "memory": memory})
    'fits with 1.0 GiB to spare, but the peak of rank 0 may be anything from 61.0 to 80.0 GiB'
    """
    memory = row.get("memory") or {}
    bands = memory.get("reserved_band_bytes")
    if not row.get("fits") or not bands:
        return ""
    rank = max(bands, key=lambda r: bands[r][1])
    low, high = (b + memory["breakdown_bytes"][rank]["context"] for b in bands[rank])
    room = memory["capacity_bytes"] - memory["margin_bytes"]
    if high <= room:
        return ""
    spare = room - max(memory["device_peak_bytes"].values())
    band = f"the peak of rank {rank} may be anything from {gib(low)} to {gib(high)} GiB"
    return f"fits with {gib(spare)} GiB to spare, but {band}"


def _worst_peak(row: Mapping[str, Any]) -> tuple[str, float] | None:
    """The rank with the highest device peak, and that peak; allocated bytes where nothing better is known."""
    memory = row.get("memory") or {}
    for key in ("device_peak_bytes", "peak_reserved_bytes", "peak_allocated_bytes"):
        if peaks := memory.get(key):
            rank = max(peaks, key=lambda r: (peaks[r], -int(r)))
            return str(rank), float(peaks[rank])
    return None


def compare_table(rows: Sequence[Mapping[str, Any]], title: str | None = None) -> Table:
    """The table of `compare`: fastest first, infeasible rows last, their reasons below the table.

    >>> from rich.console import Console
    >>> rows = [{"schedule": "zbv", "iteration_s": None, "fits": False, "reason": "61 layers on 64 stages"}]
    >>> rows += [{"schedule": "1f1b", "iteration_s": 2.0, "fits": True, "mfu": 0.41}]
    >>> Console(width=79, no_color=True).print(compare_table(rows))  # doctest: +NORMALIZE_WHITESPACE
    <BLANKLINE>
                   tokens/s                   exposed  peak GiB
     schedule  step s      /GPU  MFU %  bubble %   comm s    (rank)  fits
     ─────────────────────────────────────────────────────────────────────
     1f1b       2.000         –   41.0         –        –         –   ✓
     zbv            –         –      –         –        –         –   ✗
    <BLANKLINE>
    zbv: 61 layers on 64 stages
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    cells = compare_cells(rows)
    # Text, not str: a schedule's name or a reason may hold brackets, which rich would read as markup.
    reasons = Text()
    for c in (c for c in cells if c["reason"]):
        before = "\n" if reasons else ""
        reasons.append(f"{before}{c['schedule']}: {c['reason']}", "yellow" if c["fits"] == "(✓)" else "red")
    table = Table(title=title, box=box.SIMPLE_HEAD, header_style="bold", padding=_GAP)
    table.caption, table.caption_justify = reasons or None, "left"
    for name in _HEADS:
        whole = name != "schedule"  # `search` says there what it changed: that is wrapped, and numbers never cut
        table.add_column(
            _HEADS[name],
            justify=_JUSTIFY.get(name, "right"),
            no_wrap=whole,
            min_width=_longest(_HEADS[name], (c[name] for c in cells)) if whole else None,
            overflow="ellipsis" if whole else "fold",
            vertical="bottom",
        )
    for i, row in enumerate(cells):
        bad = row["fits"] == "✗" or row["step s"] == MISSING
        best = "bold green" if i == 0 else ""
        style = "dim" if bad else "yellow" if row["fits"] == "(✓)" else best
        table.add_row(*(Text(row[name]) for name in _HEADS), style=style)
    return table


def _longest(head: str, cells: Iterable[str]) -> int:
    """Columns that a column of a table takes whole."""
    return max(map(len, (*head.split("\n"), *cells)))


def memory_cells(memory: Mapping[str, Any]) -> list[dict[str, str]]:
    """Per rank, what fills it at its peak, in GiB; the parts sum to the total.

    >>> m = {"breakdown_bytes": {"0": {"parameters": 2**31}}, "capacity_bytes": 80 * 2**30}
    >>> [(c["rank"], c["parameters"], c["total"]) for c in memory_cells(m)]
    [('0', '2.0', '2.0')]
    """
    breakdown = memory.get("breakdown_bytes") or {}
    peaks = memory.get("device_peak_bytes") or {}
    capacity, margin = memory.get("capacity_bytes"), memory.get("margin_bytes") or 0
    cells = []
    for rank in sorted(breakdown, key=int):
        parts = _filled(memory, rank)
        total = peaks.get(rank)
        total = sum(v or 0 for v in parts.values()) if total is None else total
        row = {"rank": str(rank)} | {name: gib(parts.get(name)) for name in MEMORY_PARTS}
        row["total"] = gib(total)
        row["headroom"] = MISSING if capacity is None else gib(capacity - margin - total)
        cells.append(row)
    return cells


def _filled(memory: Mapping[str, Any], rank: str) -> dict[str, float | None]:
    """What fills a rank at its peak: the parts of `simulate`'s object, and the allocator's cache, which sum to it."""
    return {**memory["breakdown_bytes"][rank], "cache": (memory.get("cache_bytes") or {}).get(rank)}


def memory_table(memory: Mapping[str, Any], title: str | None = None) -> Table:
    """The breakdown per rank, with a bar of what fills the device; `memory` is that key of `simulate`'s object.

    Headroom is the capacity without the job's margin, less the rank's peak; negative where it does not fit.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    cells = memory_cells(memory)
    names = [n for n in ("rank", *MEMORY_PARTS, "total", "headroom") if any(c[n] != MISSING for c in cells)]
    capacity = memory.get("capacity_bytes")
    caption = "GiB at each rank's peak; bar: " + " ".join(f"{g}={p}" for p, g in _GLYPHS.items())
    caption += f"; full bar {capacity / GIB:.0f} GiB" if capacity else ""
    table = Table(title=title, box=box.SIMPLE_HEAD, header_style="bold", padding=_GAP, caption=caption)
    for name in names:
        head = _SHORT.get(name, name)
        table.add_column(head, justify="right", no_wrap=True, min_width=_longest(head, (c[name] for c in cells)))
    table.add_column("")
    for row in cells:
        parts = _filled(memory, row["rank"])
        short = "bold red" if row["headroom"].startswith("-") else ""
        table.add_row(
            *(Text(row[n], style=short if n == "headroom" else "") for n in names), _Bar(_bar(parts, capacity))
        )
    return table


@dataclass(frozen=True)
class _Bar:
    """Letters that give way first in a narrow terminal."""

    letters: str

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        return Measurement(0, len(self.letters))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        yield Text(self.letters, no_wrap=True, overflow="crop")


def _bar(parts: Mapping[str, float | None], capacity: float | None) -> str:
    """Letters in proportion to the parts of the capacity, dots for what is free.

    >>> _bar({"parameters": 20.0, "activations": 10.0}, 48.0)
    'PPPPPPPPPPAAAAA.........'
    """
    sizes = [float(parts.get(name) or 0) for name in MEMORY_PARTS]
    full = max(capacity or 0.0, sum(sizes)) or 1.0
    text, seen = "", 0.0
    for name, size in zip(MEMORY_PARTS, sizes, strict=True):
        seen += size
        text += _GLYPHS[name] * (round(seen / full * _BAR) - len(text))
    return text.ljust(_BAR, ".")
