"""Values of a checkpoint by name: any piece of any parameter, put together from wherever its elements lie."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from executor.checkpoint.manifest import Manifest
from executor.checkpoint.pieces import Piece
from executor.checkpoint.tensors import TensorFile, raw
from executor.modules.base import TORCH
from ir.core.errors import ErrorKind, PiperError
from ir.core.work import DType

RANDOM = "random/"  # states of random number generators, one file for each rank


class Reader:
    """The files of a checkpoint, each opened when something in it is needed."""

    def __init__(self, folder: Path, manifest: Manifest, tick: Callable[[], None] = lambda: None) -> None:
        self.folder, self.manifest, self.tick = folder, manifest, tick
        self._files: dict[str, TensorFile] = {}

    def read(self, slot: str, name: str, piece: Piece, into: Tensor) -> None:
        """Fill a flat tensor, of any format, with a piece. Raises PiperError (io): not all of it is there."""
        found = into if into.device.type == "cpu" else torch.empty_like(into, device="cpu")
        missing = piece.count
        for stored in self.manifest.parameters.get(name, ()):
            source = None
            for at, start, count in piece.shared(stored.piece):
                source = self._file(stored.file).flat(f"{slot}/{name}") if source is None else source
                found[at : at + count].copy_(source[start : start + count])
                missing -= count
            self.tick()
        if missing:
            message = f"{missing} elements of {slot}/{name} are in none of its files"
            fix = "another checkpoint"
            raise PiperError(ErrorKind.IO, message, file=str(self.folder), key="--resume", suggestion=fix)
        if found is not into:
            into.copy_(found)

    def states(self, file: str) -> dict[str, Tensor]:
        """The random number generators of the rank that wrote a file, by device."""
        names = [n for n in self._file(file).names if n.startswith(RANDOM)]
        return {n.removeprefix(RANDOM): self._file(file).flat(n).clone() for n in names}

    def whole(self, slot: str, name: str) -> Tensor:
        """A whole parameter, or a moment of it."""
        training = self.manifest.training
        piece = Piece.whole(training.shapes[name])
        out = torch.empty(piece.count, dtype=TORCH[DType(training.format)], device="cpu")
        self.read(slot, name, piece, out)
        return out.view(piece.share.shape)

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            self._files[name] = TensorFile(self.folder / name)
        return self._files[name]


def digests(folder: Path, manifest: Manifest) -> dict[str, str]:
    """`slot/name` → SHA-256 of all its elements in order: equal for equal values, whatever plan saved them."""
    reader = Reader(folder, manifest)
    return {
        f"{slot}/{name}": hashlib.sha256(raw(reader.whole(slot, name).view(-1))).hexdigest()
        for name in manifest.training.shapes
        for slot in manifest.training.slots
    }
