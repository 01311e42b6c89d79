"""A trace as text: exact cells where times allow it, else one glyph per slice of time."""

import re
from collections.abc import Iterator, Sequence

import numpy as np

from ir.core.grid import GRID
from ir.core.order import FloatArray, IntArray
from ir.trace.trace import Trace
from piper_sim.report.look import LOOKS, StreamLane, coverage, lanes_of, looks_of, short_op, span, tick_times
from piper_sim.report.units import duration

MOST_RANKS = 16
_GRID_WIDTH = 200
_BAND_WIDTH = 100
_IDLE = "."
_COLOURS = {look.glyph: look.colour for look in LOOKS}
_RUNS = re.compile(r"([^.\s])\1*")  # of a glyph
_CELLS = re.compile(r"[^.\s]+")
_LEGEND = re.compile(r"(?<=· )\S(?= )")


def text_timeline(trace: Trace, width: int | None = None) -> str:
    """One line per rank: what it computes.

    Small traces whose times are multiples of one unit become an exact grid, a cell per unit (F = 1, B = 2):

    >>> rows = [(0, 0, "compute", "0F0", 0, 0, 1), (0, 1, "compute", "1F0", 1, 1, 2), (0, 1, "compute", "1B0", 2, 2, 4)]
    >>> rows += [(0, 0, "compute", "0F1", 1, 1, 2), (0, 0, "compute", "0B0", 4, 4, 6)]
    >>> print(text_timeline(Trace.of({}, rows)))
    0 |0F0 0F1 ... ... 0B0 0B0
    1 |... 1F0 1B0 1B0

    All others are drawn to scale, `width` columns wide; a column shows what filled it or what neighbours left out:

    >>> rows = [(0, 0, "compute", f"0F{i}", i * 0.1, i * 0.1, i * 0.1 + 0.075) for i in range(9)]
    >>> print(text_timeline(Trace.of({}, rows), width=47))
                0                   500 ms
    rank 0  77 |FFF.FFF.FFF.FFF.FFF.FFF.FFF.FFF.FFF
    percent busy · F forward · . idle · one column is 25 ms

    A grid is only drawn if it fits `width`. Without a width, a grid may take 200 columns and a scale drawing takes 100.
    """
    lanes = [lane for lane in lanes_of(trace) if lane.stream == "compute"]
    if not lanes:
        return "(no ops)"
    grid = _grid(trace, lanes, width or _GRID_WIDTH)
    return grid if grid is not None else _bands(trace, lanes, width or _BAND_WIDTH)


def coloured(text: str) -> Iterator[tuple[str, str]]:
    """A text timeline in pieces, each with the colour of its class of ops, "" for what has none.

    >>> [[piece for piece in coloured(line) if piece[1]] for line in ("rank 0  77 |FFB.", "0 |0F0 ...")]
    [[('FF', '#3d7fc4'), ('B', '#e08214')], [('0F0', '#3d7fc4')]]
    """
    for line in text.splitlines(keepends=True):
        lane, bar, _ = line.partition("|")
        glyphs = line.startswith("rank ") and bool(bar)
        what = _RUNS if glyphs else _CELLS if bar else _LEGEND
        done = len(lane + bar) if bar else 0
        yield line[:done], ""
        for m in what.finditer(line, done):
            yield line[done : m.start()], ""
            yield m[0], _COLOURS.get(m[0][0] if what is not _CELLS else _pass_of(m[0]), "")
            done = m.end()
        yield line[done:], ""


def _pass_of(cell: str) -> str:
    """The glyph of a cell's op: its pass, or that of a fused pair."""
    passes = "".join(c for c in cell if c in "FBIWR")
    return passes if len(passes) == 1 else "X" if passes else "u"


def _grid(trace: Trace, lanes: Sequence[StreamLane], width: int) -> str | None:
    """The exact grid, or None where it would not be exact or would not fit."""
    rows = np.concatenate([lane.rows for lane in lanes])
    if len(rows) > width * len(lanes) or len({lane.rank for lane in lanes}) > 2 * MOST_RANKS:
        return None
    begin = float(trace.start_s[rows].min())
    start, end = trace.start_s[rows] - begin, trace.end_s[rows] - begin
    cell = max(3, *(len(short_op(trace.op[i])) for i in rows.tolist()))
    labels = _labels(lanes)
    most = (width - len(labels[0])) // (cell + 1)
    unit = next((u for u in _units(np.concatenate((start, end))) if float(end.max()) / u <= most), None)
    if unit is None:
        return None
    lines = []
    for lane, label in zip(lanes, labels, strict=True):
        cells: list[str] = []
        for i in lane.rows.tolist():
            a, b = round((trace.start_s[i] - begin) / unit), round((trace.end_s[i] - begin) / unit)
            cells += [_IDLE * cell] * (a - len(cells))
            cells += [short_op(trace.op[i]).ljust(cell)] * (b - len(cells))
        lines.append((label + "|" + " ".join(cells)).rstrip())
    if unit != 1:
        lines.append(f"one cell is {duration(unit, trace.header.get('unit', 's'))}")
    return "\n".join(lines)


def _units(times: FloatArray) -> list[float]:
    """Steps that all times are exact multiples of: 1 for whole numbers, then the largest on the engines' grid."""
    ticks = times * GRID
    if not (np.abs(ticks) < 2.0**62).all() or (ticks != np.rint(ticks)).any():
        return []
    unit = int(np.gcd.reduce(ticks.astype(np.int64))) / GRID
    return [1.0, unit] if unit >= 1 and unit == int(unit) else [unit] * (unit > 0)


def _labels(lanes: Sequence[StreamLane]) -> list[str]:
    wide = max(len(str(lane.rank)) for lane in lanes)
    return [f"{lane.rank:{wide}} " for lane in lanes]


def _bands(trace: Trace, lanes: Sequence[StreamLane], width: int) -> str:
    ranks = sorted({lane.rank for lane in lanes})
    shown = _sample(ranks)
    begin, end = span(trace)
    end = end if end > begin else begin + 1.0
    unit = trace.header.get("unit", "s")
    labels = [f"rank {text}" for text in _labels(lanes)]
    gutter = len(labels[0]) + len("100 |")
    columns = max(10, width - gutter)
    edges = np.linspace(begin, end, columns + 1)
    looks = looks_of(trace)
    lines, used = [], set()
    for lane, label in zip(lanes, labels, strict=True):
        if lane.rank in shown:
            glyphs, busy = _band(trace, lane, looks, edges)
            used |= set(glyphs)
            lines.append(f"{label}{busy:3.0f} |{glyphs}")
    legend = [f"{look.glyph} {look.word}" for look in LOOKS if look.glyph in used]
    legend += [f"{_IDLE} idle"] * (_IDLE in used)
    notes = ["percent busy", *legend, f"one column is {duration((end - begin) / columns, unit)}"]
    if len(shown) < len(ranks):
        notes.append(f"{len(shown)} of {len(ranks)} ranks")
    return "\n".join([_axis(begin, end, columns, gutter, unit), *lines, " · ".join(notes)])


def _sample(ranks: Sequence[int]) -> set[int]:
    """At most sixteen ranks, evenly spread, first and last among them."""
    if len(ranks) <= MOST_RANKS:
        return set(ranks)
    return {ranks[i] for i in np.rint(np.linspace(0, len(ranks) - 1, MOST_RANKS)).astype(int).tolist()}


def _band(trace: Trace, lane: StreamLane, looks: IntArray, edges: FloatArray) -> tuple[str, float]:
    """A lane's glyphs, and its busy percentage."""
    covered = coverage(trace.start_s[lane.rows], trace.end_s[lane.rows], looks[lane.rows], edges)
    slices = np.diff(edges)
    glyphs = "".join(_IDLE if i < 0 else LOOKS[i].glyph for i in _shared(covered / slices))
    return glyphs, 100 * float(np.minimum(covered.sum(0), slices).sum() / slices.sum())


def _shared(covered: FloatArray) -> list[int]:
    """Which look each column shows, -1 for idle: the one that is owed most of those in it. What a column leaves out
    is owed to the next ones, so that looks have as many columns as they have time, idle time too.

    >>> _shared(np.full((2, 10), 0.35)).count(-1), _shared(np.array([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]))
    (3, [0, 1, -1])
    """
    shares = np.vstack([covered, np.maximum(0.0, 1.0 - covered.sum(0))])
    owed, out, last = np.zeros(len(shares)), [], len(shares) - 1
    for column in shares.T:
        owed += column
        # A hair of tolerance: where half a column is busy, rounding must not decide.
        here = np.where(column > 1e-6, owed - 1e-9 * (np.arange(last + 1) == last), -np.inf)
        best = int(here.argmax())
        owed[best] -= 1.0
        out.append(-1 if best == last else best)
    return out


def _axis(begin: float, end: float, columns: int, gutter: int, unit: object = "s") -> str:
    """Round times above the columns where they fall; the first says its unit."""
    cells = [" "] * (gutter + columns)
    free = 0
    for t in tick_times(begin, end, max(3, columns // 12)):
        at = gutter + round((t - begin) / (end - begin) * columns)
        text = duration(t, unit, 6) if t else "0"
        if at >= free and at + len(text) <= len(cells):
            cells[at : at + len(text)] = text
            free = at + len(text) + 1
    return "".join(cells).rstrip()
