"""Writing results: each file whole or not at all, nothing outside the folder, nothing overwritten unasked."""

import contextlib
import errno
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from ir.core.errors import ErrorKind, PiperError


def write_outputs(out_dir: str | Path, files: Mapping[str, bytes | str], force: bool = False) -> list[Path]:
    """Write files below a folder, which is created; returns their paths.

    All names are checked before the first byte is written. Without `force`, no existing file is replaced. A failure
    (a full disk) leaves every file either as it was or complete.

    >>> with tempfile.TemporaryDirectory() as d:
    ...     [p.name for p in write_outputs(d, {"report.html": "<p>", "run/trace.tsv": "…"})]
    ['report.html', 'trace.tsv']
    """
    root = Path(out_dir)
    targets = {name: _target(root, name) for name in files}
    if not force:
        for path in targets.values():
            if os.path.lexists(path):
                raise _exists(path)
    for name, path in targets.items():
        content = files[name]
        _write_whole(path, content.encode("utf-8") if isinstance(content, str) else content, force)
    return list(targets.values())


def _target(root: Path, name: str) -> Path:
    """Where a file will stand, if its name is plain and no link leads elsewhere."""
    pure = PurePosixPath(name)
    plain = bool(pure.parts) and not pure.is_absolute() and ".." not in pure.parts and "\0" not in name
    if not plain or "\\" in name or name.endswith("/"):
        message, allowed = f"not a file name below the output folder: {name!r}", "relative names without '..'"
        raise _refused(root, message, "e.g. report.html", allowed)
    path = root
    for part in ("", *pure.parts):
        path = path / part
        if path.is_symlink():
            fix = "remove the link, or name its target with --out"
            raise _refused(path, "is a symbolic link", fix, "real files and folders")
        if path.exists() and path.is_dir() != (path != root / pure):
            kind = "a folder" if path.is_dir() else "no folder"
            raise _refused(path, f"is {kind}", "choose another --out")
    return path


def _refused(path: Path, message: str, fix: str, allowed: str | None = None) -> PiperError:
    return PiperError(ErrorKind.IO, message, file=str(path), allowed=allowed, suggestion=fix)


def _exists(path: Path) -> PiperError:
    return _refused(path, "exists already", "--force replaces it; or choose another --out")


def _write_whole(path: Path, data: bytes, force: bool) -> None:
    """A temporary file beside the target, on disk, then renamed over it: readers see the old one or the new one."""
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        with os.fdopen(handle, "wb") as f:
            f.write(data)
            f.flush()
            os.fchmod(f.fileno(), 0o644)  # mkstemp makes it private
            os.fsync(f.fileno())
        if force:
            os.replace(temporary, path)
        else:
            _link_new(temporary, path)
        temporary = None
        _sync_folder(path.parent)
    except FileExistsError:
        raise _exists(path) from None
    except OSError as e:
        raise _failure(path, e, len(data)) from e
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _link_new(temporary: str, path: Path) -> None:
    """Rename, unless someone made the target meanwhile: a link fails then, where a rename would replace."""
    try:
        os.link(temporary, path)
        os.unlink(temporary)
    except OSError as e:
        if e.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK) or os.path.lexists(path):
            raise
        os.replace(temporary, path)  # a file system without hard links


def _sync_folder(folder: Path) -> None:
    """A rename is only safe once its folder is on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _failure(path: Path, e: OSError, size: int) -> PiperError:
    fix = "check that the folder can be written, or choose another --out"
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        fix = f"free {max(1, size // 2**20)} MB or choose another --out; no half-written file was left"
    return _refused(path, f"cannot be written: {e.strerror or e}", fix)
