"""Compiled functions. Where numba is missing they run as plain Python: the same numbers, a hundred times slower.

Importing this imports numba (0.4 s), so modules with kernels are imported only when a kernel is to run.
"""

import os
import sys
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

numba: Any
try:
    numba = import_module("numba")
except ImportError:
    numba = None

F = TypeVar("F", bound=Callable[..., object])


@cache
def _folder(package: Path) -> str | None:
    """A cache of its own for every state of a package: numba looks for changes only in a function's own file.

    Where NUMBA_CACHE_DIR says, else beside the sources, else in the user's cache; None where none of them can be
    written: then every process compiles.
    """
    text = b"".join(p.read_bytes() for p in [Path(__file__), *sorted(package.glob("*.py"))])
    user = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "piper-sim"
    ours = [package / "__pycache__", *([user] if user.is_absolute() else [])]  # in a container, users may have no home
    for root in [*([Path(numba.config.CACHE_DIR)] if numba.config.CACHE_DIR else []), *ours]:
        folder = root / f"numba-{sha256(text).hexdigest()[:16]}"
        new = not os.path.exists(folder)  # nor may they look into one
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            if new:
                print("compiling kernels, once per installation: up to half a minute …", file=sys.stderr)
            return str(folder)
    print("compiling kernels, each time anew: NUMBA_CACHE_DIR names no folder to keep them in …", file=sys.stderr)
    return None


def jit(function: F) -> F:
    """Compile on first call; the machine code is kept on disk.

    _nrt=False: kernels allocate nothing, so numba need not count references to arrays, which cost six times the work.
    forceinline: functions that take dozens of arrays would spend up to three times the work on handing them over.
    """
    if numba is None:
        return function
    folder = _folder(Path(function.__code__.co_filename).parent)
    was, numba.config.CACHE_DIR = numba.config.CACHE_DIR, folder or ""
    keep = folder is not None
    try:
        return cast(F, numba.njit(cache=keep, nogil=True, error_model="numpy", _nrt=False, forceinline=True)(function))
    finally:
        numba.config.CACHE_DIR = was
