"""What is written while something runs: errors that name the file, numbers as JSON has them."""

import errno
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ir.core.errors import ErrorKind, PiperError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of a disk, a quota, a limit


@contextmanager
def writing(file: Path, key: str) -> Iterator[None]:
    """Raise PiperError (io), with the file and the flag it is of, where the system cannot write it."""
    try:
        yield
    except OSError as error:
        message, fix = (
            f"cannot be written: {error.strerror or error}",
            f"{'make room there; or ' if error.errno in FULL else ''}another {key}",
        )
        allowed = "a folder that can be written to"
        raise PiperError(ErrorKind.IO, message, file=str(file), key=key, allowed=allowed, suggestion=fix) from error


def finite(value: object) -> object:
    """The same with None for NaN and infinity, which JSON does not have: of losses that have left all bounds.

    >>> finite({"losses": [1.5, math.nan, math.inf], "ranks": 2})
    {'losses': [1.5, None, None], 'ranks': 2}
    """
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {k: finite(v) for k, v in value.items()}
        case list() | tuple():
            return [finite(v) for v in value]
    return value
