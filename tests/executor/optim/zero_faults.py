"""Ranks that count what they send, or do one thing wrong with replicas and shards; each the target of a launch."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from executor.measure.peak_bytes import DONE
from executor.parallel.inline import Meeting
from executor.runtime import rank as rank_module
from executor.runtime.batch import Microbatch, MicrobatchLoader
from executor.runtime.interpreter import PlanInterpreter
from executor.runtime.program import ProgramOp, RankPlan
from executor.runtime.rank import train_rank
from executor.runtime.worker import RankContext
from executor.transport.base import TransportHandle, TransportTopology
from executor.transport.groups import GlooTransport
from ir.core.ops import Pass
from ir.graph.graph import GraphNode
from ir.plan.plan import AT_START, Plan
from tests.executor.faults import edited, scaled


def counted(ctx: RankContext, fault: dict[str, Any], **spec: Any) -> Any:
    """Every collective's kind, bytes (of the norm 0) and ranks go to a file."""
    rows: list[tuple[str, int, int]] = []

    def note(name: str, whole: Callable[..., Tensor]) -> None:
        real = getattr(GlooTransport, name)

        def post(self: GlooTransport, group: str, *tensors: Tensor) -> TransportHandle:
            size, members = whole(*tensors).nbytes, dict(self.topology.groups)[group]
            params = len(members) == self.topology.world and tensors[0].numel() < 100
            rows.append((name, 0 if params else size, len(members)))
            handle: TransportHandle = real(self, group, *tensors)
            return handle

        setattr(GlooTransport, name, post)

    note("all_reduce", lambda x: x)
    note("reduce_scatter", lambda into, x: x)
    note("all_gather", lambda into, x: into)
    result = train_rank(ctx, **spec)
    (Path(fault["folder"]) / f"traffic-{ctx.rank}.json").write_text(json.dumps(rows))
    return result


def reduced_every_microbatch(ctx: RankContext, fault: dict[str, Any], **spec: Any) -> Any:
    """All sums travel behind each microbatch too; nobody uses what comes of it."""
    compute: Callable[..., None] = PlanInterpreter._compute

    def more(self: PlanInterpreter, op: ProgramOp, *rest: Any) -> None:
        compute(self, op, *rest)
        nodes: list[tuple[int, GraphNode, int]] = self.program.covers(op.index)
        if any(node.kind is Pass.W for _, node, _ in nodes):
            for flat in self.sync.flat.values():  # type: ignore[attr-defined]
                self.transport.all_reduce("more", flat.sums.clone()).wait()

    def topology(plan: Plan, groups: Iterable[Meeting]) -> TransportTopology:
        return make(plan, [*groups, ("more", tuple(range(ctx.world)), frozenset())])

    make, rank_module.topology = rank_module.topology, topology
    PlanInterpreter._compute = more  # type: ignore[method-assign]
    return counted(ctx, fault, **spec)


def scaled_by_replicas(ctx: RankContext, **spec: Any) -> Any:
    """As if each replica's loss were a mean over its own tokens, and gradients were summed."""
    return scaled(2.0, ctx, spec)


def averaged(ctx: RankContext, **spec: Any) -> Any:
    """As FSDP2 does by default: gradients are averaged over replicas."""
    return scaled(0.5, ctx, spec)


def same_data(ctx: RankContext, **spec: Any) -> Any:
    """Both replicas read the first one's microbatches."""
    batch: Callable[[MicrobatchLoader, int, int, int], Microbatch] = MicrobatchLoader.batch
    MicrobatchLoader.batch = lambda self, step, replica, mb: batch(self, step, 0, mb)  # type: ignore[method-assign]
    return train_rank(ctx, **spec)


def unreduced(ctx: RankContext, **spec: Any) -> Any:
    """Replicas keep their gradients to themselves."""
    GlooTransport.all_reduce = lambda self, group, tensor: DONE  # type: ignore[assignment,method-assign]
    return train_rank(ctx, **spec)


def ungathered(ctx: RankContext, **spec: Any) -> Any:
    """Nobody learns what the others have updated."""
    GlooTransport.all_gather = lambda self, group, into, tensor: DONE  # type: ignore[assignment,method-assign]
    return train_rank(ctx, **spec)


def freed_early(ctx: RankContext, **spec: Any) -> Any:
    """Rank 1 lets go of gathered weights before the op that reads them last, not behind it."""

    def early(program: RankPlan, _: Plan) -> None:
        (op, cover), meetings = next(x for x in program.closes.items() if x[0][1] != AT_START)
        del program.closes[op, cover]
        program.closes[op, AT_START] = meetings

    return edited(early, ctx, spec)
