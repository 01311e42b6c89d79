"""A trace as a PNG: a lane per rank and stream, a memory curve under each rank. Same trace, same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from ir.core.order import FloatArray, IntArray
from ir.trace.trace import Trace
from piper_sim.report.look import (
    COMPUTE,
    INDEX,
    LOOKS,
    StreamLane,
    coverage,
    half_colours,
    lanes_of,
    legend_looks,
    looks_of,
    short_op,
    span,
)
from piper_sim.report.units import duration, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH_IN, _DPI, _PIXELS = 16.0, 160, 2200
_MOST_BOXES = 6_000  # beyond it a lane is an image, one column per pixel
_INK, _FAINT, _GROUND, _MEMORY = "#1f2933", "#8a94a3", "#eef1f5", "#5b6b80"


@dataclass(frozen=True)
class _Track:
    """Where something stands on the page: top and height in units of a compute lane."""

    rank: int
    top: float
    height: float
    lane: StreamLane | None  # None: the rank's memory curve


def timeline_png(trace: Trace, path: str | Path | BinaryIO, title: str) -> None:
    """Draw the trace into a PNG file (or an open binary file).

    >>> import io
    >>> out = io.BytesIO()
    >>> timeline_png(Trace.of({}, [(0, 0, "compute", "0F0", 0, 0, 1)]), out, "one op")
    >>> out.getvalue()[1:4]
    b'PNG'
    """
    # Matplotlib takes half a second to import; no pyplot, so no global state and no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tracks = _tracks(trace)
    units = max((t.top + t.height for t in tracks), default=1.0)
    ranks = max(1, len({t.rank for t in tracks}))
    inches = units * min(0.42, max(0.1, 9.0 / (1.8 * ranks))) + 1.35
    figure = Figure(figsize=(_WIDTH_IN, inches), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.055, 0.55 / inches, 0.915, 1 - 1.35 / inches))
    begin, end = span(trace)
    axes.set_xlim(begin, end if end > begin else begin + 1)
    axes.set_ylim(units, 0)
    looks = looks_of(trace)
    edges = np.linspace(*axes.get_xlim(), _PIXELS + 1)
    per_lane = sum(t.lane is not None for t in tracks) and len(trace) / sum(t.lane is not None for t in tracks)
    for track in tracks:
        _draw(axes, trace, track, looks, edges, as_image=len(trace) > _MOST_BOXES and per_lane > 40)
    _labels(axes, tracks, inches / units)
    _frame(figure, axes, title, looks, inches, trace.header.get("unit", "s"))
    figure.savefig(path, format="png", metadata={"Software": None})


def _tracks(trace: Trace) -> list[_Track]:
    """Per rank a compute lane, thin communication lanes, the memory curve, a gap."""
    lanes = lanes_of(trace)
    with_memory = set(trace.memory.rank.tolist()) if trace.memory is not None else set()
    tracks: list[_Track] = []
    top = 0.0
    for rank in sorted({lane.rank for lane in lanes} | with_memory):
        for lane in (x for x in lanes if x.rank == rank):
            height = 1.0 if lane.stream == COMPUTE else 0.26
            tracks.append(_Track(rank, top, height, lane))
            top += height + 0.05
        if rank in with_memory:
            tracks.append(_Track(rank, top, 0.55, None))
            top += 0.6
        top += 0.22
    return tracks


def _draw(axes: Axes, trace: Trace, track: _Track, looks: IntArray, edges: FloatArray, as_image: bool) -> None:
    if track.lane is None:
        _memory(axes, trace, track)
        return
    axes.axhspan(track.top, track.top + track.height, color=_GROUND, lw=0, zorder=0)
    if as_image:
        _image(axes, trace, track, looks, edges)
    else:
        _boxes(axes, trace, track, looks)


def _image(axes: Axes, trace: Trace, track: _Track, looks: IntArray, edges: FloatArray) -> None:
    """Two pixel rows of mixed colours, stretched over the lane."""
    assert track.lane is not None
    rows = track.lane.rows
    covered = coverage(trace.start_s[rows], trace.end_s[rows], looks[rows], edges)
    share = np.minimum(covered / np.diff(edges), 1.0)
    busy = share.sum(0, keepdims=True)
    share = np.where(busy > 1, share / np.maximum(busy, 1), share)
    free = np.maximum(1 - busy, 0).T @ _rgb([_GROUND])
    halves = np.stack([share.T @ _rgb(half_colours(half)) + free for half in (0, 1)])
    extent = (edges[0], edges[-1], track.top + track.height, track.top)
    axes.imshow(halves.clip(0, 1), extent=extent, aspect="auto", interpolation="nearest", zorder=1)


def _rgb(colours: Sequence[str]) -> FloatArray:
    return np.array([[int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)] for c in colours])


def _boxes(axes: Axes, trace: Trace, track: _Track, looks: IntArray) -> None:
    assert track.lane is not None
    rows = track.lane.rows
    for look in np.unique(looks[rows]).tolist():
        mine = rows[looks[rows] == look]
        spans = list(zip(trace.start_s[mine].tolist(), (trace.end_s - trace.start_s)[mine].tolist(), strict=True))
        edge: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.4 if len(rows) < 600 else 0}
        if look == INDEX["FB"]:  # two halves: both members run all the time
            for half in (0, 1):
                place = (track.top + half * track.height / 2, track.height / 2)
                axes.broken_barh(spans, place, facecolor=half_colours(half)[look], **edge)
        else:
            axes.broken_barh(spans, (track.top, track.height), facecolor=LOOKS[look].colour, **edge)
    if track.lane.stream == COMPUTE:
        _box_texts(axes, trace, rows, track.top)


def _box_texts(axes: Axes, trace: Trace, rows: IntArray, top: float) -> None:
    """Op texts where they fit their box: whole, else without the layer."""
    x0, x1 = axes.get_xlim()
    points_per_s = axes.get_position().width * _WIDTH_IN * 72 / (x1 - x0)
    for i in rows.tolist():
        room = (float(trace.end_s[i] - trace.start_s[i]) * points_per_s - 3) / 4.0
        members = short_op(trace.op[i]).split(";")
        for k, member in enumerate(members):
            text = next((t for t in (member, member.split("/")[0]) if len(t) < room), None)
            if text is not None:
                x, y = float(trace.start_s[i] + trace.end_s[i]) / 2, top + 0.02 + (k + 0.5) / len(members)
                axes.text(x, y, text, ha="center", va="center", fontsize=6.2, color="white", parse_math=False)


def _memory(axes: Axes, trace: Trace, track: _Track) -> None:
    """Allocated bytes as a filled step curve; all ranks share one scale, so heights compare."""
    assert trace.memory is not None
    mine = trace.memory.rank == track.rank
    most = max(1, int(trace.memory.bytes.max()))
    t = np.append(trace.memory.time_s[mine], axes.get_xlim()[1])
    height = trace.memory.bytes[mine] / most * track.height
    bottom = track.top + track.height
    y = bottom - np.append(height, height[-1])
    t, y = _thin(t, y)
    axes.fill_between(t, bottom, y, step="post", color=_MEMORY, alpha=0.22, lw=0)
    axes.step(t, y, where="post", color=_MEMORY, lw=0.7)
    peak = size(int(trace.memory.bytes[mine].max()))
    axes.annotate(
        peak, (1.004, track.top + track.height / 2), xycoords=("axes fraction", "data"), fontsize=6, va="center"
    )


def _thin(t: FloatArray, y: FloatArray) -> tuple[FloatArray, FloatArray]:
    """At most a few samples per pixel; in each slice the highest use (smallest y) stays."""
    if len(t) <= 2 * _PIXELS:
        return t, y
    slices = np.minimum(((t - t[0]) / max(t[-1] - t[0], 1e-300) * _PIXELS).astype(int), _PIXELS - 1)
    by = np.lexsort((y, slices))
    keep = np.sort(by[np.unique(slices[by], return_index=True)[1]])
    return t[keep], y[keep]


def _labels(axes: Axes, tracks: Sequence[_Track], inches_per_unit: float) -> None:
    """Rank numbers, and stream names where there is room for them."""
    small = inches_per_unit * 0.3 * 72 > 5.4
    left: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "center"}
    for rank in sorted({t.rank for t in tracks}):
        first = next(t for t in tracks if t.rank == rank)
        middle = first.top + first.height / 2
        axes.annotate(f"rank {rank}", (-0.006, middle), fontsize=7.5, color=_INK, weight="bold", **left)
    for track in tracks if small else ():
        if track.lane is None or track.lane.stream != COMPUTE:
            name = "memory" if track.lane is None else track.lane.stream
            axes.annotate(name, (-0.006, track.top + track.height / 2), fontsize=5.4, color=_FAINT, **left)


def _frame(figure: Figure, axes: Axes, title: str, looks: IntArray, inches: float, unit: object) -> None:
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter

    axes.set_yticks([])
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)
    axes.tick_params(axis="x", colors=_INK, labelsize=8, length=3)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: duration(round(x, 12), unit, 5)))
    figure.text(0.055, 1 - 0.3 / inches, title, fontsize=12, weight="bold", color=_INK, va="center", parse_math=False)
    used = np.unique(looks).tolist()
    handles = [Patch(facecolor=look.colour, label=look.word) for look in legend_looks(used)]
    if handles:
        where: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (0.05, 1 - 0.6 / inches)}
        figure.legend(handles=handles, **where, ncols=len(handles), frameon=False, fontsize=8, handlelength=1.1)
