"""The folder that a run saves to: `step-000020` is complete, `step-000020.tmp-…` is not, `lock` says who writes.

A file `stop` in it asks the run to save behind the step it is in, and to end.

A checkpoint is written under its second name, each file down to the disk, the manifest last, and then renamed. So
whatever has the first name and a manifest is complete, whenever anybody was killed, and nothing points to the newest.
"""

import ctypes
import errno
import fcntl
import os
import re
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from executor.checkpoint.manifest import read_manifest
from executor.checkpoint.tensors import MANIFEST
from ir.core.errors import ErrorKind, PiperError
from ir.core.files import FileErrors, read_bytes, resolve_types

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


resolve_types(CheckpointHolder)


class CheckpointLock:
    """A folder, taken."""

    def __init__(self, folder: Path) -> None:
        """Raises PiperError (io): another run has it, or there can be no such folder."""
        self.folder = folder
        self._fd = _locked(folder, fcntl.LOCK_EX)

    def say(self, run: str, name: str) -> None:
        """Leave word, down to the disk, for the run's other ranks, and of the process for whoever is refused.

        Raises PiperError (io): there is no room, or the disk fails.
        """
        words = msgspec.json.encode(CheckpointHolder(run, name, os.getpid(), socket.gethostname()))
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, words, 0)
            os.fsync(self._fd)
            sync_folder(self.folder)
        except OSError as error:
            raise refused(self.folder, error.strerror or str(error), "make room; or another --save") from error

    def check(self) -> None:
        """Raises OSError: the folder is not the one that was taken, nor perhaps ours: somebody has removed that."""
        try:
            same = os.path.samestat(os.stat(self.folder / LOCK), os.fstat(self._fd))
        except FileNotFoundError:
            same = False
        if not same:
            raise FileNotFoundError(errno.ENOENT, "somebody has removed its lock", str(self.folder / LOCK))

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


STOP = "stop"
_STEP = re.compile(r"step-(\d{6,})")
_HERE, _RENAME_EXCHANGE = -100, 2  # of Linux: AT_FDCWD, and a flag
_PART = re.compile(r"step-\d{6,}\.tmp-.+")
Tick = Callable[[], None]


def step_name(step: int) -> str:
    """A complete checkpoint's name.

    >>> step_name(20)
    'step-000020'
    """
    return f"step-{step:06d}"


def part_of(folder: Path, step: int, name: str) -> Path:
    """Where a run's checkpoint lies until it is complete."""
    return folder / f"{step_name(step)}.tmp-{name}"


def complete(folder: Path) -> dict[int, Path]:
    """The complete checkpoints in a folder, by step, the newest last."""
    found = {}
    with suppress(FileNotFoundError, NotADirectoryError):
        for path in folder.iterdir():
            if (m := _STEP.fullmatch(path.name)) and (path / MANIFEST).exists():
                found[int(m[1])] = path
    return dict(sorted(found.items()))


def newest(folder: Path) -> Path:
    """What `--resume` means: a checkpoint, or the newest complete one of a folder. Raises PiperError (io): none."""
    if (folder / MANIFEST).exists():
        _check_finished(folder.resolve())
        return folder
    if found := complete(folder):
        return found[max(found)]
    inner = sorted(p.parent.parent for p in folder.glob(f"*/step-*/{MANIFEST}")) if folder.is_dir() else []
    fix = f"--resume {inner[0]}" if inner else "leave out --resume to start at step 0"
    message, allowed = f"no complete checkpoint: {_what_is_there(folder)}", "what --save has written, or a step-… in it"
    raise PiperError(ErrorKind.IO, message, file=str(folder), key="--resume", allowed=allowed, suggestion=fix)


def _check_finished(folder: Path) -> None:
    """Raise PiperError (io) for what the next run that saves beside it removes, this one too, before it has read it."""
    if _PART.fullmatch(folder.name):
        whole = folder.with_name(folder.name.partition(".")[0])
        found = complete(folder.parent)
        fix = f"--resume {found[max(found)]}" if found else f"mv {folder.name} {whole.name} there, if all is in it"
        message, allowed = "it was never finished, or is being removed", "a complete checkpoint, step-…"
        raise PiperError(ErrorKind.IO, message, file=str(folder), key="--resume", allowed=allowed, suggestion=fix)


def _what_is_there(folder: Path) -> str:
    if not folder.is_dir():
        return "it is a file" if folder.exists() else "there is no such folder"
    names = sorted(p.name for p in folder.iterdir() if p.name not in (LOCK, STOP))
    if parts := [n for n in names if _PART.fullmatch(n) or _STEP.fullmatch(n)]:
        return f"{parts[-1]} was never finished"
    return f"there are {', '.join(names[:3])}{' …' if len(names) > 3 else ''}" if names else "it is empty"


def check_room(folder: Path, resumed: Path | None, *, force: bool) -> None:
    """Raise PiperError (io) for a folder that holds something else than the run to be continued.

    resumed: the checkpoint that the run takes up. force: what is in the way goes once there is a complete checkpoint.
    """
    if folder.exists() and not folder.is_dir():
        raise refused(folder, "it is a file", "another --save")
    if force or not folder.exists():
        return
    names = sorted(p.name for p in folder.iterdir())
    if foreign := [n for n in names if n not in (LOCK, STOP) and not _STEP.fullmatch(n) and not _PART.fullmatch(n)]:
        message = f"{foreign[0]} is in it, which no run has saved"
        raise refused(folder, message, "a folder of its own; or --force to save beside what is there")
    if not (found := complete(folder)):
        return
    last = found[max(found)].name
    if resumed is None or resumed.resolve().parent != folder.resolve():
        fix = f"--resume {folder} continues it; another --save; or --force, after whose first checkpoint these go"
        raise refused(folder, f"{last} of another run is in it", fix)
    if resumed.resolve().name != last:
        fix = f"--resume {folder}; another --save; or --force, after whose first checkpoint it goes"
        raise refused(folder, f"{last} in it is newer than {resumed.name}, which is resumed", fix)


def sweep(folder: Path, tick: Tick) -> None:
    """Remove what was never finished. Only its writer may: it has the lock. tick: called for every file."""
    for path in sorted(folder.iterdir()):
        if _PART.fullmatch(path.name):
            _remove(path, tick)


def publish(part: Path, step: int, tick: Tick) -> Path:
    """The checkpoint is complete from here on: everything in it is on the disk."""
    final, old = part.with_name(step_name(step)), part.with_name(f"{part.name}.old")
    sync_folder(part)
    if final.exists() and _exchanged(part, final):  # under --force
        old = part
    else:
        if final.exists():
            final.rename(old)
        part.rename(final)
    sync_folder(final.parent)
    _remove(old, tick)
    return final


def _exchanged(a: Path, b: Path) -> bool:
    """Give each the other's name, with no moment at which one of them has neither. Not every file system can."""
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)
    names = _HERE, os.fsencode(a), _HERE, os.fsencode(b)
    return exchange is not None and exchange(*names, _RENAME_EXCHANGE) == 0


def prune(folder: Path, run: str, step: int, keep: int, *, force: bool, tick: Tick) -> None:
    """Behind a new checkpoint: keep the last few of this run. force: what is not this run's, or is newer, goes too."""
    found = complete(folder)
    mine = [s for s, path in found.items() if s <= step and _run(path) == run]
    for s in mine[:-keep] + ([s for s in found if s not in mine] if force else []):
        discard(found[s], tick)


def _run(path: Path) -> str | None:
    with suppress(PiperError):
        return read_manifest(path).run
    return None


def discard(path: Path, tick: Tick) -> None:
    """Remove a checkpoint; it is not complete any more before the first of its files goes."""
    gone = path.with_name(f"{path.name}.tmp-gone")
    _remove(gone, tick)
    path.rename(gone)
    _remove(gone, tick)


def _remove(path: Path, tick: Tick) -> None:
    """As far as it can be: what stays is not complete, and the next run tries again."""
    with suppress(OSError):
        for file in sorted(path.iterdir()):
            if not file.is_dir():
                file.unlink()
                tick()
    shutil.rmtree(path, ignore_errors=True)
