"""Tensor files in the safetensors format: written as one stream that is hashed on its way, read through a map.

The format is a length, a JSON header and raw bytes. Written here rather than by its library because a piece that lies
on a GPU is brought over one stretch at a time, no second pass is needed for the hash, what is written reaches the disk
while the rest is being written, and a watchdog hears of it. The library reads these files, and a test holds us to it.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ir.core.errors import ErrorKind, PiperError

FORMATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U8": torch.uint8,
}
NAMES = {dtype: name for name, dtype in FORMATS.items()}
STRETCH = 2**24  # bytes between two signs of life
DURABLE = 2**26  # bytes between two waits for the disk, so that none of them is long


@dataclass(frozen=True, slots=True)
class Written:
    """What a file must be for its reader to believe it."""

    bytes: int
    sha256: str


class _Pen:
    """Bytes to a new file and to its hash."""

    def __init__(self, fd: int, tick: Callable[[], None]) -> None:
        self.fd, self.tick, self.hash, self.bytes, self.waiting = fd, tick, hashlib.sha256(), 0, 0

    def put(self, data: memoryview) -> None:
        """Write all of it."""
        self.hash.update(data)
        while data:
            done = os.write(self.fd, data)
            self.bytes, self.waiting, data = self.bytes + done, self.waiting + done, data[done:]
        if self.waiting >= DURABLE:
            os.fdatasync(self.fd)
            self.waiting = 0
        self.tick()


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], said: Mapping[str, str], tick: Callable[[], None] = lambda: None
) -> Written:
    """Write a new file, down to the disk. said: the header's free text. tick: called every 16 MiB.

    Raises OSError; what was written of the file is gone then, so that there is room again.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        pen = _Pen(fd, tick)
        pen.put(memoryview(_header(tensors, said)))
        for tensor in tensors.values():
            flat = tensor.detach().reshape(-1)
            step = STRETCH // flat.element_size()
            for at in range(0, flat.numel(), step):
                pen.put(raw(flat[at : at + step].cpu()))
        os.fsync(fd)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    return Written(pen.bytes, pen.hash.hexdigest())


def raw(flat: Tensor) -> memoryview:
    """A flat tensor's bytes, where they lie."""
    found: Any = flat.view(torch.uint8).numpy()
    return memoryview(found)


def _header(tensors: Mapping[str, Tensor], said: Mapping[str, str]) -> bytes:
    out: dict[str, Any] = {"__metadata__": dict(said)}
    end = 0
    for name, t in tensors.items():
        first, end = end, end + t.nbytes
        out[name] = {"dtype": NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [first, end]}
    text = json.dumps(out, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class TensorFile:
    """The tensors of a file, as views of its map: read where they are copied from, and not before."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._start = 8 + int.from_bytes(self._map[:8], "little")
            if not 8 < self._start <= len(self._map):
                raise ValueError("its header does not end")
            self._header: dict[str, Any] = dict(json.loads(self._map[8 : self._start]))
        except (OSError, ValueError, TypeError) as error:
            raise self._wrong(str(getattr(error, "strerror", None) or error)) from error

    @property
    def names(self) -> tuple[str, ...]:
        """Of its tensors."""
        return tuple(n for n in self._header if n != "__metadata__")

    def flat(self, name: str) -> Tensor:
        """All elements of a tensor. Raises PiperError: it is not there, or not whole."""
        try:
            entry = self._header[name]
            dtype, count = FORMATS[entry["dtype"]], prod(entry["shape"])
            first, end = (int(x) + self._start for x in entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise self._wrong(f"no tensor {name}, or one that is not understood") from error
        if end - first != count * dtype.itemsize or not self._start <= first <= end <= len(self._map):
            raise self._wrong(f"{name} does not lie in it as its header says")
        if not count:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=first)

    def _wrong(self, why: str) -> PiperError:
        fix = "a checkpoint that nobody has changed"
        return PiperError(ErrorKind.IO, f"cannot read tensors: {why}", file=str(self.path), suggestion=fix)


def digest_of(path: Path, tick: Callable[[], None] = lambda: None) -> Written:
    """A file as it stands. Raises OSError."""
    found, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while data := file.read(STRETCH):
            found.update(data)
            size += len(data)
            tick()
    return Written(size, found.hexdigest())
