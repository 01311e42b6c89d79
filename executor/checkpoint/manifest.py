"""What a checkpoint is: the step, what it was trained on, and where every piece of every parameter lies."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from executor.checkpoint.pieces import Piece
from executor.checkpoint.tensors import Written
from ir.core.errors import ErrorKind, PiperError

VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Training:
    """What must be the same for a checkpoint to be taken up again, under whatever plan.

    shapes: of all parameters, by global name, in canonical order. format: of the values that are updated (master
    weights, where parameters are narrower) and of moments. slots: what there is of each parameter. sequences, length:
    of a step's global batch. tokens: in the data's file, 0 for synthetic ones. model: what shapes do not say.
    """

    shapes: dict[str, tuple[int, ...]]
    format: str
    optimizer: str
    slots: tuple[str, ...]
    sequences: int
    length: int
    tokens: int
    seed: int
    model: dict[str, Any]

    @property
    def digest(self) -> str:
        """SHA-256 of names, shapes and format."""
        return hashlib.sha256(msgspec.json.encode([list(self.shapes.items()), self.format])).hexdigest()


@dataclass(frozen=True, slots=True)
class Stored:
    """A piece of a parameter, and the file it lies in, under the parameter's name there."""

    file: str
    piece: Piece


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank has written."""

    file: str
    written: Written
    pieces: dict[str, Piece]


@dataclass(frozen=True, slots=True)
class Manifest:
    """A complete checkpoint. run: of those that one resumed from the other in one folder, one name. step: steps done;
    tokens: read in them.

    model_digest: of names, shapes and format. job, job_digest, plan_digest, ranks: whence it came, for people, and for
    who resumes under the very same plan. sha256: of all this, laid out without it.
    """

    schema_version: int
    run: str
    step: int
    tokens: int
    training: Training
    model_digest: str
    job: dict[str, Any]
    job_digest: str
    plan_digest: str
    ranks: int
    files: dict[str, Written]
    parameters: dict[str, tuple[Stored, ...]]
    sha256: str = ""

    @property
    def own_digest(self) -> str:
        """SHA-256 of everything else."""
        return hashlib.sha256(msgspec.json.encode(replace(self, sha256=""))).hexdigest()

    def text(self) -> bytes:
        """As it stands in its file."""
        return msgspec.json.format(msgspec.json.encode(replace(self, sha256=self.own_digest)), indent=1) + b"\n"


def stored(parts: list[Part]) -> dict[str, tuple[Stored, ...]]:
    """By parameter, where its pieces lie."""
    out: dict[str, list[Stored]] = {}
    for part in parts:
        for name, piece in part.pieces.items():
            out.setdefault(name, []).append(Stored(part.file, piece))
    return {name: tuple(found) for name, found in out.items()}


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint's folder. Raises PiperError: it cannot be read, or is not what was written."""
    file = folder / MANIFEST
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise _wrong(file, f"cannot read it: {error.strerror}") from error
    try:
        version = json.loads(raw)["schema_version"]
        if version != VERSION:
            raise _wrong(file, f"a checkpoint of version {version}", str(VERSION))
        found = msgspec.json.decode(raw, type=Manifest)
    except (ValueError, KeyError, TypeError, msgspec.DecodeError) as error:
        raise _wrong(file, f"not a manifest, or not all of one: {error}") from error
    if found.sha256 != found.own_digest:
        raise _wrong(file, "somebody has changed it: its own SHA-256 is another")
    return found


def check_files(folder: Path, manifest: Manifest) -> None:
    """Raise PiperError where a file is missing or has another size; what is in them, `verify` says."""
    for name, written in manifest.files.items():
        try:
            size = os.stat(folder / name).st_size
        except OSError as error:
            raise _wrong(folder / name, f"the checkpoint lacks it: {error.strerror}") from error
        if size != written.bytes:
            raise _wrong(folder / name, f"{size} bytes, {written.bytes} were written")


def wrong_hash(file: Path) -> PiperError:
    """A file that is not what was written."""
    return _wrong(file, "damaged: its SHA-256 is not the one in the manifest")


def _wrong(file: Path, message: str, allowed: str | None = None) -> PiperError:
    others = [p.parent for p in file.parent.parent.glob(f"step-*/{MANIFEST}") if p.parent != file.parent]
    newest = max(others, key=lambda p: (len(p.name), p.name), default=None)
    fix = "a copy of it that is whole" if newest is None else f"--resume {newest}"
    return PiperError(ErrorKind.IO, message, file=str(file), key="--resume", allowed=allowed, suggestion=fix)


def plain(value: Any) -> dict[str, Any]:
    """A dataclass, or a mapping, as JSON has it."""
    out: dict[str, Any] = json.loads(json.dumps(value, default=_plain))
    return out


def _plain(value: Any) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in fields(value)}
    return dict(value) if isinstance(value, Mapping) else sorted(value)
