"""The file `model.json`: its version, its fields, and the strict reading of it. Bytes, FLOPs, shapes; no code."""

import hashlib
import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Annotated, TypedDict

from msgspec import Meta, Struct

from ir.core.errors import ErrorKind
from ir.core.files import FileErrors, cut, read_json, typed, words
from ir.core.work import DType, Kernel, KernelKind, MessageKind, Work

FORMAT, VERSION = "piper-sim/model", 1
FORM = FileErrors("a captured model", ErrorKind.MODEL, "model.graph", fix="capture it again")
PIECES = ["router", "experts", "add"]
Bytes = Annotated[int, Meta(ge=0, le=10**18)]
Size = Annotated[int, Meta(ge=1, le=10**15)]
Length = Annotated[int, Meta(ge=0, le=10**15)]
Shape = tuple[Length, ...]


class ModelMesh(TypedDict, total=False):
    """Over which ranks a module is divided where it is captured. tp: those that share its linears, as tp_plan says, or
    without one the module's own. ep: those that share each layer's experts (tags["EP"]). cp: those that share the
    tokens of each sequence, of which the example has all; cp_comm: what attention sends for it, as `[parallel]` has it.
    sequence_parallel: between its linears tp's ranks share them, too.
    """

    tp: int
    tp_plan: Mapping[str, str] | None
    ep: int
    cp: int
    cp_comm: str
    sequence_parallel: bool


class _Kernel(Struct, frozen=True):
    """`kernels[…]`."""

    op: str
    kind: KernelKind
    flops: Bytes
    bytes: Bytes
    dtype: DType
    shape: Shape
    count: Size


class _Message(Struct, frozen=True):
    """`messages[…]`: what ranks that share a part's work exchange inside a pass, over which axis of theirs."""

    kind: MessageKind
    bytes: Bytes
    axis: Annotated[str, words("tp", "cp", said="axis")] = "tp"


class CapturedPass(Struct, frozen=True):
    """`passes.F` and the like: kernels, bytes alive only while they run, messages in their order."""

    workspace_bytes: Bytes
    kernels: tuple[_Kernel, ...]
    messages: tuple[_Message, ...] = ()

    @property
    def work(self) -> Work:
        """The kernels as those of a config."""
        return tuple(Kernel(k.kind, k.flops, k.bytes, k.dtype, k.shape, k.op, k.count) for k in self.kernels)


class _Passes(Struct, frozen=True):
    """`passes`."""

    F: CapturedPass
    I: CapturedPass
    W: CapturedPass


class _Saved(Struct, frozen=True):
    """`saved_bytes`."""

    until_I: Bytes
    until_W: Bytes
    constants: Bytes


class CapturedPart(Struct, frozen=True):
    """What equal chunks do and keep. reads_input_again: the pass that reads the input last, "" if forward only.
    model_flops: forward's, of all tensor-parallel ranks, each thing counted once; None: those of its kernels.
    written_out: attention in plain products stands there as one kernel, which stores no scores, as no run has it.
    """

    output_bytes: Bytes
    reads_input_again: Annotated[str, words("", "I", "W", said="pass")]
    saved_bytes: _Saved
    stash_bytes: Bytes
    passes: _Passes
    model_flops: Bytes | None = None
    written_out: bool = False


class CapturedExperts(Struct, frozen=True):
    """A layer's experts: how many, of how many ranks'; bytes of the rows that a rank sends with their weights, that
    come back, and of what the layer hands past them."""

    count: Size
    top_k: Size
    sent_bytes: Bytes
    back_bytes: Bytes
    past_bytes: Bytes


class CapturedLayerPart(Struct, frozen=True):
    """One part of a chunk. part: the key of its numbers. parameters: (global name, shape). frozen: those that are not
    trained, likewise."""

    name: str
    part: str
    parameters: tuple[tuple[str, Shape], ...]
    frozen: tuple[tuple[str, Shape], ...] = ()


class CapturedChunk(Struct, frozen=True):
    """One chunk: embed, l0, l1, …, head. part: the key of its numbers. parameters: (global name, shape); frozen: those
    that are not trained. A layer with experts has none of its own, but the pieces router, experts and add."""

    name: str
    part: str = ""
    parameters: tuple[tuple[str, Shape], ...] = ()
    pieces: tuple[CapturedLayerPart, ...] = ()
    experts: CapturedExperts | None = None
    frozen: tuple[tuple[str, Shape], ...] = ()

    @property
    def every(self) -> tuple[CapturedLayerPart, ...]:
        """Its parts, one of them where it has no pieces."""
        return self.pieces or (CapturedLayerPart(self.part, self.part, self.parameters, self.frozen),)

    @property
    def is_layer(self) -> bool:
        """Whether it was annotated "PP"."""
        return self.name[:1] == "l" and self.name[1:].isdigit()


class CapturedModelFile(Struct, frozen=True):
    """The whole file. hidden: features per token at every seam. tp: the ranks that it was divided over, ep: that
    its experts were; cut: along which dim by tp, by name of the parameter; partly: parameters of whose gradient each of
    these ranks has a part; sequence_parallel: that share tokens, too, between what is cut. cp: the ranks that share the
    tokens of each sequence; cp_heads: and attention's heads. tables: parameters whose rows are looked up (embeddings).
    """

    format: Annotated[str, words(FORMAT, said="format")]
    version: int
    model: str
    microbatch_size: Size
    seq_len: Size
    dtype: DType
    hidden: Size
    vocab: Size
    chunks: tuple[CapturedChunk, ...]
    parts: dict[str, CapturedPart]
    tp: Size = 1
    ep: Size = 1
    cut: dict[str, Length] = {}
    partly: tuple[str, ...] = ()
    cp: Size = 1
    cp_heads: bool = False
    sequence_parallel: bool = False
    compiled: bool = False
    tables: tuple[str, ...] | None = None

    @property
    def boundary_bytes(self) -> int:
        """Bytes of what one chunk hands to the next, on one rank."""
        tokens = self.seq_len // (self.cp * (self.tp if self.sequence_parallel else 1))
        return self.microbatch_size * tokens * self.hidden * self.dtype.bytes


def read_captured(path: Path) -> tuple[CapturedModelFile, str]:
    """The file, checked, and its digest. Raises PiperError (io, model) naming the file and the key."""
    file, raw = str(path), read_json(path, FORM)
    version = raw.get("version", VERSION) if isinstance(raw, dict) else VERSION
    if version != VERSION or isinstance(version, bool):
        raise FORM.wrong(f"version {cut(version)}", file, "version", str(VERSION), "capture it again")
    f = typed(raw, CapturedModelFile, FORM, file)
    for name, part in f.parts.items():
        for pass_ in ("F", "I", "W"):
            for i, k in enumerate(getattr(part.passes, pass_).kernels):
                _check_kernel(k, f"parts.{name}.passes.{pass_}.kernels[{i}]", file)
    _check_chunks(f, file)
    return f, hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()


def _check_chunks(f: CapturedModelFile, file: str) -> None:
    names = [c.name for c in f.chunks]
    layers = [n for n, c in zip(names, f.chunks, strict=True) if c.is_layer]
    wanted = [f"l{i}" for i in range(len(layers))]
    if not layers or names != [*(["embed"] * ("embed" in names)), *wanted, *(["head"] * ("head" in names))]:
        allowed = "embed (or none), l0, l1, …, head (or none)"
        raise FORM.wrong(f"chunks {', '.join(names)}"[:200], file, "chunks", allowed, FORM.fix)
    shapes: dict[str, tuple[int, ...]] = {}
    for i, chunk in enumerate(f.chunks):
        if unknown := [p.part for p in chunk.every if p.part not in f.parts]:
            allowed = ", ".join(f.parts) or "one of parts, of which there are none"
            raise FORM.wrong(f"unknown part {cut(unknown[0])}", file, f"chunks[{i}].part", allowed, FORM.fix)
        if (chunk.experts is not None) != bool(chunk.pieces) or [p.name for p in chunk.pieces] not in ([], PIECES):
            message = f"pieces {', '.join(p.name for p in chunk.pieces) or '(none)'}"[:200]
            allowed = f"{', '.join(PIECES)}, with experts beside them; or neither"
            raise FORM.wrong(message, file, f"chunks[{i}].pieces", allowed, FORM.fix)
        for name, shape in (x for p in chunk.every for x in (*p.parameters, *p.frozen)):
            if shapes.setdefault(name, shape) != shape:
                message = f"{cut(name)} has two shapes, {shapes[name]} and {shape}"
                raise FORM.wrong(message, file, f"chunks[{i}].parameters", "one", FORM.fix)
    every = [p for c in f.chunks for p in c.every]
    trained = {name for p in every for name, _ in p.parameters}
    if both := next((name for p in every for name, _ in p.frozen if name in trained), None):
        message, allowed = f"{cut(both)} is trained, and frozen", "a name under parameters, or under frozen"
        raise FORM.wrong(message, file, "chunks", allowed, FORM.fix)


def _check_kernel(k: _Kernel, at: str, file: str) -> None:
    rank = {KernelKind.GEMM: 3, KernelKind.GROUPED_GEMM: 4}.get(k.kind)
    if rank and (len(k.shape) != rank or k.flops != 2 * prod(k.shape)):
        message = f"{k.flops} FLOPs of {list(k.shape)}"
        raise FORM.wrong(message, file, at, f"{rank} sizes, and twice their product", FORM.fix)
    if k.kind is KernelKind.ATTENTION and len(k.shape) != 6:
        allowed = "batch, heads, queries, keys, key width, value width"
        raise FORM.wrong(f"{list(k.shape)}", file, f"{at}.shape", allowed, FORM.fix)
