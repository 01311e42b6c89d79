"""A model's numbers as the graph asks for them: the `Source` of a job."""

from __future__ import annotations

from dataclasses import dataclass

from ir.core.work import Message
from ir.workload.config.spec import ModelConfig
from ir.workload.params import local_numel
from ir.workload.part import Param, PartLayout, PartWork, PlacedPart
from ir.workload.setting import FUSED_STYLE, KernelStyle, MicrobatchShape, ModelPrecision
from ir.workload.work import dispatch_bytes, part_work


@dataclass(frozen=True)
class ConfigModelWork:
    """Kernels, messages and bytes of a config's parts, for one microbatch shape and precision."""

    config: ModelConfig
    shape: MicrobatchShape
    precision: ModelPrecision
    attention: str = "flash"
    style: KernelStyle = FUSED_STYLE

    def work(self, entry: PlacedPart) -> PartWork:
        """A part under its layout."""
        where, how = (self.config, entry.chunk, entry.part, entry.layout), (self.attention, self.style)
        return part_work(*where, self.shape, self.precision, *how)

    def dispatch(self, entry: PlacedPart) -> tuple[Message, Message, int]:
        """Dispatch, combine, bytes received by the experts of one device."""
        found = dispatch_bytes(self.config, entry.layout, self.shape, self.precision)
        return found.dispatch, found.combine, found.dispatched_bytes

    def counts(self, entry: PlacedPart) -> Message:
        """How many rows go to each expert."""
        return dispatch_bytes(self.config, entry.layout, self.shape, self.precision).counts

    def combined(self, entry: PlacedPart) -> int:
        """Bytes of combined tokens on one device."""
        return dispatch_bytes(self.config, entry.layout, self.shape, self.precision).combined_bytes

    def local_numel(self, param: Param, layout: PartLayout) -> int:
        """Elements on one device, before ZeRO."""
        return local_numel(param, layout)

    def sync_bytes(self) -> tuple[int, int]:
        """Bytes per element of reductions and gathers."""
        return self.precision.reduce.bytes, self.precision.gather.bytes
