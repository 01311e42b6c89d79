"""A collective as one rank sees it: what it does, for which bucket and microbatch, and with whom."""

from __future__ import annotations

from dataclasses import dataclass

from ir.core.work import MessageKind
from ir.plan.places import RankPlacement
from ir.plan.plan import OpKind, OpShape, Plan

ONCE = -1  # instead of a microbatch


@dataclass(frozen=True, slots=True)
class Collective:
    """One of a rank's collectives."""

    kind: MessageKind
    bucket: str  # `Bucket.key`, "" where it is about none
    mb: int  # the microbatch, or ONCE
    group: str  # its name in the transport
    members: tuple[int, ...]  # global ranks
    exchange: bool = False  # it carries rows of tokens, or their numbers, between units of a stage

    @property
    def once(self) -> bool:
        return self.mb == ONCE

    @classmethod
    def of(cls, plan: Plan, places: RankPlacement, rank: int, shape: OpShape, mb: int) -> Collective:
        """What an op of this shape is on this rank."""
        program = places.program(rank)
        node = plan.graph.nodes[shape.covers[0][0]] if shape.covers else None
        programs: tuple[int, ...]
        if node is None:
            message, programs = shape.message, (program,)
        elif not node.once:
            message, programs = node.message, (program,)
        else:
            message, programs, mb = node.message, node.groups, ONCE
        assert message is not None
        members = places.group(rank, message.axes, programs)
        group = f"{shape.stream}:{','.join(map(str, members))}"
        return cls(message.kind, shape.bucket, mb, group, members, exchange=node is not None and not node.once)


def groups(plan: Plan, places: RankPlacement) -> dict[str, tuple[int, ...]]:
    """The members of every group that some collective of the plan needs, by name."""
    out = {}
    for p, s in sorted({*zip(plan.program.tolist(), plan.shape.tolist(), strict=True)}):
        if plan.shapes[s].kind is OpKind.COLLECTIVE:
            for rank in places.table[p]:
                found = Collective.of(plan, places, rank, plan.shapes[s], 0)
                out[found.group] = found.members
    return out
