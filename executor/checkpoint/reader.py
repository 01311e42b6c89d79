"""Values of a checkpoint by name: any piece of any parameter, put together from wherever its elements lie."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from executor.checkpoint.manifest import CheckpointManifest, StoredShard
from executor.checkpoint.pieces import ShardPiece
from executor.checkpoint.tensors import MANIFEST, CheckpointTensors, damaged
from executor.modules.base import TORCH
from executor.optim.optimizer import MOMENT, WEIGHT


class CheckpointReader:
    """The files of a checkpoint, each opened when something in it is needed."""

    def __init__(self, folder: Path, manifest: CheckpointManifest, tick: Callable[[], None] = lambda: None) -> None:
        self.folder, self.manifest, self.tick = folder, manifest, tick
        self._files: dict[str, CheckpointTensors] = {}

    def read(self, slot: str, name: str, piece: ShardPiece, into: Tensor) -> None:
        """Fill a flat tensor, of any format, with a piece. Raises PiperError (io): not all of it is there, or twice."""
        out = into if into.device.type == "cpu" else torch.empty_like(into, device="cpu")
        found = 0
        for stored in self.manifest.parameters.get(name, ()):
            common = list(piece.shared(stored.piece))
            source = self._values(slot, name, stored) if common else out
            for at, start, count in common:
                out[at : at + count].copy_(source[start : start + count])
                found += count
            self.tick()
        if found != piece.count:
            message = f"its files have {found} elements of {slot}/{name} where {piece.count} are needed"
            raise damaged(self.folder / MANIFEST, message)
        if out is not into:
            into.copy_(out)

    def whole(self, slot: str, name: str) -> Tensor:
        """A whole parameter, or a moment of it. Raises PiperError (io), as `read` does."""
        training = self.manifest.training
        piece = ShardPiece.whole(training.shapes[name])
        out = torch.empty(piece.count, dtype=TORCH[training.format], device="cpu")
        self.read(slot, name, piece, out)
        return out.view(piece.share.shape)

    def slots(self, name: str) -> tuple[str, ...]:
        """What there is of a parameter: of Muon's, a matrix has one moment, all else two others."""
        slots, parts = self.manifest.training.slots, self.manifest.parameters.get(name, ())
        if MOMENT not in slots or not parts:  # of a parameter without elements there is no piece
            return slots
        matrix = f"{MOMENT}/{name}" in self._file(parts[0].file).names
        return tuple(s for s in slots if s == WEIGHT or (s == MOMENT) is matrix)

    def _values(self, slot: str, name: str, stored: StoredShard) -> Tensor:
        found = self._file(stored.file).flat(f"{slot}/{name}")
        if len(found) != stored.piece.count:
            message = f"{len(found)} elements of {slot}/{name}, {stored.piece.count} were written"
            raise damaged(self.folder / stored.file, message)
        return found

    def _file(self, name: str) -> CheckpointTensors:
        if name not in self._files:
            self._files[name] = CheckpointTensors(self.folder / name)
        return self._files[name]


def digests(folder: Path, manifest: CheckpointManifest) -> dict[str, str]:
    """`slot/name` → SHA-256 of all its elements in order: equal for equal values, whatever plan saved them.

    Raises PiperError (io), as `CheckpointReader.read` does.
    """
    reader, out = CheckpointReader(folder, manifest), {}
    for name in manifest.training.shapes:
        for slot in reader.slots(name):
            values = reader.whole(slot, name).view(-1).view(torch.uint8).numpy()
            out[f"{slot}/{name}"] = hashlib.sha256(values.data).hexdigest()
    return out
