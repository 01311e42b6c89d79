"""Files that somebody else wrote: read whole, gzipped or not, with errors that name them."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from ir.core.errors import ErrorKind, PiperError

GZIP = b"\x1f\x8b"
MOST_BYTES = 4 * 2**30


def read_text(path: str, flag: str) -> str:
    """A file's text. Raises PiperError (io, job): it cannot be read, is no text, or too large."""
    file = Path(path)
    try:
        with file.open("rb") as f:
            packed = f.read(2) == GZIP
        with gzip.open(file, "rb") if packed else file.open("rb") as f:
            raw = f.read(MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        fix = "a path from here on; its file whole, as it was written"
        raise PiperError(ErrorKind.IO, f"cannot be read: {why}", file=path, key=flag, suggestion=fix) from None
    if len(raw) > MOST_BYTES:
        raise PiperError(ErrorKind.JOB, "too large", file=path, key=flag, allowed=f"{MOST_BYTES} bytes, unpacked")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise PiperError(ErrorKind.JOB, "not UTF-8", file=f"{path}:{line}", key=flag) from None
