"""The file `model.json`: its version, its fields, and the strict reading of it. Bytes, FLOPs, shapes; no code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NoReturn, TypeVar

from ir.core.errors import ErrorKind, PiperError, nearest
from ir.core.work import DType, Kernel, KernelKind, Work
from ir.workload.config.load import read_json

FORMAT, VERSION = "piper-sim/model", 1
FORMATS = tuple(str(d) for d in DType)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CapturedPass:
    """Kernels of one pass, and bytes alive only while it runs."""

    kernels: Work
    workspace: int


@dataclass(frozen=True, slots=True)
class CapturedPart:
    """What equal chunks do and keep. reads_input_again: the pass that reads the input last, "" if forward only."""

    out_bytes: int
    reads_input_again: str
    until_i: int
    until_w: int
    constants: int
    stash: int
    forward: CapturedPass
    input_grad: CapturedPass
    weight_grad: CapturedPass


@dataclass(frozen=True, slots=True)
class CapturedChunk:
    """One chunk: embed, l0, l1, …, head. part: the key of its numbers. parameters: (global name, shape)."""

    name: str
    part: str
    parameters: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def is_layer(self) -> bool:
        """Whether it was annotated "PP"."""
        return self.name[0] == "l" and self.name[1:].isdigit()


@dataclass(frozen=True, slots=True)
class Captured:
    """The whole file. hidden: features per token at every seam; boundary_bytes: of the tensor that crosses it."""

    model: str
    microbatch_size: int
    seq_len: int
    dtype: str
    hidden: int
    vocab: int
    chunks: tuple[CapturedChunk, ...]
    parts: Mapping[str, CapturedPart]
    digest: str

    @property
    def boundary_bytes(self) -> int:
        """Bytes of what one chunk hands to the next."""
        return self.microbatch_size * self.seq_len * self.hidden * DType(self.dtype).bytes


def read_captured(path: Path) -> Captured:
    """Read and check. Raises PiperError naming the file and the key."""
    at = _At(str(path), "", read_json(path))
    if at.get("format", str) != FORMAT or at.get("version", int) != VERSION:
        said = f"{at.value.get('format')!r}, version {at.value.get('version')!r}"
        at.fail(f"{said} is not a captured model", f"{FORMAT}, version {VERSION}", "capture it again")
    at.only("format version model microbatch_size seq_len dtype hidden vocab chunks parts")
    named = at.get("parts", dict)
    parts = {name: _part(at.inside("parts", named).inside(name, named[name])) for name in named}
    listed = at.get("chunks", list)
    chunks = tuple(_chunk(at.inside(f"chunks[{i}]", c), parts) for i, c in enumerate(listed))
    _check_chunks(at, chunks)
    digest = hashlib.sha256(json.dumps(at.value, sort_keys=True).encode()).hexdigest()
    return Captured(
        at.get("model", str),
        at.size("microbatch_size", 1),
        at.size("seq_len", 1),
        at.one_of("dtype", FORMATS),
        at.size("hidden", 1),
        at.size("vocab", 1),
        chunks,
        parts,
        digest,
    )


@dataclass(frozen=True)
class _At:
    """A place in the file, for reading values and for errors that name it."""

    file: str
    key: str
    value: dict[str, object]

    def fail(self, message: str, allowed: str | Sequence[str], fix: str | None = None, key: str = "") -> NoReturn:
        where = ".".join(k for k in (self.key, key) if k) or None
        raise PiperError(ErrorKind.MODEL, message, file=self.file, key=where, allowed=allowed, suggestion=fix)

    def get(self, key: str, kind: type[T]) -> T:
        if key not in self.value:
            self.fail("missing", f"a {_NAMES[kind]}", "capture it again", key)
        found = self.value[key]
        if not isinstance(found, kind) or isinstance(found, bool):
            self.fail(f"{found!r} is not a {_NAMES[kind]}", f"a {_NAMES[kind]}", None, key)
        return found

    def size(self, key: str, least: int = 0) -> int:
        found = self.get(key, int)
        if not least <= found < 10**18:
            self.fail(f"{found} is out of range", f"{least} or more", str(least), key)
        return found

    def one_of(self, key: str, allowed: Sequence[str]) -> str:
        found = self.get(key, str)
        if found not in allowed:
            self.fail(f"unknown {found!r}", allowed, nearest(found, [a for a in allowed if a]), key)
        return found

    def only(self, keys: str) -> None:
        for key in self.value:
            if key not in keys.split():
                self.fail("unknown key", keys.split(), nearest(key, keys.split()), key)

    def inside(self, key: str, value: object) -> _At:
        where = f"{self.key}.{key}" if self.key else key
        if not isinstance(value, dict):
            raise PiperError(ErrorKind.MODEL, f"{value!r} is not an object", file=self.file, key=where)
        return _At(self.file, where, value)


_NAMES: Mapping[type, str] = {str: "string", int: "whole number", list: "list", dict: "table"}


def _chunk(at: _At, parts: Mapping[str, CapturedPart]) -> CapturedChunk:
    at.only("name part parameters")
    made = []
    for i, pair in enumerate(at.get("parameters", list)):
        if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)):
            at.fail(f"{pair!r} is not a parameter", '["name", [sizes]]', None, f"parameters[{i}]")
        made.append((pair[0], _sizes(at, pair[1], f"parameters[{i}]")))
    return CapturedChunk(at.get("name", str), at.one_of("part", list(parts)), tuple(made))


def _sizes(at: _At, value: object, key: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(n) is int and 0 <= n < 10**15 for n in value):
        at.fail(f"{value!r} is not a shape", "a list of whole numbers", None, key)
    return tuple(value)


def _check_chunks(at: _At, chunks: tuple[CapturedChunk, ...]) -> None:
    names = [c.name for c in chunks]
    layers = [n for n, c in zip(names, chunks, strict=True) if c.is_layer]
    wanted = [f"l{i}" for i in range(len(layers))]
    if not layers or names != [*(["embed"] * ("embed" in names)), *wanted, *(["head"] * ("head" in names))]:
        allowed = "embed (or none), l0, l1, …, head (or none)"
        at.fail(f"chunks {', '.join(names)}", allowed, "capture it again", "chunks")
    shapes: dict[str, tuple[int, ...]] = {}
    for chunk in chunks:
        for name, shape in chunk.parameters:
            if shapes.setdefault(name, shape) != shape:
                at.fail(f"{name} has two shapes, {shapes[name]} and {shape}", "one", "capture it again", "chunks")


def _part(at: _At) -> CapturedPart:
    at.only("output_bytes reads_input_again saved_bytes stash_bytes passes")
    saved = at.inside("saved_bytes", at.get("saved_bytes", dict))
    saved.only("until_I until_W constants")
    passes = at.inside("passes", at.get("passes", dict))
    passes.only("F I W")
    f, i, w = (_pass(passes.inside(name, passes.get(name, dict))) for name in "FIW")
    return CapturedPart(
        at.size("output_bytes"),
        at.one_of("reads_input_again", ("", "I", "W")),
        saved.size("until_I"),
        saved.size("until_W"),
        saved.size("constants"),
        at.size("stash_bytes"),
        f,
        i,
        w,
    )


def _pass(at: _At) -> CapturedPass:
    at.only("workspace_bytes kernels")
    kernels = at.get("kernels", list)
    made = tuple(_kernel(at.inside(f"kernels[{i}]", k)) for i, k in enumerate(kernels))
    return CapturedPass(made, at.size("workspace_bytes"))


def _kernel(at: _At) -> Kernel:
    at.only("op kind flops bytes dtype shape count")
    kind = KernelKind(at.one_of("kind", list(KernelKind)))
    shape, flops = _sizes(at, at.get("shape", list), "shape"), at.size("flops")
    if kind in (KernelKind.GEMM, KernelKind.GROUPED_GEMM):
        rank = 3 if kind is KernelKind.GEMM else 4
        if len(shape) != rank or flops != 2 * prod(shape):
            at.fail(f"{flops} FLOPs of {list(shape)}", f"{rank} sizes, and twice their product", "capture it again")
    elif kind is KernelKind.ATTENTION and len(shape) != 6:
        at.fail(f"{list(shape)}", "batch, heads, queries, keys, key width, value width", "capture it again", "shape")
    dtype = DType(at.one_of("dtype", FORMATS))
    return Kernel(kind, flops, at.size("bytes"), dtype, shape, at.get("op", str), at.size("count", 1))
