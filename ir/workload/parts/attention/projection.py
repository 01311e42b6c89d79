"""What an attention part makes of its input before scores, and of their gradients behind them."""

from dataclasses import dataclass

from ir.core.ops import Pass
from ir.core.work import MessageKind, Work
from ir.workload.part import PartCollective, SavedBuffer
from ir.workload.parts.attention.indexer import NO_INDEXER, AttentionIndexerWork
from ir.workload.parts.kernels import LinearKernel
from ir.workload.parts.region import all_reduce, enter, inline
from ir.workload.setting import PartSetting


@dataclass(frozen=True, slots=True)
class AttentionProjection:
    """How queries, keys and values come out of the normed input. backward: their gradients to the input norm's.

    enters: features per token of what crosses into the tensor-parallel region, tensor by tensor, for linears to read;
    passes: of what no linear reads. readers: linears of the normed input, where each product is one of its own. widest:
    features of the largest transient. sums: fp32 numbers per token that norms over all heads sum over the region.
    behind: from what attention gives to what the output projection reads, out_features of it; 0: it reads what
    attention gives. indexer: what picks keys. gathered: features per token of which each rank makes a share, and which
    all gather; their gradients are summed on the way back.
    """

    forward: Work
    backward: Work
    linears: tuple[LinearKernel, ...]
    saved: tuple[SavedBuffer, ...]
    enters: tuple[int, ...]
    readers: int
    widest: int
    model_flops: int
    passes: int = 0
    sums: int = 0
    behind: Work = ()
    behind_backward: Work = ()
    indexer: AttentionIndexerWork = NO_INDEXER
    out_features: int = 0
    gathered: int = 0

    def inline(self, s: PartSetting) -> tuple[PartCollective, ...]:
        """Each tensor crosses by itself, as in Megatron."""
        crosses = [m for features in self.enters for m in enter(s, features)]
        sums = tuple(all_reduce(when, 4 * self.sums * s.tokens) for when in (Pass.F, Pass.I) if self.sums)
        passed = enter(s, self.passes, linear=False) if self.passes else ()
        size = self.gathered * s.tokens * s.wide
        both = ((Pass.F, MessageKind.ALL_GATHER), (Pass.I, MessageKind.REDUCE_SCATTER)) if size else ()
        shared = tuple(inline(when, kind, size, "tp") for when, kind in both)
        return (*crosses, *passed, *shared, *sums, *self.indexer.inline)
