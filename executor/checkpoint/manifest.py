"""What a checkpoint is: the step, what it was trained on, and where every piece of every parameter lies."""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Annotated, Any

import msgspec

from executor.checkpoint.pieces import ShardPiece
from executor.checkpoint.tensors import FORM, MANIFEST, WRITTEN, CheckpointFile, damaged, digest_of
from executor.modules.base import TORCH
from ir.core.errors import PiperError
from ir.core.files import check_regular, read_bytes, resolve_types
from ir.core.work import DType

VERSION = 1
BUFFERS = "buffers beside the weights"  # of what a module was given, a digest
THREADS = 4  # files read at once
Count = Annotated[int, msgspec.Meta(ge=0)]
Shapes = dict[str, tuple[Count, ...]]
_FILE = re.compile(r"rank-\d{5,}(-\d{4,})?\.safetensors")


def file_of(rank: int, number: int = 0) -> str:
    """A file that a rank writes; most need one.

    >>> file_of(3), file_of(3, 1)
    ('rank-00003.safetensors', 'rank-00003-0001.safetensors')
    """
    return f"rank-{rank:05d}{f'-{number:04d}' if number else ''}.safetensors"


@dataclass(frozen=True, slots=True)
class CheckpointTraining:
    """What must be the same for a checkpoint to be taken up again, under whatever plan."""

    shapes: Shapes  # of all parameters, by global name, in canonical order
    format: DType  # of the values that are updated (master weights, where parameters are narrower) and of moments
    optimizer: str
    slots: tuple[str, ...]  # what there is of each parameter; under Muon, of a matrix or of all else
    sequences: Count  # in a step's global batch
    length: Count  # tokens of a sequence
    tokens: Count  # in the data's file, 0 for synthetic ones
    seed: int  # of the data
    model: dict[str, Any]  # what shapes do not say
    data: str = ""  # a digest of the data's file; before windows had the order they have now, none

    @property
    def digest(self) -> str:
        """SHA-256 of names, shapes and format."""
        return hashlib.sha256(msgspec.json.encode([list(self.shapes.items()), self.format])).hexdigest()


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A piece of a parameter, and the file it lies in, under the parameter's name there."""

    file: str
    piece: ShardPiece


@dataclass(frozen=True, slots=True)
class RankManifest:
    """One file, as the rank that wrote it knows it."""

    file: str
    written: CheckpointFile
    pieces: dict[str, ShardPiece]


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """A complete checkpoint. job, its digest, the plan's and the ranks: whence it came, for people, and for who resumes
    under the very same plan."""

    schema_version: int
    run: str  # one name for all runs that resumed one from the other in one folder
    step: Count  # steps done
    tokens: Count  # read in them
    training: CheckpointTraining
    model_digest: str  # of names, shapes and format
    job: dict[str, dict[str, Any]]
    job_digest: str
    plan_digest: str
    ranks: Count
    files: dict[str, CheckpointFile]
    parameters: dict[str, tuple[StoredShard, ...]]
    sha256: str = ""  # of all this, laid out without it

    @property
    def own_digest(self) -> str:
        """SHA-256 of everything else."""
        return hashlib.sha256(msgspec.json.encode(replace(self, sha256=""))).hexdigest()

    def text(self) -> bytes:
        """As it stands in its file."""
        return msgspec.json.format(msgspec.json.encode(replace(self, sha256=self.own_digest)), indent=1) + b"\n"


def stored(parts: Iterable[RankManifest]) -> dict[str, tuple[StoredShard, ...]]:
    """By parameter, where its pieces lie."""
    out: dict[str, list[StoredShard]] = {}
    for part in parts:
        for name, piece in part.pieces.items():
            out.setdefault(name, []).append(StoredShard(part.file, piece))
    return {name: tuple(found) for name, found in out.items()}


resolve_types(CheckpointManifest, RankManifest)


def read_manifest(folder: Path) -> CheckpointManifest:
    """The manifest of a checkpoint's folder. Raises PiperError (io): it cannot be read, or is not what was written."""
    file = folder / MANIFEST
    try:
        raw = read_bytes(file, replace(FORM, most=2**31))
    except PiperError as error:
        raise damaged(file, error.message, error.allowed or WRITTEN) from error
    try:
        raw.decode("utf-8")  # what is no text is told by Python, in its words of every version
        version = msgspec.json.decode(raw, type=dict[str, Any])["schema_version"]
        if version != VERSION:
            raise damaged(file, f"a checkpoint of version {version}", str(VERSION))
        found = msgspec.json.decode(raw, type=CheckpointManifest)
        if found.sha256 != found.own_digest:
            raise damaged(file, "somebody has changed it: its own SHA-256 is another")
    except (ValueError, KeyError, RecursionError) as error:
        said, _, at = str(error).partition(" - at ")
        raise damaged(file, f"not a manifest, or not all of one: {said}", at=at.strip("`$.")) from error
    if flaw := _flaw(found):
        raise damaged(file, flaw)
    return found


def _flaw(m: CheckpointManifest) -> str | None:
    """What cannot be so in a manifest whose digest is right: whoever wrote it wrote that, too."""
    if odd := next((name for name in m.files if not _FILE.fullmatch(name)), None):
        return f"{odd!r} is no name of a file in a checkpoint, as {file_of(0)!r} is"
    if m.training.format not in TORCH:
        return f"{m.training.format} is no format of updates"
    for name, places in m.parameters.items():
        for at in places:
            if at.file not in m.files or at.piece.share.shape != m.training.shapes.get(name) or not at.piece.possible:
                return f"there can be no such piece of {name} in {at.file!r}"
    each = len(m.training.slots) if m.training.optimizer != "muon" else 2  # a matrix has one moment, all else two
    size = sum(prod(shape) for shape in m.training.shapes.values()) * each * m.training.format.bytes
    if size > sum(written.bytes for written in m.files.values()):
        return f"{size} bytes of values are more than what its files have"
    return uncovered(m.training.shapes, m.parameters)


def uncovered(shapes: Mapping[str, tuple[int, ...]], parameters: Mapping[str, tuple[StoredShard, ...]]) -> str | None:
    """The first parameter of which not every element is in one piece, in words."""
    for name, shape in shapes.items():
        count = sum(s.piece.count for s in parameters.get(name, ()))
        if count != prod(shape):
            return f"{count} of {prod(shape)} elements of {name} were written"
    return None


def check_files(folder: Path, manifest: CheckpointManifest) -> None:
    """Raise PiperError (io) where a file is missing or has another size; what is in them, `verify` says."""
    for name, written in manifest.files.items():
        try:
            check_regular(folder / name, FORM)
        except PiperError as error:
            raise damaged(folder / name, f"the checkpoint lacks it: {error.message}") from error
        size = (folder / name).stat().st_size
        if size != written.bytes:
            raise damaged(folder / name, f"{size} bytes, {written.bytes} were written")


def verify(
    folder: Path, manifest: CheckpointManifest, names: Iterable[str], tick: Callable[[], None] = lambda: None
) -> None:
    """Read files of a checkpoint in full, several at once. Raises PiperError (io): one is not what was written.

    tick: called every 16 MiB.
    """

    def check(name: str) -> None:
        try:
            found = digest_of(folder / name, tick)
        except OSError as error:
            raise damaged(folder / name, f"damaged: {error.strerror}") from error
        if found != manifest.files[name]:
            raise damaged(folder / name, "damaged: its SHA-256 is not the one in the manifest")

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(check, sorted(names)))
