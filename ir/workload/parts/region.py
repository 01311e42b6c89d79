"""Communication inside parts, at the edges of a tensor-parallel region."""

from ir.core.ops import Pass
from ir.core.work import Message, MessageKind
from ir.workload.part import PartCollective
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
            inline(Pass.F, MessageKind.ALL_GATHER, size, "tp"),
            inline(Pass.I, MessageKind.REDUCE_SCATTER, size, "tp"),
            *((inline(Pass.W, MessageKind.ALL_GATHER, size, "tp"),) if linear else ()),
        )
    return (inline(Pass.I, MessageKind.ALL_REDUCE, size, "tp"),) if s.layout.tp > 1 else ()


def leave(s: PartSetting, features: int) -> tuple[PartCollective, ...]:
    """Behind a row-parallel linear, whose output is a partial sum (Megatron's g, or its reduce-scatter)."""
    size = s.tokens * features * s.wide
    if s.sp:
        scatter = inline(Pass.F, MessageKind.REDUCE_SCATTER, size, "tp")
        return (scatter, inline(Pass.I, MessageKind.ALL_GATHER, size, "tp"))
    return (inline(Pass.F, MessageKind.ALL_REDUCE, size, "tp"),) if s.layout.tp > 1 else ()


def expert_tensor(s: PartSetting, rows: int) -> tuple[PartCollective, ...]:
    """Around experts that are cut by etp: every rank of the group needs all `rows` rows that the group received."""
    if s.layout.etp == 1:
        return ()
    size = rows * s.config.expert_hidden * s.wide
    both = (MessageKind.ALL_GATHER, MessageKind.REDUCE_SCATTER)
    return tuple(inline(when, kind, size, "etp") for when in (Pass.F, Pass.I) for kind in both)


def all_reduce(when: Pass, size: int) -> PartCollective:
    """An all-reduce over the tensor-parallel group."""
    return inline(when, MessageKind.ALL_REDUCE, size, "tp")


def gather(size: int) -> tuple[PartCollective, ...]:
    """What the tensor-parallel group's ranks made, brought together in forward; of its gradient each takes its part."""
    return (inline(Pass.F, MessageKind.ALL_GATHER, size, "tp"),)


def inline(when: Pass, kind: MessageKind, size: int, axis: str) -> PartCollective:
    """A message of `size` bytes over an axis's group, which the pass waits for."""
    return PartCollective(when, Message(kind, size, (axis,)))
