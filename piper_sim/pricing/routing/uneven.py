"""A plan's op costs for each class of replicas, and bytes of each program's worst one, under uneven routing."""

from dataclasses import replace

import numpy as np

from ir.core.grid import quantised
from ir.core.order import FloatArray, IntArray
from ir.core.waits import grouped
from ir.plan.plan import OpKind, Plan, cover_table
from piper_sim.folding import RankClasses
from piper_sim.memory.events import MemoryEvents
from piper_sim.pricing.costs import CostModel, OpCosts
from piper_sim.pricing.routing.model import ExpertRouting
from piper_sim.pricing.stage_times import scaled_to_stage_times
from piper_sim.pricing.structure import KERNELS, CostShare


def price(routing: ExpertRouting | None, plan: Plan, model: CostModel, classes: RankClasses) -> OpCosts:
    """As `model.price(plan, classes)`; under uneven routing with the experts' real rows, the all-to-alls' real bytes.

    An op changes by its experts' kernels: their seconds times the factor of each class's first position, at its speed.
    Seconds stay multiples of 2**-40.
    """
    if routing is None:
        return model.price(plan, classes)
    count, n = classes.count, len(plan)
    balanced = model.seconds(plan, classes)  # ours to change: a copy would take longer than all the rest
    duration, shares = balanced[0].reshape(count, n), balanced[1].reshape(count, n, len(CostShare))
    own = _node_shares(plan, model)
    for shape, ops in zip(plan.shapes, grouped(plan.shape, len(plan.shapes)), strict=True):
        for i, member in shape.covers if len(ops) else ():
            node, mb = plan.graph.nodes[i], (plan.mb if member == 0 else plan.mb2)[ops]
            if routing.layer(node) < 0:
                continue
            case = routing.counts.case(mb)
            if shape.kind is OpKind.COLLECTIVE:
                factor = routing.exchange_factor(node, case, classes.first)
                duration[:, ops] = quantised(duration[:, ops] * factor)
                continue
            for share in np.flatnonzero(own[i]).tolist():
                factor = (routing.work_factor if share in KERNELS else routing.inline_factor)(node, case, classes.first)
                more = own[i, share] * (factor - 1)
                if share in KERNELS:
                    more = more / _speed(model, plan, ops, classes.first)
                before = shares[:, ops, share]
                after = np.maximum(before + quantised(more), 0.0)
                shares[:, ops, share] = after
                duration[:, ops] += after - before
    return OpCosts(duration.ravel(), shares.reshape(-1, len(CostShare)))


def _node_shares(plan: Plan, model: CostModel) -> FloatArray:
    """[node, Share] seconds with balanced routing, at full speed."""
    nodes = plan.graph.nodes
    own = np.array([model.node_shares(n) for n in nodes]).reshape(-1, len(CostShare))
    times = model.job.costs.stage_times
    if times is not None:
        own, _ = scaled_to_stage_times(plan.graph, own, np.array([model.node_message(n) for n in nodes]), times)
    return quantised(own)


def _speed(model: CostModel, plan: Plan, ops: IntArray, position: IntArray) -> FloatArray:
    """[class, op]; one for all where no rank has another."""
    speed = model.ground.speed
    return speed[plan.program[ops]][:, position].T if (speed != 1).any() else np.ones((1, 1))


def worst(plan: Plan, routing: ExpertRouting | None, classes: RankClasses) -> tuple[Plan, IntArray | None]:
    """The plan with the buffer bytes of that replica of each program whose peak is highest; and [node, mb] workspaces.

    Every (node, microbatch) runs on one program, so one table holds all programs' own.
    """
    if routing is None:
        return plan, None
    events, of = MemoryEvents.of(plan), routing.sizes(plan)
    nodes = _runs(plan)
    peak = np.full(plan.programs, -1, dtype=np.int64)
    sizes, workspace = plan.buffers.bytes.copy(), np.zeros_like(nodes)
    of_buffer = plan.program[plan.buffers.alloc]
    for position in classes.first.tolist():
        own = of(position)
        found = events.peaks(events.sizes(plan, own.workspace, own.buffers))
        higher = found > peak
        peak = np.maximum(peak, found)
        sizes = np.where(higher[of_buffer], own.buffers, sizes)
        workspace = np.where((nodes >= 0) & higher[nodes], own.workspace, workspace)
    return replace(plan, buffers=replace(plan.buffers, bytes=sizes)), workspace


def _runs(plan: Plan) -> IntArray:
    """[node, mb] the program that runs it, -1 where none does. What is once per step stands in the last column."""
    out = np.full((len(plan.graph.nodes), plan.graph.mbs), -1, dtype=np.int64)
    compute = plan.kind == OpKind.COMPUTE
    for node, member in zip(*cover_table(plan.shapes), strict=True):
        rows = np.flatnonzero(compute & (node[plan.shape] >= 0))
        mb = np.where(member[plan.shape[rows]] == 0, plan.mb[rows], plan.mb2[rows])
        out[node[plan.shape[rows]], mb] = plan.program[rows]
    return out
