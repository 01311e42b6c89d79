"""Bytes of each program's worst replica under uneven routing."""

from dataclasses import replace

import numpy as np

from ir.core.order import IntArray
from ir.plan.plan import OpKind, Plan, cover_table
from piper_sim.folding import RankClasses
from piper_sim.memory.timeline import MemoryEvents
from piper_sim.pricing.routing.model import ExpertRouting


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
