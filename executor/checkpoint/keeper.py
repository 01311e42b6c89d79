"""One rank's side of checkpoints: it writes what it is the first to hold, and reads what it holds, by name.

Every rank writes its own files; rank 0 then reads what each has written (names, places and hashes, not values), adds
the manifest and gives the whole its name. Nobody holds more than its own pieces at any time.
"""

import hashlib
import json
import os
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from executor.checkpoint.folder import (
    STOP,
    CheckpointLock,
    Tick,
    check_room,
    part_of,
    prune,
    publish,
    said,
    step_name,
    sweep,
)
from executor.checkpoint.manifest import (
    VERSION,
    CheckpointManifest,
    RankManifest,
    file_of,
    read_manifest,
    stored,
    uncovered,
    verify,
)
from executor.checkpoint.pieces import Held, ShardPiece, in_files, written
from executor.checkpoint.reader import CheckpointReader
from executor.checkpoint.settings import config_file, plain_table, training_of
from executor.checkpoint.tensors import MANIFEST, saving_to, write_tensors
from executor.device.progress import RankProgress
from executor.optim.optimizer import WEIGHT
from executor.optim.sync import BucketSync
from executor.parallel.shares import ParamShard
from executor.transport.base import Transport
from ir.core.errors import ErrorKind, PiperError
from ir.core.files import FULL
from ir.job.build import PreparedJob
from ir.job.run_options import KEPT, CheckpointOptions
from ir.plan.places import RankPlacement
from ir.plan.plan import Plan
from ir.plan.text import plan_digest

LOOK_S = 0.02  # between two looks for what other ranks have written
FILE_BYTES = 2**27  # of a file's values at most: a file is put together in host memory


class RankCheckpoint:
    """shares: what this rank holds of each parameter. saved: the newest checkpoint of this run."""

    def __init__(
        self,
        saving: CheckpointOptions,
        prepared: PreparedJob,
        plan: Plan,
        rank: int,
        sync: BucketSync,
        shares: Mapping[str, ParamShard],
        progress: RankProgress,
    ) -> None:
        self.saving, self.prepared, self.plan, self.rank = saving, prepared, plan, rank
        self.sync, self.shares, self.progress = sync, shares, progress
        self.places = RankPlacement.of(plan)
        self.saved: str | None = None
        self._folder = Path(saving.save or "")
        self._lock: CheckpointLock | None = None
        self._board: Any = None
        self._run, self._name = "", ""  # of all runs that continue one another; of this one
        self._behind: _CheckpointBehind | None = None

    def begin(self, transport: Transport, board: Any = None) -> None:
        """Take the folder, and take up the checkpoint. All ranks go on together.

        board: a c10d store that all ranks see; without it, nobody can ask them to stop.
        Raises PiperError (io): another run has the folder, or a file of the checkpoint is damaged.
        """
        s = self.saving
        self._board = board if s.save is not None else None
        if s.save is not None and self.rank == 0:
            self.progress.op(-1, "begin")
            self._lock = CheckpointLock(self._folder)
            check_room(self._folder, Path(s.resume) if s.resume else None, force=s.force)  # since it was looked at
            sweep(self._folder, self.progress.go_on)
            name = uuid.uuid4().hex[:12]
            self._lock.say(s.run or name, name)
        if s.resume is not None:
            self._load(Path(s.resume), transport)
        if s.save is not None or s.resume is not None:
            self._together(transport, "begin")
        if s.save is not None:
            holder = said(self._folder)
            self._run, self._name = holder.run, holder.name

    def before(self, step: int) -> None:
        """Ahead of a step, which is the last one if somebody has left word: rank 0 looks, and tells."""
        if self._board is not None and self.rank == 0 and (self._folder / STOP).exists():
            self._board.set(STOP, str(step))

    def after(self, done: int, steps: int, transport: Transport) -> bool:
        """Behind a step: save if it is time to. Whether this was the last one.

        What rank 0 tells ahead of a step all ranks see behind it: nobody ends a step that rank 0 has not begun, as
        every rank's backward needs all stages. It tells once: word of a later step is of the next.

        Raises PiperError (io): it cannot be written.
        """
        board = self._board
        if self._behind is not None and self._behind.error is not None:
            self.progress.op(-1, f"save {step_name(self._behind.done)}")
            raise self._failed(self._behind.done, self._behind.error)
        asked = board is not None and board.check([STOP]) and int(board.get(STOP)) == done - 1
        if self.saving.due(done, done if asked else steps):
            self._save(done, transport)
        if asked and self.rank == 0:
            (self._folder / STOP).unlink(missing_ok=True)
        return asked or done == steps

    def _save(self, done: int, transport: Transport) -> None:
        name, tick = step_name(done), self.progress.go_on
        self.settle(transport)
        if self.saved == str(self._folder / name):
            return  # a loop of the user's asks again: rank 0 may still be at it, with the same files
        self.progress.op(-1, f"save {name}")
        if self.prepared.job.run.save_behind:
            self._behind = _CheckpointBehind(self, done, _copied(self._mine()))
            return
        try:
            self._write(done, self._mine(), tick)
            self._together(transport, f"save {name}")
            if self.rank == 0:
                self.progress.op(-1, f"save {name}")
                self._finish(done, tick)
        except OSError as error:
            raise self._failed(done, error) from error
        self.saved = str(self._folder / name)

    def settle(self, transport: Transport) -> None:
        """What is written behind the steps is complete. All ranks together. Raises PiperError (io): it cannot be."""
        if (behind := self._behind) is None:
            return
        name, told = step_name(behind.done), -1
        while behind.is_alive():
            if behind.waits:
                self.progress.wait(text=f"save {name}")
            elif behind.ticks != told:
                self.progress.op(-1, f"save {name}")
            told = behind.ticks
            behind.join(LOOK_S)
        if behind.error is not None:
            raise self._failed(behind.done, behind.error)
        self._together(transport, f"save {name}")
        self.saved, self._behind = str(self._folder / name), None

    def _failed(self, done: int, error: Exception) -> PiperError:
        complete = self.saved == str(self._folder / step_name(done))
        what = f"{step_name(done)} is saved, an older one cannot go" if complete else f"cannot save {step_name(done)}"
        message = f"{what}: {getattr(error, 'strerror', None) or error}"
        last = self.saved or self.saving.resume
        last = last if last is not None and (Path(last) / MANIFEST).exists() else "no checkpoint"
        full = getattr(error, "errno", None) in FULL
        fix = f"{'make room' if full else 'a folder that stays, and can be written to'}; {last} is complete"
        file = str(getattr(error, "filename", None) or self.saving.save)
        return PiperError(ErrorKind.IO, message, file=file, suggestion=fix)

    def close(self, transport: Transport) -> None:
        """Let go of the folder, all ranks together, behind what is still being written."""
        self.settle(transport)
        if self._lock is not None:
            self._lock.free()

    def _together(self, transport: Transport, text: str) -> None:
        self.progress.wait(text=text)
        transport.barrier()

    # -- saving -------------------------------------------------------------------------------------------------------

    def _write(self, done: int, mine: Held, tick: Tick) -> None:
        folder, parts = part_of(self._folder, done, self._name), []
        folder.mkdir(exist_ok=True)
        for number, held in enumerate(in_files(mine.items(), FILE_BYTES)):
            tensors = {f"{s}/{n}": flat.view(p.shape) for n, (p, slots) in held.items() for s, flat in slots.items()}
            file = file_of(self.rank, number)
            found = write_tensors(folder / file, tensors, tick)
            parts.append(RankManifest(file, found, {name: piece for name, (piece, _) in held.items()}))
        note = _note(folder, self.rank)
        note.with_suffix(".part").write_bytes(msgspec.json.encode(parts))
        note.with_suffix(".part").rename(note)

    def _mine(self) -> Held:
        mine = written(self.plan.graph, self.places, self.rank)
        out: Held = {}
        for n, first, slots in (x for x in self.sync.kept() if x[0] in mine):
            if n in out:  # the device's part of it, before the host's
                piece, own = out[n]
                first, slots = piece.first, {s: torch.cat([own[s].cpu(), host]) for s, host in slots.items()}
            out[n] = ShardPiece(self.shares[n], first, len(slots[WEIGHT])), slots
        return out

    def _notes(self, done: int) -> list[Path]:
        return [_note(part_of(self._folder, done, self._name), r) for r in range(self.places.ranks)]

    def _finish(self, done: int, tick: Tick) -> None:
        """Rank 0: add the manifest to what all ranks have written, and give it its name."""
        if self._lock is not None:
            self._lock.check()
        folder, notes = part_of(self._folder, done, self._name), self._notes(done)
        parts = [part for note in notes for part in msgspec.json.decode(note.read_bytes(), type=list[RankManifest])]
        with (folder / MANIFEST).open("xb") as file:
            file.write(self._manifest(done, parts).text())
            file.flush()
            os.fsync(file.fileno())
        for note in notes:
            note.unlink()
        self.saved = str(publish(folder, done, tick))
        prune(self._folder, self._run, done, self.saving.keep or KEPT, force=self.saving.force, tick=tick)

    def _manifest(self, done: int, parts: list[RankManifest]) -> CheckpointManifest:
        training, pieces = training_of(self.prepared), stored(parts)
        job = plain_table(self.prepared.job)
        job["schedule"] = {**job["schedule"], "name": self.prepared.schedule}
        job["schedule"].pop("directives", None)  # a file that is gone after the run
        if config := config_file(self.prepared.job):
            job["config.json"] = config  # for the Hub
        assert (gap := uncovered(training.shapes, pieces)) is None, gap
        return CheckpointManifest(
            schema_version=VERSION,
            run=self._run,
            step=done,
            tokens=done * training.sequences * training.length,
            training=training,
            model_digest=training.digest,
            job=job,
            job_digest=hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest(),
            plan_digest=plan_digest(self.plan),
            ranks=self.places.ranks,
            files={part.file: part.written for part in parts},
            parameters=pieces,
        )

    # -- loading ------------------------------------------------------------------------------------------------------

    def _load(self, folder: Path, transport: Transport) -> None:
        """Everything this rank holds, from wherever it lies."""
        self.progress.op(-1, f"load {folder.name}")
        manifest = read_manifest(folder)
        if not self.saving.verified:
            mine = sorted(manifest.files)[self.rank :: self.places.ranks]
            with saving_to(self.saving.save):
                verify(folder, manifest, mine, self.progress.go_on)
            self._together(transport, f"load {folder.name}")
            self.progress.op(-1, f"load {folder.name}")
        reader, params = CheckpointReader(folder, manifest, self.progress.go_on), self.sync.weights()
        for name, (first, flat) in params.items():
            reader.read(WEIGHT, name, ShardPiece(self.shares[name], first, len(flat)), flat)
        for name, first, slots in self.sync.kept():
            for slot, flat in slots.items():
                if slot != WEIGHT or not _one(flat, params[name][1]):
                    reader.read(slot, name, ShardPiece(self.shares[name], first, len(flat)), flat)
        self.sync.optimizer.resume(manifest.step)


def _one(a: Tensor, b: Tensor) -> bool:
    """Whether they lie in the same memory: the weight that is updated is the parameter itself."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _note(folder: Path, rank: int) -> Path:
    return folder / f"{file_of(rank)}.json"


def _copied(held: Held) -> Held:
    """As it stands now, on the host: steps go on."""
    return {n: (p, {s: flat.detach().to("cpu", copy=True) for s, flat in of.items()}) for n, (p, of) in held.items()}


class _CheckpointBehind(threading.Thread):
    """A save while steps go on: the same files in the same order, from copies. ticks: how far it is. waits: for other
    ranks' files, which rank 0 sees appear. error: why it has ended early.
    """

    def __init__(self, keeper: RankCheckpoint, done: int, mine: Held) -> None:
        super().__init__(name="save", daemon=True)
        self.keeper, self.done, self.mine = keeper, done, mine
        self.ticks, self.waits = 0, False
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        keeper = self.keeper
        try:
            keeper._write(self.done, self.mine, self._tick)
            self.mine = {}
            if keeper.rank == 0:
                self.waits = True
                while not all(note.exists() for note in keeper._notes(self.done)):
                    time.sleep(LOOK_S)
                self.waits = False
                keeper._finish(self.done, self._tick)
        except Exception as error:  # told by `settle`, or behind the next step
            self.error = error

    def _tick(self) -> None:
        self.ticks += 1
