"""What both engines run: a plan and everything beside durations that decides when its ops run. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ir.core.order import FloatArray, IntArray
from ir.graph.graph import PerStepOp
from ir.graph.sync import buckets
from ir.graph.zero import part_nodes
from ir.plan.kept import once_per_plan
from ir.plan.plan import OpKind, OpLists, Plan, covers_of, spread


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


@once_per_plan
def carried(plan: Plan) -> tuple[IntArray, IntArray]:
    """(ops, ops of the step before that they wait for).

    The first op that reads a bucket's weights waits for their gather. Communication dispatched before a program's first
    compute op follows the last compute op of the step before, as it follows the compute op before it elsewhere.
    """
    row, on = _weights(plan)
    compute = np.flatnonzero(plan.kind == OpKind.COMPUTE)
    first = np.searchsorted(compute, plan.bounds)
    for p, (a, b) in enumerate(zip(first.tolist(), first[1:].tolist(), strict=False)):
        if a < b:
            early = range(int(plan.bounds[p]), int(compute[a]))
            row += early
            on += [int(compute[b - 1])] * len(early)
    return np.array(row, dtype=np.int64), np.array(on, dtype=np.int64)


def _weights(plan: Plan) -> tuple[list[int], list[int]]:
    row: list[int] = []
    on: list[int] = []
    gathers = [i for i, n in enumerate(plan.graph.nodes) if n.kind is PerStepOp.GATHER]
    if not gathers:
        return row, on
    readers = {b.key: part_nodes(plan.graph, b) for b in buckets(plan.graph)}
    first = _first_rows(plan)
    for i in gathers:
        n = plan.graph.nodes[i]
        groups, reads = list(n.groups), readers[n.bucket]
        row += first[reads][:, groups].min(axis=0).tolist()
        on += first[i, groups].tolist()
    return row, on


def _first_rows(plan: Plan) -> IntArray:
    """[node, program] the first op that covers it there; behind all ops where none does."""
    found, op = np.unique(plan.program * len(plan.shapes) + plan.shape, return_index=True)
    program, shape = np.divmod(found, len(plan.shapes))
    covering, _, node, _ = covers_of(plan.shapes).T
    at, cover = spread(covering, shape, len(plan.shapes))
    out = np.full((len(plan.graph.nodes), plan.programs), len(plan), dtype=np.int64)
    np.minimum.at(out, (node[cover], program[at]), op[at])
    return out
