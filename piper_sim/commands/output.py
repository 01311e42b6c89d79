"""What every command shares: JSON on stdout, tables for people, progress on stderr, files under --out."""

from __future__ import annotations

import io
import json
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ir.trace import Trace
from ir.trace_text import write_trace
from piper_sim.report.files import write_outputs

PATIENCE_S = 1.0


def print_json(value: Mapping[str, object]) -> None:
    """One JSON object, and nothing else. NaN and infinity are not JSON and are refused."""
    json.dump(value, sys.stdout, allow_nan=False)
    sys.stdout.write("\n")


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


def width() -> int:
    """Columns to draw in: the terminal's, or 120 where there is none."""
    return shutil.get_terminal_size((120, 40)).columns


def show(renderable: object) -> None:
    """Print a rich table."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else max(width(), 120), highlight=False).print(renderable)


def trace_files(trace: Trace, title: str) -> dict[str, bytes | str]:
    """timeline.png, trace.json.gz (Perfetto) and trace.tsv (ours)."""
    from piper_sim.report.perfetto import perfetto_gz
    from piper_sim.report.picture import timeline_png

    png = io.BytesIO()
    timeline_png(trace, png, title)
    return {"timeline.png": png.getvalue(), "trace.json.gz": perfetto_gz(trace), "trace.tsv": write_trace(trace)}


def write(out: str | None, files: Mapping[str, bytes | str], force: bool) -> list[Path]:
    """Write files under --out, if it was given."""
    return write_outputs(out, files, force) if out is not None else []


def dumps(value: object) -> str:
    """JSON for a file."""
    return json.dumps(value, indent=1, allow_nan=False) + "\n"
