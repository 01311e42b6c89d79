"""Who saves to a folder: a lock that the kernel lets go of when its process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ir.core.errors import ErrorKind, PiperError
from ir.core.files import FileErrors, read_bytes

LOCK = "lock"
FORM = FileErrors("a checkpoint's lock", ErrorKind.IO, "--save", 10**6)
PATIENCE_S = 3.0  # for a run that was killed a moment ago to be gone


@dataclass(frozen=True, slots=True)
class CheckpointHolder:
    """What the lock's file says."""

    run: str  # of all runs that continue one another
    name: str  # of this one
    pid: int
    host: str


class CheckpointLock:
    """A folder, taken."""

    def __init__(self, folder: Path) -> None:
        """Raises PiperError (io): another run has it, or there can be no such folder."""
        self.folder = folder
        self._fd = _locked(folder, fcntl.LOCK_EX)

    def say(self, run: str, name: str) -> None:
        """Leave word, down to the disk, for the run's other ranks, and of the process for whoever is refused."""
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, msgspec.json.encode(CheckpointHolder(run, name, os.getpid(), socket.gethostname())), 0)
        os.fsync(self._fd)
        sync_folder(self.folder)

    def free(self) -> None:
        os.close(self._fd)


def check_free(folder: Path) -> None:
    """Make the folder if need be. Raises PiperError (io): a run saves to it, or it cannot be written to."""
    os.close(_locked(folder, fcntl.LOCK_SH))


def said(folder: Path) -> CheckpointHolder:
    """What the lock's holder has said. Raises PiperError (io): this machine sees another folder."""
    try:
        return msgspec.json.decode(read_bytes(folder / LOCK, FORM), type=CheckpointHolder)
    except (PiperError, ValueError, RecursionError) as error:
        message, may = "rank 0's lock is not seen by this rank", "a folder on a file system that all machines share"
        raise PiperError(ErrorKind.IO, message, file=str(folder / LOCK), key=FORM.key, allowed=may) from error


def refused(folder: Path, message: str, fix: str) -> PiperError:
    """Nothing can be saved to a folder."""
    message, may = f"cannot save here: {message}", "a folder that this run alone saves to"
    return PiperError(ErrorKind.IO, message, file=str(folder), key=FORM.key, allowed=may, suggestion=fix)


def sync_folder(path: Path) -> None:
    """Names in a folder reach the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _locked(folder: Path, how: int) -> int:
    limit = time.monotonic() + PATIENCE_S
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise refused(folder, error.strerror or str(error), "a folder that can be written to") from error
    while True:
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if time.monotonic() > limit:
                words = os.pread(fd, 4096, 0)
                os.close(fd)
                raise refused(folder, f"another run saves to it{_holder(words)}", "another --save") from None
            time.sleep(0.05)
        except OSError as error:
            os.close(fd)
            raise refused(folder, f"it cannot be locked: {error.strerror}", "another file system") from error


def _holder(words: bytes) -> str:
    with suppress(ValueError, RecursionError):
        holder = msgspec.json.decode(words, type=CheckpointHolder)
        return f" (process {holder.pid} on {holder.host})"
    return ""
