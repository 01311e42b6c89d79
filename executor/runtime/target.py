"""Which function a rank runs, told from one process to another; and files that appear whole. Without torch."""

import errno
import importlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ir.core.errors import ErrorKind, PiperError
from ir.core.files import FULL, run_file

NO_ROOM = os.EX_CANTCREAT  # a rank's exit code where even why it failed cannot be written
_LOADING = threading.Lock()
Target = Callable[..., object] | str  # a module-level function, or its `module:name`


def describe(fn: Target) -> dict[str, str]:
    """How a fresh process finds a module-level function: by module name if it belongs to us, else by file."""
    if isinstance(fn, str):
        module_name, _, name = fn.partition(":")
        return {"module": module_name, "name": name}
    module = sys.modules[fn.__module__]
    name, file = fn.__module__, getattr(module, "__file__", None)
    if "." in fn.__qualname__ or not file:
        raise TypeError(f"{fn.__qualname__} must be a module-level function in a file")
    if name.split(".")[0] in ("executor", "piper_sim", "experiments", "ir"):
        return {"module": name, "name": fn.__qualname__}
    return {"module": "__piper_main__" if name == "__main__" else name, "file": file, "name": fn.__qualname__}


def find(target: dict[str, str]) -> Callable[..., object]:
    """The function, in the process that is to run it; threads that ask at once wait for one to load its module."""
    with _LOADING:
        return _find(target)


def _find(target: dict[str, str]) -> Callable[..., object]:
    if target["module"] in sys.modules or "file" not in target:
        module = importlib.import_module(target["module"])
    else:
        module = run_file(target["module"], target["file"])
    found: Callable[..., object] = getattr(module, target["name"])
    return found


@contextmanager
def temporary() -> Iterator[None]:
    """Raise PiperError (io) where there is no room for temporary files, no place for them, or somebody removes them."""
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:
        fix = "name a folder that can be written to in TMPDIR"
        raise PiperError(ErrorKind.IO, f"{error.strerror}", key="TMPDIR", suggestion=fix) from error
    try:
        yield
    except OSError as error:
        name = str(error.filename)
        if error.errno in (*FULL, errno.EROFS):
            message, fix = f"cannot be written: {error.strerror}", "free space there, or name another folder in TMPDIR"
        elif error.errno == errno.ENOENT and name.startswith(os.path.join(folder, "piper-")):
            folder, message = name, "somebody has removed it, and the run needs it"
            fix = "name a folder that stays as long as the run in TMPDIR"
        else:
            raise
        raise PiperError(ErrorKind.IO, message, file=folder, suggestion=fix) from error


def write_whole(path: Path, text: str) -> None:
    """The file appears complete or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)  # a full disk leaves half of it
        raise
