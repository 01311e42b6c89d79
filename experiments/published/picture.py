"""Predicted against measured as a picture: seconds of a step and peak bytes, one mark per source, a band of 10 %."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from experiments.published.report import Found
from experiments.published.rows import GIB
from experiments.published.score import Score

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKS = "osD^v<>PXph*d8H"
_COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#8f5db7", "#e08e1b", "#0f8b8d", "#7a4b2a", "#5b6b80", "#c2b016")
_INK, _BAND = "#1f2933", "#dfe5ec"


def scatter(found: Found) -> bytes:
    """A PNG."""
    figure = canvas(10.5, 5.6)
    left, right = figure.subplots(1, 2)
    drawn = [s for s, rows in found.items() if any(_seconds(rows)) or any(_bytes(rows))]
    for i, s in enumerate(drawn):
        look = {"marker": _MARKS[i % len(_MARKS)], "color": _COLOURS[i % len(_COLOURS)], "label": s.name}
        for axes, points in ((left, list(_seconds(found[s]))), (right, list(_bytes(found[s])))):
            x, y = ([p[k] for p in points] for k in (0, 1))
            axes.scatter(x, y, s=16, linewidths=0.4, edgecolors="white", alpha=0.85, zorder=2, **look)
    _frame(left, "seconds of a step")
    _frame(right, "peak allocated, GiB")
    handles, names = left.get_legend_handles_labels()
    figure.legend(handles, names, loc="lower center", ncols=7, frameon=False, fontsize=8, handletextpad=0.2)
    figure.subplots_adjust(0.065, 0.2, 0.985, 0.95, 0.16)
    return png(figure, dpi=100)


def canvas(width: float, height: float, layout: Literal["constrained"] | None = None) -> Figure:
    """An empty picture, without a display; inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout=layout)
    FigureCanvasAgg(figure)
    return figure


def png(figure: Figure, dpi: int) -> bytes:
    """The same picture, the same bytes."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=dpi, metadata={"Software": None})
    return out.getvalue()


def _seconds(rows: Sequence[Score]) -> Iterator[tuple[float, float]]:
    """(measured, predicted)."""
    for r in rows:
        if r.row.seconds is not None and r.predicted_s is not None:
            yield r.row.seconds, r.predicted_s


def _bytes(rows: Sequence[Score]) -> Iterator[tuple[float, float]]:
    for r in rows:
        for rank, error in (r.memory or {}).items():
            measured = r.row.memory[rank] / GIB
            yield measured, measured * (1 + error)


def _frame(axes: Axes, what: str) -> None:
    """Both scales alike, with the band."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axis.set_minor_locator(NullLocator())
    low = min(axes.get_xlim()[0], axes.get_ylim()[0])
    high = max(axes.get_xlim()[1], axes.get_ylim()[1])
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_aspect("equal")
    ends = [low, high]
    axes.fill_between(ends, [0.9 * e for e in ends], [1.1 * e for e in ends], color=_BAND, lw=0, zorder=0)
    axes.plot(ends, ends, color=_INK, lw=0.6, zorder=1)
    axes.set_xlabel(f"measured: {what}", fontsize=9, color=_INK)
    axes.set_ylabel("predicted; shaded: within 10 %", fontsize=9, color=_INK)
    axes.tick_params(labelsize=8, colors=_INK)
