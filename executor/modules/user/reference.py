"""What `[model] module = "my_model.py:build"` refers to."""

from pathlib import Path

from executor.modules.base import TRACING
from ir.core.errors import ErrorKind, PiperError, nearest
from ir.core.files import run_file


def load_callable(reference: str) -> object:
    """The object that `path/file.py:name` refers to. Runs that file: only ever one the user named.

    Raises PiperError (model): not `file.py:name`, or no such callable; (io): no such file.

    >>> load_callable("nowhere.py:build")
    Traceback (most recent call last):
    ...
    ir.core.errors.PiperError: nowhere.py: no such file
    """
    path, _, name = reference.rpartition(":")
    file = Path(path)
    if not path or not name:
        raise PiperError(ErrorKind.MODEL, f"not a callable: {reference!r}", key="model.module", allowed="file.py:name")
    if not file.is_file():
        raise PiperError(ErrorKind.IO, "no such file", file=path)
    with TRACING:  # packages that put another module in their own place are not to be imported by two threads at once
        module = run_file(f"piper_user_{file.stem}", file)
    if not callable(found := getattr(module, name, None)):
        known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        fix = nearest(name, known)
        raise PiperError(ErrorKind.MODEL, f"no callable {name!r}", file=path, allowed=known, suggestion=fix)
    return found
