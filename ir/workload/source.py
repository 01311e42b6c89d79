"""A model's numbers as the graph asks for them: the `Source` of a job."""

from __future__ import annotations

from dataclasses import dataclass

from ir.core.work import Message
from ir.workload.config.spec import ModelConfig
from ir.workload.params import local_numel
from ir.workload.part import Entry, Layout, Param, PartWork
from ir.workload.setting import FUSED_STYLE, BatchShape, Precision, Style
from ir.workload.work import dispatch_bytes, part_work


@dataclass(frozen=True)
class ModelSource:
    """Kernels, messages and bytes of a config's parts, for one microbatch shape and precision."""

    config: ModelConfig
    shape: BatchShape
    precision: Precision
    attention: str = "flash"
    style: Style = FUSED_STYLE

    def work(self, entry: Entry) -> PartWork:
        """A part under its layout."""
        where, how = (self.config, entry.chunk, entry.part, entry.layout), (self.attention, self.style)
        return part_work(*where, self.shape, self.precision, *how)

    def dispatch(self, entry: Entry) -> tuple[Message, Message, int]:
        """Dispatch, combine, bytes received by the experts of one device."""
        found = dispatch_bytes(self.config, entry.layout, self.shape, self.precision)
        return found.dispatch, found.combine, found.dispatched_bytes

    def counts(self, entry: Entry) -> Message:
        """How many rows go to each expert."""
        return dispatch_bytes(self.config, entry.layout, self.shape, self.precision).counts

    def combined(self, entry: Entry) -> int:
        """Bytes of combined tokens on one device."""
        return dispatch_bytes(self.config, entry.layout, self.shape, self.precision).combined_bytes

    def local_numel(self, param: Param, layout: Layout) -> int:
        """Elements on one device, before ZeRO."""
        return local_numel(param, layout)

    def sync_bytes(self) -> tuple[int, int]:
        """Bytes per element of reductions and gathers."""
        return self.precision.reduce.bytes, self.precision.gather.bytes
