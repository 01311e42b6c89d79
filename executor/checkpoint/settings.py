"""What is asked of checkpoints, checked before any rank starts: flags, the folder to save to, the one to resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from executor.checkpoint.folder import check_room, complete, newest
from executor.checkpoint.lock import check_free
from executor.checkpoint.manifest import check_files, read_manifest, verify
from executor.checkpoint.same import check_same
from ir.core.errors import ErrorKind, PiperError
from ir.job.build import PreparedJob
from ir.job.run_options import KEPT, CheckpointOptions

PRESENT = "if-present"  # what `--resume` may say instead of a folder


def settled(wanted: CheckpointOptions, prepared: PreparedJob, steps: int, *, real: bool) -> CheckpointOptions:
    """What is wanted, with the checkpoint that `resume` means found and compared with the job.

    steps: that the run ends behind, counted from its very first. Raises PiperError: flags out of range, no checkpoint,
    one of something else, a folder that is taken.
    """
    _check_flags(wanted, real)
    if wanted.resume == PRESENT:  # for restarts by whoever does not look: of what is saved to, if anything is there
        wanted = replace(wanted, resume=wanted.save if complete(Path(wanted.save or "")) else None)
    found = wanted
    if wanted.resume is not None:
        folder = newest(Path(wanted.resume)).resolve()
        manifest = read_manifest(folder)
        check_files(folder, manifest)
        check_same(manifest, prepared, folder)
        if manifest.step >= steps:
            message = f"{steps} in all, and {folder.name} has done {manifest.step}"
            more, fix = f"more than {manifest.step}", f"--steps {manifest.step + 1}"
            raise PiperError(ErrorKind.USAGE, message, key="--steps", allowed=more, suggestion=fix)
        run = manifest.run if wanted.save is not None and folder.parent == Path(wanted.save).resolve() else None
        found = replace(found, resume=str(folder), first=manifest.step, run=run)
    if wanted.save is not None:
        save = Path(wanted.save).resolve()
        check_room(save, None if found.resume is None else Path(found.resume), force=wanted.force)
        check_free(save)
        found = replace(found, save=str(save))
    return found


def _check_flags(s: CheckpointOptions, real: bool) -> None:
    for flag, value, usual in (("--every", s.every, 1), ("--keep", s.keep, KEPT)):
        if value is not None and s.save is None:
            message = "says how to save, and nothing is saved"
            raise PiperError(ErrorKind.USAGE, message, key=flag, suggestion=f"--save DIR {flag} {max(1, value)}")
        if value is not None and value < 1:
            unit = "steps between two checkpoints" if flag == "--every" else "checkpoints"
            fix = f"{flag} {usual}"
            raise PiperError(ErrorKind.USAGE, f"{value} {unit}", key=flag, allowed="1 or more", suggestion=fix)
    if s.resume == PRESENT and s.save is None:
        message, fix = "of what is saved to, if anything is there", "--save DIR --resume if-present"
        raise PiperError(ErrorKind.USAGE, message, key="--resume", suggestion=fix)
    if not real and (s.save or s.resume):
        flag = "--save" if s.save else "--resume"
        message = "ops of a given time compute nothing, so there is nothing to save or to resume"
        raise PiperError(ErrorKind.USAGE, message, key=flag, suggestion=f"leave out {flag}, or --emulate and --replay")


def verified(saving: CheckpointOptions) -> CheckpointOptions:
    """The same, with all files of what is resumed read in full. Raises PiperError (io): one is damaged."""
    if saving.resume is None:
        return saving
    manifest = read_manifest(Path(saving.resume))
    verify(Path(saving.resume), manifest, manifest.files)
    return replace(saving, verified=True)
