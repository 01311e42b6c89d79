"""The types of a model graph: chunks of parts, and what one part costs and keeps on one device."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from math import prod
from typing import NamedTuple, Protocol

from ir.core.ops import Pass
from ir.core.work import DType, Message, Work

ENCODER = "encoder"  # as an input of a part: what the last layer of the encoder gives


CP_COMMS = "all_gather", "all_to_all"  # what attention sends over cp: all keys and values; heads, both ways


@dataclass(frozen=True, slots=True)
class PartLayout:
    """How a part is divided over devices: sizes of the mesh axes that shard it. `shard` directives change this.

    tp, cp shard dense parts (and the tokens, with sequence parallelism); ep, etp shard experts. cp_heads: inside of
    attention cp divides heads, of whole sequences, instead of queries (DeepSpeed's Ulysses, arXiv:2309.14509).
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False
    cp_heads: bool = False


@dataclass(frozen=True, slots=True)
class Param:
    """A logical parameter: its global name and shape, and the axes that shard it (the others replicate it).

    `expert` marks parameters that live on the expert view of the mesh (etp, ep, edp). A tie is one name in two parts.
    dims: the tensor dim that each axis of `sharded` cuts, axis by axis. blocks: sizes of the stretches of the dim cut
    by tp or etp that are cut one by one (fused q, k and v; gate and up); () for one. by_heads: whole on every device,
    but each applies it to its own attention heads, so its gradient is a sum over tp. table: its rows are looked up, or
    stand for words or heads: two dims, and no hidden matrix.
    """

    name: str
    shape: tuple[int, ...]
    sharded: tuple[str, ...] = ()
    expert: bool = False
    dims: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    by_heads: bool = False
    table: bool = False

    @property
    def numel(self) -> int:
        """Elements of the whole, unsharded parameter."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class SavedBuffer:
    """A tensor that forward keeps for backward, in bytes on one device.

    until: the pass that reads it last. recompute: the recompute options that drop it ("norm", "up_projection",
    "activation", "scores", "operators"), none if only a recompute of the whole part does. rebuild: the kernels that
    then make it again in I, in the order of `saved` (a later one may read an earlier one).
    """

    name: str
    bytes: int
    until: Pass = Pass.W
    recompute: tuple[str, ...] = ()
    rebuild: Work = ()


@dataclass(frozen=True, slots=True)
class KeptBuffer:
    """Backward's claim on an input of the part: the output of part `of` stays alive until pass `until`."""

    of: str
    until: Pass = Pass.W


@dataclass(frozen=True, slots=True)
class PartCollective:
    """A blocking communication inside a part (tensor or context parallel), by the pass it happens in."""

    when: Pass
    message: Message


@dataclass(frozen=True, slots=True)
class PartWork:
    """One part's work on one device for one microbatch, under a `PartLayout`.

    out_bytes: its output (what the next part reads); how long it lives is the readers' `keeps` to say.
    stash_bytes: output gradients that live from I to W. *_workspace: bytes alive only while the pass runs.
    model_flops: forward FLOPs that MFU counts, of one microbatch over *all* devices of the stage.
    out_grad_bytes: its output's gradient, which readers write, where it is not as large as the output; handed: likewise
    the gradient that I writes for its only input. None: as large.
    """

    forward: Work
    input_grad: Work
    weight_grad: Work
    out_bytes: int
    saved: tuple[SavedBuffer, ...] = ()
    stash_bytes: int = 0
    inline: tuple[PartCollective, ...] = ()
    forward_workspace: int = 0
    input_grad_workspace: int = 0
    weight_grad_workspace: int = 0
    model_flops: int = 0
    out_grad_bytes: int | None = None
    handed: int | None = None

    def ahead(self) -> "PartWork":
        """Of a part whose output nobody wants a gradient of."""
        inline = tuple(x for x in self.inline if x.when is Pass.F)
        head = (self.forward, (), (), self.out_bytes, (), 0, inline, self.forward_workspace)
        return PartWork(*head, model_flops=self.model_flops, out_grad_bytes=0)

    @property
    def gradient_bytes(self) -> int:
        """Of its output's gradient."""
        return self.out_bytes if self.out_grad_bytes is None else self.out_grad_bytes


class ExpertMessages(NamedTuple):
    """One layer's two all-to-alls in forward, and the bytes each leaves on a device.

    dispatch: tokens to their experts, every copy counted; combine: results back. Backward swaps them: combine's
    gradient travels as a dispatch (in its format), dispatch's gradient as a combine (arXiv:2412.19437, section 3.3.2).
    dispatched_bytes: rows a device's experts receive, balanced. combined_bytes: what combine leaves, one row per token:
    copies are summed on the way (DeepEP). counts: how many rows each rank sends to each expert, 64-bit numbers, which
    travel before the rows do.
    """

    counts: Message
    dispatch: Message
    combine: Message
    dispatched_bytes: int
    combined_bytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """A node-to-be of the model graph: attention, router, experts, mlp, norm, head, …

    name: unique in its chunk ("attn"). inputs: the parts it reads, "" standing for the chunk's own input, `ENCODER` for
    the encoder's output.
    keeps: which of these inputs backward reads again. borrowed: parameters of other parts, with which backward makes a
    norm's output again where that is not kept. frozen: parameters that it reads and nobody trains: every replica has
    them whole, in no bucket. The name picks the builder of its work.
    """

    name: str
    inputs: tuple[str, ...] = ("",)
    keeps: tuple[KeptBuffer, ...] = ()
    params: tuple[Param, ...] = ()
    borrowed: tuple[str, ...] = ()
    frozen: tuple[Param, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stretch of the model between two annotation seams: the embedding, one decoder layer, the head, an MTP module.

    name: "embed", "l0", "l1", …, "mtp0", "head". The chunk's output is the output of its last part, or of part `gives`
    where that is named; its input is the output of the chunk before it, or of chunk `reads` where that is named (head
    and MTP both read the last layer).
    encoder: the chunk whose output is the encoder's, where a part reads that.
    tags: what filters can name beside PP, MB and PASS, e.g. {"L": 7}.
    """

    name: str
    parts: tuple[Part, ...]
    tags: dict[str, int] = field(default_factory=dict)
    reads: str | None = None
    encoder: str = ""
    gives: str = ""

    @property
    def output(self) -> str:
        """The part whose output is the chunk's."""
        return self.gives or self.parts[-1].name


@dataclass(frozen=True, slots=True)
class PlacedPart:
    """A part of the model as the graph holds it: where it belongs, and how it is divided."""

    stage: int
    chunk: Chunk
    part: Part
    layout: PartLayout = field(default_factory=PartLayout)

    @property
    def name(self) -> str:
        """`l7.attn`."""
        return f"{self.chunk.name}.{self.part.name}"


def before_training(chunks: Iterable[Chunk]) -> frozenset[str]:
    """The chunks before the first that trains something, where they have frozen parameters: nobody asks for gradients
    of what they make, so they have no backward, and keep nothing for it.

    >>> whole = Part("block", params=(Param("w", (2,)),))
    >>> still = Part("block", frozen=(Param("v", (2,)),))
    >>> sorted(before_training([Chunk("embed", (still,)), Chunk("l0", (whole,)), Chunk("l1", (still,))]))
    ['embed']
    >>> before_training([Chunk("embed", (Part("embed"),)), Chunk("l0", (whole,))])
    frozenset()
    """
    first = tuple(takewhile(lambda c: not any(p.params for p in c.parts), chunks))
    return frozenset(c.name for c in first) if any(p.frozen for c in first for p in c.parts) else frozenset()


class ModelWork(Protocol):
    """Where a model graph's numbers come from, a config or a captured file; asked again after a layout has changed."""

    def work(self, entry: PlacedPart) -> PartWork:
        """Kernels, messages and bytes of a part under its layout."""

    def messages(self, experts: PlacedPart) -> ExpertMessages:
        """What passes between a router and its experts."""

    def sync_bytes(self, whole: bool = False) -> tuple[int, int]:
        """Bytes of one element in gradient reductions and in parameter gathers; whole: of those kept whole."""

    def weight_formats(self, gathered: bool = False) -> tuple[DType, DType]:
        """(the format that weights are there in, the one that products read, where that is another). gathered: of
        weights that are gathered where they are read.
        """
        ...


def chunk_flops(source: ModelWork, chunk: Chunk) -> int:
    """FLOPs of a chunk's F, I and W on one undivided device: the weight `balanced` partitions by.

    >>> from ir.workload import load_config, model_chunks
    >>> from ir.workload.setting import MicrobatchShape, ModelPrecision
    >>> from ir.workload.work import ConfigModelWork
    >>> source = ConfigModelWork(load_config("llama3-8b"), MicrobatchShape(), ModelPrecision())
    >>> [round(chunk_flops(source, c) / 1e12, 2) for c in model_chunks(source.config)[:2]]
    [0.0, 5.84]
    """
    works = [source.work(PlacedPart(0, chunk, part)) for part in chunk.parts]
    return sum(k.flops * k.count for w in works for k in (*w.forward, *w.input_grad, *w.weight_grad))
