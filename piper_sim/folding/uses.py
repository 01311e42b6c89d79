"""Who talks to whom: the groups that a plan's messages and ops meet in, as axes and joined programs."""

from __future__ import annotations

from dataclasses import dataclass

from ir.core.work import Message, MessageKind
from ir.graph.graph import GraphNode
from ir.plan.kept import once_per_plan
from ir.plan.plan import OpKind, OpShape, Plan


@dataclass(frozen=True, slots=True)
class CollectiveUse:
    """A kind of group: every rank's own over these axes, joined over programs; none joined: each program for itself."""

    axes: tuple[str, ...]
    programs: tuple[int, ...] = ()

    @classmethod
    def of_op(cls, plan: Plan, s: OpShape, programs: int) -> CollectiveUse:
        """Of a collective in a plan's job of so many programs."""
        return cls.of(message_of(plan, s), programs, joined(plan.graph.nodes[s.covers[0][0]]) if s.covers else ())

    @classmethod
    def of(cls, message: Message, programs: int, joined: tuple[int, ...] = ()) -> CollectiveUse:
        """Of a message in a job of so many programs.

        >>> from ir.core.work import MessageKind
        >>> CollectiveUse.of(Message(MessageKind.ALL_REDUCE, 8, ("tp", "dp", "pp")), 2)
        CollectiveUse(axes=('dp', 'tp'), programs=(0, 1))
        """
        everywhere = tuple(range(programs)) if "pp" in message.axes else joined
        return cls(inner(message.axes), everywhere)


def message_of(plan: Plan, s: OpShape) -> Message:
    """What a communication op carries: a transfer its buffer, a collective its node's message or its own."""
    nodes = plan.graph.nodes
    if s.slot is not None:
        return Message(MessageKind.P2P, nodes[s.slot[0]].writes[s.slot[1]].bytes, ("pp",))
    message = nodes[s.covers[0][0]].message if s.covers else s.message
    assert message is not None
    return message


def inner(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Axes inside a program, in one order.

    >>> inner(("tp", "pp", "dp"))
    ('dp', 'tp')
    """
    return tuple(sorted({*axes} - {"pp"}))


def joined(n: GraphNode) -> tuple[int, ...]:
    """The programs that meet in a node's message; () where each keeps to itself."""
    return n.groups if n.once and len(n.groups) > 1 else ()


@once_per_plan
def uses(plan: Plan, programs: int) -> list[CollectiveUse]:
    """Every kind of group that some message of a plan is priced over, each once."""
    nodes = plan.graph.nodes  # whose messages, and tuples of them, are often the very same
    sent = {(id(n.message), joined(n)): n.message for n in nodes if n.message is not None}
    out = [CollectiveUse.of(message, programs, together) for (_, together), message in sent.items()]
    out += [
        CollectiveUse.of(m, programs) for inline in {id(n.inline): n.inline for n in nodes}.values() for m in inline
    ]
    out += [CollectiveUse.of(s.message, programs) for s in plan.shapes if s.message is not None and not s.covers]
    return list(dict.fromkeys(out))


@once_per_plan
def shape_axes(plan: Plan) -> list[tuple[str, ...] | None]:
    """`meeting_axes` of every shape."""
    return [meeting_axes(plan, s) for s in plan.shapes]


def meeting_axes(plan: Plan, s: OpShape) -> tuple[str, ...] | None:
    """The axes over which an op meets its equals in other replicas: its message's, or its inline ones'; None: none."""
    if s.kind is OpKind.COLLECTIVE:
        return inner(message_of(plan, s).axes)
    found = {a for n, _ in s.covers for m in plan.graph.nodes[n].inline for a in m.axes}
    return inner(tuple(found)) if found else None
