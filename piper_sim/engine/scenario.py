"""What both engines run: a plan and everything beside durations that decides when its ops run. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ir.core.order import FloatArray, IntArray
from ir.plan.plan import OpLists, Plan
from piper_sim.engine.steps import carried


class MessageMode(StrEnum):
    """What a transfer means. rendezvous: it starts when both ends are posted and holds both streams.

    buffered: the message leaves when the send is posted and never holds the sender (pure latency).
    """

    BUFFERED = "buffered"
    RENDEZVOUS = "rendezvous"


@dataclass(frozen=True, eq=False)
class HostModel:
    """The process that dispatches a program's ops, in the plan's order. docs/ENGINE.md, 7.

    launch: [op] seconds it is busy with each, multiples of 2**-40.
    hold: by op, what must have ended before it turns to that op; ops + j stands for op j of the step before.
    """

    launch: FloatArray
    hold: OpLists


@dataclass(frozen=True, eq=False)
class KernelInterference:
    """Who slows whom, by op class. All entries are added slowdowns: 0.4 makes a kernel take 1.4 times as long.

    kind: [op] class, compute classes and communication classes each counted from 0.
    held: [compute class, communication class] while the communication kernel holds its SMs, from its post to its end.
    moving: the same, while it also moves bytes. wire: [communication class, compute class] on the message itself.
    """

    kind: IntArray
    held: FloatArray
    moving: FloatArray
    wire: FloatArray

    @property
    def idle(self) -> bool:
        """Whether nothing slows anything."""
        return not any(table.any() for table in (self.held, self.moving, self.wire))


@dataclass(frozen=True, eq=False)
class Links:
    """Which links a communication op loads, for max-min sharing. docs/ENGINE.md, 8.

    row: [op] its row of the table, -1 where it loads none. `resource[at[k]:at[k + 1]]` are the links of row k, `load`
    the share of each one's capacity that it takes at full speed. count: number of links.
    """

    row: IntArray
    at: IntArray
    resource: IntArray
    load: FloatArray
    count: int


@dataclass(frozen=True, eq=False)
class EngineScenario:
    """A plan with its wire, host, interference and links; None: there is none of it.

    late, before: op late[k] of a step waits for op before[k] of the step before (`steps.carried`).
    """

    plan: Plan
    late: IntArray
    before: IntArray
    wire: MessageMode = MessageMode.RENDEZVOUS
    host: HostModel | None = None
    slow: KernelInterference | None = None
    links: Links | None = None

    def __post_init__(self) -> None:
        if self.wire is MessageMode.BUFFERED and (self.host or self.slow or self.links):
            raise ValueError("a buffered message holds nothing, so there is nothing to share and no host to wait for")

    @classmethod
    def of(
        cls,
        plan: Plan,
        wire: MessageMode = MessageMode.RENDEZVOUS,
        host: HostModel | None = None,
        slow: KernelInterference | None = None,
        links: Links | None = None,
    ) -> EngineScenario:
        """With what the plan's own graph says is carried from step to step."""
        return cls(plan, *carried(plan), wire, host, slow, links)

    @property
    def shared(self) -> bool:
        """Whether anything in flight can slow anything else."""
        return self.links is not None or (self.slow is not None and not self.slow.idle)


@dataclass(frozen=True, eq=False)
class EngineRun:
    """When ops started and ended. Arrays have shape (steps, ops); times are in the unit of the durations.

    post: when the host had dispatched them; None where there is no host.
    """

    start: FloatArray
    end: FloatArray
    post: FloatArray | None = None

    def last(self, steps: int) -> EngineRun:
        """Only the last few steps."""
        return EngineRun(self.start[-steps:], self.end[-steps:], None if self.post is None else self.post[-steps:])
