"""The folder that a run saves to: `step-000020` is complete, `step-000020.tmp-…` is not, `lock` says who writes.

A checkpoint is written under its second name, each file down to the disk, the manifest last, and then renamed. So
whatever has the first name and a manifest is complete, whenever anybody was killed, and nothing points to the newest.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path

from executor.checkpoint.manifest import MANIFEST, read_manifest
from ir.core.errors import ErrorKind, PiperError

LOCK = "lock"
PATIENCE_S = 3.0  # for a run that was killed a moment ago to be gone
_STEP = re.compile(r"step-(\d{6,})")
_PART = re.compile(r"step-\d{6,}\.tmp-.+")


def step_name(step: int) -> str:
    """A complete checkpoint's name.

    >>> step_name(20)
    'step-000020'
    """
    return f"step-{step:06d}"


def file_of(rank: int) -> str:
    """What a rank writes.

    >>> file_of(3)
    'rank-00003.safetensors'
    """
    return f"rank-{rank:05d}.safetensors"


def complete(folder: Path) -> dict[int, Path]:
    """The complete checkpoints in a folder, by step, the newest last."""
    found = {}
    with suppress(FileNotFoundError, NotADirectoryError):
        for path in folder.iterdir():
            if (m := _STEP.fullmatch(path.name)) and (path / MANIFEST).exists():
                found[int(m[1])] = path
    return dict(sorted(found.items()))


def newest(folder: Path) -> Path:
    """What `--resume` means: a checkpoint, or the newest complete one of a folder. Raises PiperError: there is none."""
    if (folder / MANIFEST).exists():
        return folder
    if found := complete(folder):
        return found[max(found)]
    inner = sorted(p.parent.parent for p in folder.glob(f"*/step-*/{MANIFEST}")) if folder.is_dir() else []
    fix = f"--resume {inner[0]}" if inner else "leave out --resume to start at step 0"
    raise PiperError(
        ErrorKind.IO,
        f"no complete checkpoint: {_what_is_there(folder)}",
        file=str(folder),
        key="--resume",
        allowed="a folder that --save has written, or one of the step-… in it",
        suggestion=fix,
    )


def _what_is_there(folder: Path) -> str:
    if not folder.exists():
        return "there is no such folder"
    if not folder.is_dir():
        return "it is a file"
    names = sorted(p.name for p in folder.iterdir() if p.name != LOCK)
    parts = [n for n in names if _PART.fullmatch(n) or _STEP.fullmatch(n)]
    if parts:
        return f"{parts[-1]} was never finished"
    return f"there are {', '.join(names[:3])}{' …' if len(names) > 3 else ''}" if names else "it is empty"


def check_room(folder: Path, resumed: Path | None, *, force: bool) -> None:
    """Refuse a folder that holds something else than the run to be continued. Raises PiperError (io).

    resumed: the checkpoint that the run takes up. force: what is in the way goes once there is a complete checkpoint.
    """
    if folder.exists() and not folder.is_dir():
        raise _refused(folder, "it is a file", "another --save")
    names = sorted(p.name for p in folder.iterdir()) if folder.exists() else []
    if force:
        return
    if foreign := [n for n in names if n != LOCK and not _STEP.fullmatch(n) and not _PART.fullmatch(n)]:
        message = f"{foreign[0]} is in it, which no run has saved"
        raise _refused(folder, message, "a folder of its own; or --force to save beside what is there")
    found = complete(folder)
    if not found:
        return
    last = found[max(found)]
    if resumed is None or resumed.resolve().parent != folder.resolve():
        fix = f"--resume {folder} continues it; another --save; or --force, after whose first checkpoint these go"
        raise _refused(folder, f"{last.name} of another run is in it", fix)
    if resumed.resolve().name != last.name:
        fix = f"--resume {folder}; another --save; or --force, after whose first checkpoint it goes"
        raise _refused(folder, f"{last.name} in it is newer than {resumed.name}, which is resumed", fix)


def _refused(folder: Path, message: str, fix: str) -> PiperError:
    return PiperError(ErrorKind.IO, f"cannot save here: {message}", file=str(folder), key="--save", suggestion=fix)


class Lock:
    """Who saves to a folder; let go of by the kernel when its process ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        """Raises PiperError (io): another run has it."""
        self.folder = folder
        self._fd = _locked(folder, fcntl.LOCK_EX)

    def say(self, run: str, name: str) -> None:
        """Leave word for the run's other ranks, and of the process for whoever is refused."""
        text = json.dumps({"run": run, "name": name, "pid": os.getpid(), "host": socket.gethostname()}).encode()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text, 0)

    def free(self) -> None:
        """Let go."""
        os.close(self._fd)


def check_free(folder: Path) -> None:
    """Make the folder if need be, and refuse it where a run saves to it. Raises PiperError (io)."""
    os.close(_locked(folder, fcntl.LOCK_SH))


def said(folder: Path) -> tuple[str, str]:
    """What the lock's holder has said: all runs that continue one another have one name, and each its own.

    Raises PiperError: this machine sees another folder.
    """
    try:
        words = json.loads((folder / LOCK).read_bytes())
        return words["run"], words["name"]
    except (OSError, ValueError, KeyError) as error:
        fix = "a folder on a file system that all machines share"
        raise PiperError(
            ErrorKind.IO, "rank 0's lock is not seen by this rank", file=str(folder), key="--save", suggestion=fix
        ) from error


def _locked(folder: Path, how: int) -> int:
    limit = time.monotonic() + PATIENCE_S
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _refused(folder, error.strerror or str(error), "a folder that can be written to") from error
    while True:
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if time.monotonic() > limit:
                words = os.pread(fd, 4096, 0)
                os.close(fd)
                raise _refused(folder, f"another run saves to it{_holder(words)}", "another --save") from None
            time.sleep(0.05)
        except OSError as error:
            os.close(fd)
            raise _refused(folder, f"it cannot be locked: {error.strerror}", "another file system") from error


def _holder(words: bytes) -> str:
    with suppress(ValueError, KeyError, TypeError):
        holder = json.loads(words)
        return f" (process {holder['pid']} on {holder['host']})"
    return ""


def part_of(folder: Path, step: int, name: str) -> Path:
    """Where a run's checkpoint lies until it is complete."""
    return folder / f"{step_name(step)}.tmp-{name}"


def sweep(folder: Path) -> None:
    """Remove what was never finished. Only its writer may: it has the lock."""
    for path in folder.iterdir():
        if _PART.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def publish(part: Path, step: int) -> Path:
    """The checkpoint is complete from here on: everything in it is on the disk."""
    final, old = part.with_name(step_name(step)), part.with_name(f"{part.name}.old")
    sync_folder(part)
    if final.exists():  # under --force
        final.rename(old)
    part.rename(final)
    sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)
    return final


def prune(folder: Path, run: str, step: int, keep: int, *, force: bool) -> None:
    """Behind a new checkpoint: keep the last few of this run. force: what is not this run's, or is newer, goes too."""
    found = complete(folder)
    mine = [s for s, path in found.items() if s <= step and _run(path) == run]
    old = mine[:-keep] + ([s for s in found if s not in mine] if force else [])
    for s in old:
        discard(found[s])


def _run(path: Path) -> str | None:
    with suppress(PiperError):
        return read_manifest(path).run
    return None


def discard(path: Path) -> None:
    """Remove a checkpoint; it is not complete any more before the first of its files goes."""
    gone = path.with_name(f"{path.name}.tmp-gone")
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Names in a folder reach the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
