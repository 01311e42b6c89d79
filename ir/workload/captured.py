"""A captured module (`model.json`) as a model graph: chunks of one part each, their kernels and bytes. Without torch.

`executor.frontend.capture` writes the file; here it is read, checked and offered as a job's `Source`. Its numbers
are of one microbatch shape, one number format and one device, of so many that tensor parallelism divides it over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ir.core.errors import ErrorKind, PiperError
from ir.core.ops import Pass
from ir.core.work import Kernel, KernelKind, Message
from ir.workload.captured_file import CapturedModelFile, read_captured
from ir.workload.config.spec import ModelConfig
from ir.workload.params import local_numel
from ir.workload.part import (
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
        out = []
        for k, c in enumerate(self.found.chunks):
            keep = self.found.parts[c.part].reads_input_again
            keeps = (KeptBuffer("", Pass(keep)),) if keep and k else ()
            params = tuple(self._param(name, shape) for name, shape in c.parameters)
            tags = {"L": int(c.name[1:])} if c.is_layer else {}
            out.append(Chunk(c.name, (Part(c.part, ("",) if k else (), keeps, params),), tags))
        return tuple(out)

    def _param(self, name: str, shape: tuple[int, ...]) -> Param:
        if name in self.found.cut:
            return Param(name, shape, ("tp",), dims=(self.found.cut[name],))
        return Param(name, shape, by_heads=name in self.found.partly)

    @cached_property
    def config(self) -> ModelConfig:
        """What is known of it in a config's words: layers, width, vocabulary; not its heads and the like."""
        f = self.found
        layers = sum(c.is_layer for c in f.chunks)
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
        )

    def check(
        self, layout: PartLayout, shape: MicrobatchShape, precision: ModelPrecision, recompute: frozenset[str]
    ) -> None:
        """Refuse a job of another shape, format or division than was captured, naming its key."""
        f = self.found
        for axis in ("cp", "ep", "etp"):
            if (size := getattr(layout, axis)) > 1:
                raise self._refuse(f"parallel.{axis}", f"{axis} = {size}: a captured module is not cut inside", 1)
        for key, given, wanted in (
            ("parallel.tp", layout.tp, f.tp),
            ("model.seq_len", shape.seq_len, f.seq_len),
            ("schedule.microbatch_size", shape.microbatch_size, f.microbatch_size),
            ("precision.compute", precision.compute, f.dtype),
            ("precision.params", precision.params, f.dtype),
        ):
            if given != wanted:
                raise self._refuse(key, f"{given}, but the module was captured with {wanted}", wanted)
        if fine := sorted(recompute - {"full"}):
            raise self._refuse("schedule.recompute", f"{', '.join(fine)}: a captured layer has no such parts", '"full"')

    def _refuse(self, key: str, message: str, allowed: object) -> PiperError:
        fix = f"{key.split('.')[1]} = {allowed}, or capture again"
        return PiperError(ErrorKind.JOB, message, key=key, allowed=str(allowed), suggestion=fix)


@dataclass(frozen=True)
class CapturedModelWork:
    """A captured model's numbers as the graph asks for them: what `ModelSource` is for a config."""

    model: CapturedModel
    shape: MicrobatchShape
    precision: ModelPrecision

    @property
    def config(self) -> ModelConfig:
        """As far as it is known."""
        return self.model.config

    def work(self, entry: PlacedPart) -> PartWork:
        """A chunk's one part, and in W the addition of its gradients to their sums."""
        found = self.part_work(entry.part.name)
        if entry.layout.tp == 1:
            found = replace(found, inline=())
        elements = sum(local_numel(p, entry.layout) for p in entry.part.params)
        if not elements:
            return found
        moved = elements * (self.precision.params.bytes + 2 * self.precision.grads.bytes)
        added = Kernel(KernelKind.MEMORY, 0, moved, self.precision.grads, (), "accumulate")
        return replace(found, weight_grad=(*found.weight_grad, added))

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
            weight_grad=p.passes.W.work,
            out_bytes=p.output_bytes,
            saved=tuple(s for s in saved if s.bytes),
            stash_bytes=p.stash_bytes,
            forward_workspace=p.passes.F.workspace_bytes,
            input_grad_workspace=p.passes.I.workspace_bytes,
            weight_grad_workspace=p.passes.W.workspace_bytes,
            inline=tuple(
                PartCollective(when, Message(m.kind, m.bytes, ("tp",))) for when, x in passes for m in x.messages
            ),
            model_flops=sum(k.flops * k.count for k in p.passes.F.kernels) if p.model_flops is None else p.model_flops,
        )

    def messages(self, experts: PlacedPart) -> ExpertMessages:
        """Raises PiperError (job): no part of a captured module is sharded over experts."""
        message = "a captured module's experts are not spread over ranks"
        raise PiperError(ErrorKind.JOB, message, file=self.model.file, key="parallel.ep", allowed="1")

    def sync_bytes(self) -> tuple[int, int]:
        """Bytes per element of reductions and gathers."""
        return self.precision.reduce.bytes, self.precision.gather.bytes


def load_captured(path: str | Path) -> CapturedModel:
    """Read a model.json. Raises PiperError (io, model) naming file and key."""
    return CapturedModel(str(path), *read_captured(Path(path)))
