"""DeepSeek's sparse attention (arXiv:2512.02556): its indexer picks the keys of each query, and has no backward."""

from dataclasses import dataclass

from ir.core.ops import Pass
from ir.core.work import DType, Kernel, KernelKind, MessageKind, Work
from ir.workload.config.spec import AttentionIndexer
from ir.workload.part import PartCollective, SavedBuffer
from ir.workload.parts import kernels as k
from ir.workload.parts.kernels import LinearKernel
from ir.workload.parts.region import inline
from ir.workload.setting import AttentionKind, PartSetting

EXACT = DType.FP32.bytes  # of scores, weighed and summed over heads
ID_BYTES = 4  # of a picked key's number
AT_ONCE = 4096  # queries whose scores are there together: kernels go through a long sequence in stretches


@dataclass(frozen=True, slots=True)
class AttentionIndexerWork:
    """What an indexer does in forward on one device; nothing, where a layer attends to what the one before it does.

    Every device of a tensor-parallel group picks for itself: its heads are few, and their scores are summed.
    """

    forward: Work = ()
    inline: tuple[PartCollective, ...] = ()
    saved: tuple[SavedBuffer, ...] = ()
    workspace: int = 0
    model_flops: int = 0

    @classmethod
    def of(cls, s: PartSetting) -> "AttentionIndexerWork":
        """Scores of all pairs, causal ones alone where a kernel makes them; the best keys of each query."""
        x, mla, h = s.config.indexer, s.config.mla, s.config.hidden
        if x is None or mla is None or x.taken:
            return NO_INDEXER
        wide = s.precision.activations
        query = LinearKernel("index_query", s.tokens, x.heads * x.dim, mla.q_rank)
        key = LinearKernel("index_key", s.stream, x.dim, h)
        weights = LinearKernel("index_weights", s.stream, x.heads, h, dtype=wide)
        picks = ID_BYTES * s.tokens * min(x.top_k, s.shape.seq_len)
        return cls(
            forward=(
                *k.forward(s, query, key, weights),
                k.norm_forward(s, "index_norm", s.stream * x.dim),
                k.copies(s, "index_rope", s.tokens * (x.heads + 1) * mla.rope_dim),
                *_scored(s, x),
                k.memory(s, "index_top_k", 2 * EXACT * s.tokens * s.shape.seq_len + picks),
            ),
            inline=gathered(s, x.heads, s.tokens * x.dim, s.shape.tokens * x.dim),
            saved=_saved(s, picks),
            workspace=_workspace(s, x),
            model_flops=2 * s.shape.tokens * (x.heads * x.dim * mla.q_rank + (x.dim + x.heads) * h)
            + s.shape.microbatch_size * s.shape.seq_len**2 * x.heads * (x.dim + 1),
        )


NO_INDEXER = AttentionIndexerWork()


def _scored(s: PartSetting, x: AttentionIndexer) -> Work:
    """Products of all pairs, what is below zero cut off, weighed and summed over heads: one kernel, in the format of
    products (DeepSeek's in fp8); written out, three, with every head's scores in fp32.
    """
    b, n, rows = s.shape.microbatch_size, s.shape.seq_len, s.tokens
    heads, dim, dtype = x.heads, x.dim, s.precision.compute
    read = (rows * heads + b * n) * dim * dtype.bytes
    shape = (b, rows // b * heads, n, dim)
    if s.attention is AttentionKind.FLASH:
        flops = b * n * n // s.layout.cp * heads * (dim + 1)
        return (Kernel(KernelKind.GROUPED_GEMM, flops, read + EXACT * rows * n, dtype, shape, "index_scores"),)
    each, one = rows * heads * n, 2 * rows * heads * n
    weighed = (EXACT * (each + rows * n), DType.FP32, (rows, 1, n, heads), "index_weigh")
    return (
        Kernel(KernelKind.GROUPED_GEMM, one * dim, read + EXACT * each, dtype, shape, "index_scores"),
        k.memory(s, "index_relu", 2 * EXACT * each),
        Kernel(KernelKind.GROUPED_GEMM, one, *weighed),
    )


def gathered(s: PartSetting, heads: int, keys: int, every: int) -> tuple[PartCollective, ...]:
    """Sequence parallelism's tokens come together behind the narrow products: weights of heads, and keys; those of all
    tokens go to all queries. keys, every: features of these, of this device's tokens and of all.
    """
    found = ((s.sp, s.tokens * heads + keys, "tp"), (s.layout.cp > 1, every, "cp"))
    return tuple(inline(Pass.F, MessageKind.ALL_GATHER, n * s.wide, axis) for divided, n, axis in found if divided)


def _saved(s: PartSetting, picks: int) -> tuple[SavedBuffer, ...]:
    """Of what backward reads: the numbers of picked keys; a mask, where kernels take one; scores that are stored have
    zeros there.
    """
    if s.picked:
        return (SavedBuffer("picked", picks, Pass.I),)
    return (SavedBuffer("picked_mask", s.tokens * s.shape.seq_len, Pass.I),) if s.style.masked else ()


def _workspace(s: PartSetting, x: AttentionIndexer) -> int:
    """Bytes of scores that are there at a time; written out, every head's twice."""
    n = s.shape.seq_len
    if s.attention is AttentionKind.FLASH:
        return EXACT * n * min(n // s.layout.cp, AT_ONCE)
    return 2 * EXACT * s.tokens * x.heads * n
