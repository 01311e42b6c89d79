"""Outputs of pipeline stages that a framework gives up as soon as they are sent, as Megatron-LM does.

A plan frees what it sent where its waits prove that the peer has it, mostly behind the gradient that comes back:
nobody waits for a send alone. Megatron waits for it, and empties the tensor (`deallocate_pipeline_outputs`); gradients
that it sends it keeps.
"""

from dataclasses import replace

import numpy as np

from ir.core.ops import Pass
from ir.core.order import IntArray
from ir.plan.kept import once_per_plan
from ir.plan.plan import AT_START, OpKind, Plan


@once_per_plan
def given_up(plan: Plan) -> Plan:
    """The plan with each output of forward that is sent to all stages that read it free from the op behind its send on.

    One that its own stage reads, or another one on the same program, stays.
    """
    b, graph = plan.buffers, plan.graph
    sends = np.flatnonzero(plan.kind == OpKind.SEND)
    if not len(sends):
        return plan
    slots = np.array([s.slot if s.kind is OpKind.SEND and s.slot else (-1, -1) for s in plan.shapes], dtype=np.int64)
    wide, mbs = 1 + int(max(b.slot.max(initial=0), graph.ends[:, 2].max(initial=0))), graph.mbs
    sent = _key(slots[plan.shape[sends]], plan.mb[sends], wide, mbs)
    stage = np.array([n.stage for n in graph.nodes], dtype=np.int64)
    src, dst, slot = graph.ends[graph.data].T
    read, far = src * wide + slot, stage[src] != stage[dst]
    other = np.unique(np.stack([read[far], stage[dst][far]], axis=1), axis=0)[:, 0]
    readers = np.bincount(other, minlength=len(stage) * wide)  # [node and slot] other stages that read it
    forward = np.array([n.kind is Pass.F for n in graph.nodes], dtype=np.bool_)
    mine = np.flatnonzero((b.node >= 0) & forward[b.node] & ~np.isin(b.node * wide + b.slot, read[~far]))
    by = np.argsort(sent, kind="stable")
    own = _key(np.stack([b.node[mine], b.slot[mine]], axis=1), b.mb[mine], wide, mbs)
    at = np.searchsorted(sent[by], own, side="right") - 1  # the last send of it
    times = at + 1 - np.searchsorted(sent[by], own, side="left")
    found = (times > 0) & (times == readers[b.node[mine] * wide + b.slot[mine]])
    behind = sends[by][at[found]] + 1
    mine = mine[found]
    ends = np.append(plan.program, -1)
    early = (ends[behind] == ends[behind - 1]) & ((b.free[mine] < 0) | (b.free[mine] > behind))
    free, cover = b.free.copy(), b.free_cover.copy()
    free[mine[early]], cover[mine[early]] = behind[early], AT_START
    return replace(plan, buffers=replace(b, free=free, free_cover=cover))


def _key(slots: IntArray, mb: IntArray, wide: int, mbs: int) -> IntArray:
    """A number for each (node, slot) and microbatch."""
    return np.asarray((slots[:, 0] * wide + slots[:, 1]) * mbs + mb)
