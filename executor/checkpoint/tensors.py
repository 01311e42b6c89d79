"""Tensor files: laid out and read by the safetensors library; hashed and forced to the disk on their way there."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ir.core.errors import ErrorKind, PiperError
from ir.core.files import FileErrors

MANIFEST = "manifest.json"
SAID = {"format": "pt"}  # one entry: the library lays out several in any order, and equal values have equal files
WRITTEN = "a checkpoint as --save wrote it"
FORM = FileErrors("a file of a checkpoint", ErrorKind.IO, "--resume", 2**50)
STRETCH = 2**24  # bytes between two signs of life


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """What a file must be for its reader to believe it."""

    bytes: int
    sha256: str


def write_tensors(path: Path, tensors: Mapping[str, Tensor], tick: Callable[[], None] = lambda: None) -> CheckpointFile:
    """Write a new file, down to the disk. tick: called every 16 MiB.

    The file is put together in host memory first. Raises OSError; what was written of the file is gone then, so that
    there is room again.
    """
    data = memoryview(save({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, SAID))
    found = hashlib.sha256()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        for at in range(0, len(data), STRETCH):
            rest = data[at : at + STRETCH]
            found.update(rest)
            while rest:
                rest = rest[os.write(fd, rest) :]
            tick()
        os.fsync(fd)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    return CheckpointFile(len(data), found.hexdigest())


def digest_of(path: Path, tick: Callable[[], None] = lambda: None) -> CheckpointFile:
    """A file as it stands. Raises OSError."""
    found, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while data := file.read(STRETCH):
            found.update(data)
            size += len(data)
            tick()
    return CheckpointFile(size, found.hexdigest())


def damaged(file: Path, message: str, allowed: str = WRITTEN, at: str = "") -> PiperError:
    """A file of a checkpoint that cannot be read; the fix is the newest of the others beside it, if there is one."""
    others = [p for p in file.parent.parent.glob("step-*") if (p / MANIFEST).exists() and p != file.parent]
    newest = max(others, key=lambda p: (len(p.name), p.name), default=None)
    fix = "a copy of it that is whole" if newest is None else f"--resume {newest}"
    return PiperError(ErrorKind.IO, message, file=str(file), key=at or FORM.key, allowed=allowed, suggestion=fix)


@contextmanager
def saving_to(save: str | None) -> Iterator[None]:
    """A run that saves there, too, goes on from an older checkpoint than a damaged one only by --force: then the fix of
    what is refused as `damaged` says so.
    """
    try:
        yield
    except PiperError as error:
        there, other = Path(error.file or "").parent, Path((error.suggestion or "").removeprefix("--resume "))
        same = save is not None and other.parent.resolve() == Path(save).resolve() == there.parent.resolve()
        if same and (len(other.name), other.name) < (len(there.name), there.name):
            error.suggestion = f"{error.suggestion} --force"
        raise


class CheckpointTensors:
    """The tensors of a file, as views of its map: read where they are copied from, and not before."""

    def __init__(self, path: Path) -> None:
        """Raises PiperError (io): it is no tensor file."""
        self.path = path
        try:
            self._file: Any = safe_open(path, "pt")  # untyped
        except (SafetensorError, OSError) as error:
            raise damaged(self.path, f"cannot read tensors: {error}") from error

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._file.keys())

    def flat(self, name: str) -> Tensor:
        """All elements of a tensor. Raises PiperError (io): it is not there."""
        try:
            found: Tensor = self._file.get_tensor(name)
        except SafetensorError as error:
            raise damaged(self.path, f"cannot read tensors: {error}") from error
        return found.view(-1)
