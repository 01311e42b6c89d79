"""Compiled functions. Where numba is missing they run as plain Python: the same bits, a hundred times slower."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

numba: Any
try:
    numba = import_module("numba")
except ImportError:  # the twin is then slow, but right
    numba = None

F = TypeVar("F", bound=Callable[..., object])


def _cache() -> str:
    """A folder of its own for every state of this package: numba looks for changes only in a function's own file."""
    here = Path(__file__).parent
    text = b"".join(p.read_bytes() for p in sorted(here.glob("*.py")))
    return str(Path(numba.config.CACHE_DIR or here / "__pycache__") / f"numba-{sha256(text).hexdigest()[:16]}")


FOLDER = "" if numba is None else _cache()


def jit(function: F) -> F:
    """Compile on first call; the machine code is kept on disk.

    _nrt=False: kernels allocate nothing, so numba need not count references to arrays, which cost six times the work.
    forceinline: the event loop's functions take dozens of arrays, and handing them over cost three times the work.
    """
    if numba is None:
        return function
    was, numba.config.CACHE_DIR = numba.config.CACHE_DIR, FOLDER
    try:
        return cast(F, numba.njit(cache=True, nogil=True, error_model="numpy", _nrt=False, forceinline=True)(function))
    finally:
        numba.config.CACHE_DIR = was
