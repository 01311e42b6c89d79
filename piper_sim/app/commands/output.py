"""What every command shares: JSON on stdout, tables for people, progress on stderr, files under --out."""

import io
import json
import shutil
import sys
import tempfile
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

from ir.core.errors import ErrorKind, PiperError, printable, usage_error
from ir.job import Job
from ir.trace.text import write_trace
from ir.trace.trace import Trace
from piper_sim.report.files import write_outputs
from piper_sim.report.marks import TraceMarks
from piper_sim.report.timeline import coloured, text_timeline

PATIENCE_S = 1.0
WIDEST = 10_000  # columns of a timeline, which is an array
TRACE_FILES = ("timeline.png", "trace.json.gz", "trace.tsv")


def print_json(value: Mapping[str, object]) -> None:
    """One JSON object, and nothing else. NaN and infinity are not JSON and are refused."""
    sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Say on stderr what takes long, once it has taken a second."""
    timer = threading.Timer(PATIENCE_S, lambda: print(f"{what} …", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def warn(warnings: Iterable[str]) -> None:
    """Say on stderr, with --json too, what is legal and rarely meant."""
    for text in dict.fromkeys(warnings):
        print(f"warning: {text}", file=sys.stderr)


def warn_uncorrected(job: Job, command: str) -> None:
    """Say that `[history] apply` changes nothing here: what is ranked or explained is what was simulated."""
    if job.history.apply:
        warn([f"history.apply: {command} has seconds as predicted; simulate, compare and sweep correct them"])


def width() -> int:
    """Columns to draw in: the terminal's, or 120 where there is none; at most `WIDEST`."""
    return min(shutil.get_terminal_size((120, 40)).columns, WIDEST)


def show(renderable: object) -> None:
    """Print a rich table. What comes from a file is text in it: neither markup, nor codes that a terminal obeys.

    No number of it is cut: lines that a narrow terminal does not hold, the terminal itself wraps.
    """
    from rich.console import Console, RenderableType
    from rich.measure import Measurement
    from rich.segment import Segment, Segments
    from rich.text import Text

    columns = None if sys.stdout.isatty() else max(width(), 120)
    console = Console(width=columns, highlight=False, markup=False, emoji=False)
    given = cast(RenderableType, renderable)
    takes = Measurement.get(console, console.options.update(max_width=WIDEST), given)
    console.width = max(console.width, takes.maximum if isinstance(renderable, Text) else takes.minimum)
    drawn = console.render(given)
    with console.capture() as written:  # which would end the process with 1 where a reader has left
        console.print(Segments([Segment(printable(text), style, codes) for text, style, codes in drawn]), end="")
    sys.stdout.write(written.get())


def show_timeline(trace: Trace) -> None:
    """Print a trace as text as wide as the terminal, in colours where there is one."""
    text = text_timeline(trace, width())
    if not sys.stdout.isatty():
        print(text)
        return
    from rich.text import Text

    show(Text.assemble(*coloured(text), no_wrap=True, overflow="ignore"))


def show_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str] = (), *, ruled: bool = False
) -> None:
    """Print rows under heads; numbers stand right. ruled: with lines around."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.HEAVY_HEAD if ruled else box.SIMPLE_HEAD)
    for head in heads:
        table.add_column(head, justify="left" if head in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    show(table)


def trace_files(trace: Trace, title: str, marks: TraceMarks | None = None) -> dict[str, bytes | str]:
    """timeline.png, trace.json.gz (Perfetto) and trace.tsv (ours)."""
    from piper_sim.report.perfetto import perfetto_gz
    from piper_sim.report.picture import timeline_png

    png = io.BytesIO()
    timeline_png(trace, png, title)
    return {"timeline.png": png.getvalue(), "trace.json.gz": perfetto_gz(trace, marks), "trace.tsv": write_trace(trace)}


def refuse_existing(out: str | None, names: Iterable[str], force: bool) -> None:
    """Before the work, not after it: refuse a folder that holds one of the files already, or cannot be written to.

    Raises PiperError (usage, io): files that would be overwritten, a folder that is none, or lies where nothing can be.
    """
    if out is None:
        return
    if not out.strip():
        raise usage_error("--out", "names no folder", "--out results, or leave it out")
    for name in names if not force else ():
        with suppress(OSError, ValueError):  # what cannot be asked about is refused when it is written
            if (path := Path(out) / name).exists():
                fix = "--force replaces it; or choose another --out"
                raise PiperError(ErrorKind.IO, "exists already", file=str(path), key="--out", suggestion=fix)
    with _writing(out):
        folder = Path(out).absolute()
        while not folder.exists():
            folder = folder.parent
        with tempfile.TemporaryFile(dir=folder):
            pass


def write(out: str | None, files: Mapping[str, bytes | str], force: bool) -> list[Path]:
    """Write files under --out, if it was given.

    Raises PiperError (usage, io): what is there already, or cannot be written.
    """
    if out is None:
        return []
    with _writing(out):
        return write_outputs(out, files, force)


@contextmanager
def _writing(out: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as e:  # a path that cannot even be asked about: too long, forbidden, a NUL in it
        why, fix = getattr(e, "strerror", None) or e, "choose another --out"
        raise PiperError(ErrorKind.IO, f"cannot be written: {why}", file=out, suggestion=fix) from None


def dumps(value: object) -> str:
    """JSON for a file."""
    return json.dumps(value, indent=1, allow_nan=False) + "\n"
