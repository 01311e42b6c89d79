"""Communication inside parts: at the edges of a tensor-parallel region, and around context-parallel attention."""

from ir.core.ops import Pass
from ir.core.work import Message, MessageKind
from ir.workload.part import PartCollective
from ir.workload.parts.attention_core import AttentionCore
from ir.workload.setting import PartSetting


def enter(s: PartSetting, features: int, *, linear: bool = True) -> tuple[PartCollective, ...]:
    """Before column-parallel linears that read `features` per token (Megatron's f, or its all-gather g).

    linear False: no weight reads them (MLA's rotary key, which every head takes as it is).

    With sequence parallelism only the local share of the input is kept, and gathered again for the weight gradient
    (Korthikanti et al., arXiv:2205.05198, section 4.2.2). A style that keeps what was gathered saves
    no seconds: runs that do take as long as if they gathered again (Ultra-Scale, tp = 8).
    """
    size = s.tokens * features * s.wide
    if s.sp:
        return (
            _inline(Pass.F, MessageKind.ALL_GATHER, size, "tp"),
            _inline(Pass.I, MessageKind.REDUCE_SCATTER, size, "tp"),
            *((_inline(Pass.W, MessageKind.ALL_GATHER, size, "tp"),) if linear else ()),
        )
    return (_inline(Pass.I, MessageKind.ALL_REDUCE, size, "tp"),) if s.layout.tp > 1 else ()


def leave(s: PartSetting, features: int) -> tuple[PartCollective, ...]:
    """Behind a row-parallel linear, whose output is a partial sum (Megatron's g, or its reduce-scatter)."""
    size = s.tokens * features * s.wide
    if s.sp:
        scatter = _inline(Pass.F, MessageKind.REDUCE_SCATTER, size, "tp")
        return (scatter, _inline(Pass.I, MessageKind.ALL_GATHER, size, "tp"))
    return (_inline(Pass.F, MessageKind.ALL_REDUCE, size, "tp"),) if s.layout.tp > 1 else ()


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
        return tuple(_inline(when, MessageKind.ALL_TO_ALL, size, "cp") for when in passes for size in sizes)
    size = s.shape.tokens * core.kv_features * s.wide
    gathers = tuple(_inline(when, MessageKind.ALL_GATHER, size, "cp") for when in (Pass.F, Pass.I))
    return (*gathers, _inline(Pass.I, MessageKind.REDUCE_SCATTER, size, "cp"))


def expert_tensor(s: PartSetting, rows: int) -> tuple[PartCollective, ...]:
    """Around experts that are cut by etp: every rank of the group needs all `rows` rows that the group received."""
    if s.layout.etp == 1:
        return ()
    size = rows * s.config.expert_hidden * s.wide
    both = (MessageKind.ALL_GATHER, MessageKind.REDUCE_SCATTER)
    return tuple(_inline(when, kind, size, "etp") for when in (Pass.F, Pass.I) for kind in both)


def all_reduce(when: Pass, size: int) -> PartCollective:
    """An all-reduce over the tensor-parallel group."""
    return _inline(when, MessageKind.ALL_REDUCE, size, "tp")


def gather(size: int) -> tuple[PartCollective, ...]:
    """What the tensor-parallel group's ranks made, brought together in forward; of its gradient each takes its part."""
    return (_inline(Pass.F, MessageKind.ALL_GATHER, size, "tp"),)


def _inline(when: Pass, kind: MessageKind, size: int, axis: str) -> PartCollective:
    return PartCollective(when, Message(kind, size, (axis,)))
