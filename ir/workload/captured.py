"""A captured module (`model.json`) as a model graph: chunks of one part each, their kernels and bytes. Without torch.

`executor.frontend.capture` writes the file; here it is read, checked and offered as a job's `Source`. Its numbers
are of one microbatch shape, one number format and one device, of so many that tensor parallelism divides it over.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path

from ir.core.errors import PiperError, job_error
from ir.core.ops import Pass
from ir.core.work import WEIGHT_GRAD, DType, Kernel, KernelKind, Message, MessageKind, Work
from ir.workload.captured_file import CapturedChunk, CapturedLayerPart, CapturedModelFile, read_captured
from ir.workload.config.spec import ExpertConfig, ModelConfig
from ir.workload.params import local_numel
from ir.workload.part import (
    CP_COMMS,
    Chunk,
    ExpertMessages,
    KeptBuffer,
    Param,
    Part,
    PartCollective,
    PartLayout,
    PartWork,
    PlacedPart,
    SavedBuffer,
    before_training,
)
from ir.workload.setting import MicrobatchShape, ModelPrecision


@dataclass(frozen=True, eq=False)
class CapturedModel:
    """A model.json read and checked. Two are equal if their digests are."""

    file: str
    found: CapturedModelFile
    digest: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CapturedModel) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks, in order; the decoder layers among them are those annotated "PP"."""
        out, moe = list[Chunk](), 0
        for k, c in enumerate(self.found.chunks):
            tags = {"L": int(c.name[1:])} if c.is_layer else {}
            if c.experts is not None:
                tags |= {"MOE": moe}
                moe += 1
            out.append(Chunk(c.name, tuple(self._part(p, c, first=not k) for p in c.every), tags))
        return tuple(out)

    @cached_property
    def still(self) -> frozenset[str]:
        """Its chunks that have no backward."""
        return before_training(self.chunks)

    def _part(self, piece: CapturedLayerPart, chunk: CapturedChunk, *, first: bool) -> Part:
        """first: it has no other's output to read."""
        outer = () if first else ("",)
        inputs = {"experts": ("router",), "add": ("experts", "router")}.get(piece.name, outer)
        keep = self.found.parts[piece.part].reads_input_again
        keeps = (KeptBuffer("", Pass(keep)),) if keep and inputs == ("",) else ()
        expert = piece.name == "experts"
        params, frozen = (
            tuple(self._param(name, shape, expert, table=not chunk.is_layer) for name, shape in some)
            for some in (piece.parameters, piece.frozen)
        )
        return Part(piece.name, inputs, keeps, params, frozen=frozen)

    def _param(self, name: str, shape: tuple[int, ...], expert: bool, *, table: bool) -> Param:
        """table: no hidden matrix, as all of what comes ahead of the layers and behind them."""
        if expert:
            return Param(name, shape, ("ep",), expert=True, dims=(0,))
        table = table or name in (self.found.tables or ())
        if name in self.found.cut:
            return Param(name, shape, ("tp",), dims=(self.found.cut[name],), table=table)
        return Param(name, shape, by_heads=name in self.found.partly, table=table)

    @cached_property
    def config(self) -> ModelConfig:
        """What is known of it in a config's words: layers, width, vocabulary; not its heads and the like."""
        f = self.found
        layers = sum(c.is_layer for c in f.chunks)
        routed = {int(c.name[1:]): c.experts for c in f.chunks if c.is_layer and c.experts is not None}
        dense = frozenset(range(layers)) - routed.keys()
        some = next((c.experts for c in f.chunks if c.experts is not None), None)  # of what is beside layers, too
        moe = None if some is None else ExpertConfig(some.count, some.top_k, f.hidden, dense_layers=dense)
        return ModelConfig(
            source=self.file,
            model_type="captured",
            layers=layers,
            hidden=f.hidden,
            heads=1,
            kv_heads=1,
            head_dim=f.hidden,
            ffn=f.hidden,
            vocab=f.vocab,
            max_positions=f.seq_len,
            moe=moe,
        )

    def check(
        self, layout: PartLayout, shape: MicrobatchShape, precision: ModelPrecision, recompute: frozenset[str]
    ) -> None:
        """Refuse a job of another shape, format or division than was captured, naming its key."""
        f = self.found
        if layout.etp > 1:
            message = f"etp = {layout.etp}: a captured module's experts are not cut inside"
            raise job_error("parallel.etp", message, "etp = 1", "1")
        if shape.encoder_seq_len:
            message = "a captured module reads one sequence of tokens, of seq_len"
            raise job_error("model.encoder_seq_len", message, "leave it out", "none")
        for key, given, wanted in (
            ("parallel.tp", layout.tp, f.tp),
            ("parallel.sequence_parallel", layout.sequence_parallel and layout.tp > 1, f.sequence_parallel),
            ("parallel.cp", layout.cp, f.cp),
            ("parallel.cp_comm", CP_COMMS[layout.cp_heads], CP_COMMS[f.cp_heads if f.cp > 1 else layout.cp_heads]),
            ("parallel.ep", layout.ep, f.ep),
            ("model.seq_len", shape.seq_len, f.seq_len),
            ("schedule.microbatch_size", shape.microbatch_size, f.microbatch_size),
            ("precision.compute", precision.compute, f.dtype),
            ("precision.params", precision.params, f.dtype),
            ("precision.residual", precision.stream, f.dtype),
        ):
            if given != wanted:
                message = f"{_told(given)}, but the module was captured with {_told(wanted)}"
                raise self._refuse(key, message, _told(wanted))
        if fine := sorted(recompute - {"full"}):
            message = f"{', '.join(fine)}: a captured layer has no such parts"
            raise job_error("schedule.recompute", message, 'recompute = "full"', '"none", "full"')

    def _refuse(self, key: str, message: str, allowed: object) -> PiperError:
        return job_error(key, message, f"{key.split('.')[1]} = {allowed}, or capture again", str(allowed))


def _told(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class CapturedModelWork:
    """A captured model's numbers as the graph asks for them: what `ModelSource` is for a config."""

    model: CapturedModel
    shape: MicrobatchShape
    precision: ModelPrecision

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def work(self, entry: PlacedPart) -> PartWork:
        """A chunk's one part, and in W the addition of its gradients to their sums."""
        chunk = next((c for c in self.model.found.chunks if c.name == entry.chunk.name), None)
        piece = next((p for p in chunk.every if p.name == entry.part.name), None) if chunk is not None else None
        found = self.part_work(entry.part.name if piece is None else piece.part)
        if chunk is not None and (x := chunk.experts) is not None:
            # What the rest of the layer gives back of what it read, and the experts of their rows.
            past = {"router": x.past_bytes}.get(entry.part.name)
            found = replace(found, out_grad_bytes=past, handed=x.sent_bytes if entry.part.name == "experts" else None)
        held = [c for c in found.inline if getattr(entry.layout, c.message.axes[0]) > 1]
        found = replace(found, inline=tuple(held))
        if entry.chunk.name in self.model.still:
            return found.ahead()
        return replace(found, weight_grad=self._added(found.weight_grad, entry))

    def _added(self, work: Work, entry: PlacedPart) -> Work:
        """With the addition of gradients to their sums: in the products that make them, or in a kernel of its own."""
        left = sum(local_numel(p, entry.layout) for p in entry.part.params)
        own, sums = self.precision.params.bytes, self.precision.grads.bytes
        if self.model.found.compiled:
            products = {k: prod(k.shape[:-1]) for k in work if k.kind in (KernelKind.GEMM, KernelKind.GROUPED_GEMM)}
            left = max(0, left - sum(n * k.count for k, n in products.items()))
            work = tuple(replace(k, bytes=k.bytes + products.get(k, 0) * (2 * sums - own)) for k in work)
        if not left:
            return work
        added = Kernel(KernelKind.MEMORY, 0, left * (own + 2 * sums), self.precision.grads, (), "accumulate")
        return (*work, added)

    def part_work(self, part: str) -> PartWork:
        """A part by name as it was captured; "skip" hands on what crosses every seam."""
        f = self.model.found
        if part == "skip":
            return PartWork((), (), (), f.boundary_bytes)
        p = f.parts[part]
        saved = (
            SavedBuffer("saved_until_W", p.saved_bytes.until_W, Pass.W),
            SavedBuffer("saved_until_I", p.saved_bytes.until_I, Pass.I),
            SavedBuffer("constants", p.saved_bytes.constants, Pass.I),
        )
        passes = zip((Pass.F, Pass.I, Pass.W), (p.passes.F, p.passes.I, p.passes.W), strict=True)
        return PartWork(
            forward=p.passes.F.work,
            input_grad=p.passes.I.work,
            weight_grad=tuple(_of_weights(k) for k in p.passes.W.work),
            out_bytes=p.output_bytes,
            saved=tuple(s for s in saved if s.bytes),
            stash_bytes=p.stash_bytes,
            forward_workspace=p.passes.F.workspace_bytes,
            input_grad_workspace=p.passes.I.workspace_bytes,
            weight_grad_workspace=p.passes.W.workspace_bytes,
            inline=tuple(
                PartCollective(when, Message(m.kind, m.bytes, (m.axis,))) for when, x in passes for m in x.messages
            ),
            model_flops=sum(k.flops * k.count for k in p.passes.F.kernels) if p.model_flops is None else p.model_flops,
        )

    def messages(self, experts: PlacedPart) -> ExpertMessages:
        """What the executor's exchanges carry: rows there with their weights, and back."""
        x = next(c.experts for c in self.model.found.chunks if c.name == experts.chunk.name)
        assert x is not None, f"{experts.name} are none"
        kind, axes = MessageKind.ALL_TO_ALL, ("ep",)
        return ExpertMessages(
            Message(kind, 8 * x.count, axes),
            Message(kind, x.sent_bytes, axes, x.top_k),
            Message(kind, x.back_bytes, axes, x.top_k),
            x.sent_bytes,
            x.back_bytes,
        )

    def sync_bytes(self, whole: bool = False) -> tuple[int, int]:
        return self.precision.sync_bytes(whole)

    def weight_formats(self, gathered: bool = False) -> tuple[DType, DType]:
        """One: a module computes in its parameters' format."""
        return self.model.found.dtype, self.model.found.dtype


def _of_weights(kernel: Kernel) -> Kernel:
    """A kernel of W, by name: a product there sums over tokens, whose number is no row's length."""
    if kernel.kind not in (KernelKind.GEMM, KernelKind.GROUPED_GEMM):
        return kernel
    return replace(kernel, label=f"{kernel.label}{WEIGHT_GRAD}")


def load_captured(path: str | Path) -> CapturedModel:
    """Read a model.json. Raises PiperError (io, model) naming file and key."""
    return CapturedModel(str(path), *read_captured(Path(path)))
