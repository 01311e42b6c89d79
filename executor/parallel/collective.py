"""A collective as one rank sees it: what it does, for which bucket and microbatch, and with whom."""

from __future__ import annotations

from dataclasses import dataclass

from executor.parallel.inline import Meeting, group_name, meetings
from ir.core.work import Message, MessageKind
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
        message, programs = _met(plan, shape, places.program(rank))
        node = plan.graph.nodes[shape.covers[0][0]] if shape.covers else None
        members = places.group(rank, message.axes, programs)
        when = mb if node is None or not node.once else ONCE
        exchange = node is not None and not node.once
        return cls(message.kind, shape.bucket, when, group_name(shape.stream, members), members, exchange=exchange)


def _met(plan: Plan, shape: OpShape, program: int) -> tuple[Message, tuple[int, ...]]:
    """The message of a collective of this shape on a program, and the programs whose ranks meet."""
    node = plan.graph.nodes[shape.covers[0][0]] if shape.covers else None
    message = shape.message if node is None else node.message
    assert message is not None
    return message, node.groups if node is not None and node.once else (program,)


def groups(plan: Plan, places: RankPlacement) -> list[Meeting]:
    """Every group that some collective of the plan needs. Each is worked out once, not by every member for every op."""
    found: dict[tuple[str, tuple[str, ...], tuple[int, ...]], set[MessageKind]] = {}
    for p, s in sorted({*zip(plan.program.tolist(), plan.shape.tolist(), strict=True)}):
        shape = plan.shapes[s]
        if shape.kind is OpKind.COLLECTIVE:
            message, programs = _met(plan, shape, p)
            found.setdefault((shape.stream, message.axes, programs), set()).add(message.kind)
    return [m for (stream, axes, who), kinds in found.items() for m in meetings(places, stream, axes, who, kinds)]
