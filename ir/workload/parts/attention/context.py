"""Communication around attention whose sequences context parallelism shares out."""

from ir.core.ops import Pass
from ir.core.work import MessageKind
from ir.workload.part import PartCollective
from ir.workload.parts.attention.core import AttentionCore
from ir.workload.parts.region import inline
from ir.workload.setting import PartSetting


def context(s: PartSetting, core: AttentionCore) -> tuple[PartCollective, ...]:
    """What attention over context-parallel devices sends; gradients go home in I.

    By queries: keys and values of the whole sequence, for this device's queries; a ring moves the same bytes. By heads:
    queries, keys and values of this device's heads come, one message each, and the output goes home. Of fewer KV heads
    than devices each is sent to several.
    """
    if s.layout.cp == 1:
        return ()
    if s.layout.cp_heads:
        kv_heads = core.kv_heads * core.repeated(s)
        sent = (core.q_features, kv_heads * core.qk, kv_heads * core.v, core.out_features)
        sizes = [s.tokens * features * s.wide for features in sent]
        passes = (Pass.F, Pass.I)
        return tuple(inline(when, MessageKind.ALL_TO_ALL, size, "cp") for when in passes for size in sizes)
    tokens = s.shape.tokens
    if (x := s.config.compressed) is not None:  # compressed keys of all, and those that a window reaches back for
        tokens = s.shape.microbatch_size * (x.keys.entries(s.shape.seq_len) + s.config.window)
    size = tokens * core.kv_features * s.wide
    gathers = tuple(inline(when, MessageKind.ALL_GATHER, size, "cp") for when in (Pass.F, Pass.I))
    return (*gathers, inline(Pass.I, MessageKind.REDUCE_SCATTER, size, "cp"))
