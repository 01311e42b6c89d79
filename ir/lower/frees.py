"""Buffers of a plan: when each is written, and the compute op whose waits prove that every reader is done."""

import numpy as np

from ir.core.order import BoolArray, IntArray
from ir.core.waits import order_by, running_max, segments
from ir.lower.plan_builder import Edges, PlanBuilder, producers
from ir.plan.plan import AT_START, CATEGORIES, OpKind

NEVER = 2**40  # a row behind all others


def node_buffers(draft: PlanBuilder, edges: Edges) -> None:
    """Add every buffer that microbatch nodes write or receive, with the op and cover that frees it.

    Proofs that a reader is done: a compute op, itself; a collective, the first compute op that waits for it; a send,
    the first op that consumes what the peer sent after it had consumed ours (that op then waits for the send), or, of a
    stage that has no backward, the first behind the place of that backward. A buffer dies at the last of its readers'
    proofs, one that nobody reads where it was written; without proof it stays.
    """
    table = _Slots(draft)
    if not len(table.node):
        return
    compute, cover = draft.kinds() == OpKind.COMPUTE, draft.cover
    done = proofs(draft)
    scale = 2 + int(cover.max(initial=0))  # one number per (row, cover), so that the last is a maximum
    proof = np.where(compute, np.arange(len(compute)), done) * scale
    read = proof[draft.inst] + np.where(compute[draft.inst], cover + 1, AT_START + 1)  # [node, microbatch]
    edge, mb, back, _ = edges
    src, dst, slot = draft.graph.ends.T
    of = table.index[src, slot]
    sized = of[edge] >= 0
    edge, mb, back = edge[sized], mb[sized], back[sized]

    alloc = draft.inst[table.node]
    last = alloc * scale + cover[table.node] + 1
    _read_here(last, read, dst, np.where(draft.graph.data, of, -1), (edge, mb))
    received = np.flatnonzero(np.bincount(back, minlength=len(compute)))
    which, send = np.zeros((2, len(compute)), dtype=np.int64)
    which[received], send[draft.messages[1]] = np.arange(len(received)), draft.messages[0]
    which, send = which[back], send[back]
    np.maximum.at(last, (of[edge], mb), done[send] * scale + AT_START + 1)
    there = np.full(len(received), -1)
    np.maximum.at(there, which, read[dst[edge], mb])
    known = np.flatnonzero(done[send] < NEVER)
    draft.wait(done[send[known]], send[known])
    last = np.concatenate([last.ravel(), there])
    free = np.where(last < NEVER * scale, last // scale, -1)
    carried = np.zeros(len(received), dtype=np.int64)
    carried[which] = of[edge]
    mbs, none = draft.graph.mbs, np.zeros(len(received), dtype=np.int64)
    draft.buffers.append(
        dict(
            node=np.append(np.repeat(table.node, mbs), none - 1),
            slot=np.append(np.repeat(table.slot, mbs), received),
            mb=np.append(np.tile(np.arange(mbs), len(table.node)), draft.rows.mb[received]),
            bytes=np.append(np.repeat(table.bytes, mbs), table.bytes[carried]),
            alloc=np.append(alloc, received),
            alloc_cover=np.append(cover[table.node], none),
            free=free,
            free_cover=np.where(free >= 0, last % scale - 1, 0),
            category=np.append(np.repeat(table.category, mbs), none + CATEGORIES.index("buffers")),
        )
    )


def _read_here(last: IntArray, read: IntArray, dst: IntArray, of: IntArray, far: tuple[IntArray, IntArray]) -> None:
    """Raise each buffer's last time to when all have read it that are on its program. far: edges that cross, of mbs."""
    edge = order_by(of)
    edge = edge[np.searchsorted(of[edge], 0) :]
    if not len(edge):
        return
    place = np.zeros(len(of), dtype=np.int64)
    place[edge] = np.arange(len(edge))
    at = read[dst[edge]]
    at[place[far[0]], far[1]] = -1
    first = np.flatnonzero(np.diff(of[edge], prepend=-1))
    found = of[edge][first]
    last[found] = np.maximum(last[found], np.maximum.reduceat(at, first))


class _Slots:
    """Every (node, slot) whose buffer has a size. index[node, slot] numbers them; -1: no size."""

    def __init__(self, draft: PlanBuilder) -> None:
        nodes = draft.graph.nodes
        slots = [(n, s, b) for n, x in enumerate(nodes) if not x.once for s, b in enumerate(x.writes) if b.bytes > 0]
        rows = [(n, s, b.bytes, CATEGORIES.index(b.category)) for n, s, b in slots]
        self.node, self.slot, self.bytes, self.category = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        self.index = np.full((len(nodes), 1 + max((len(n.writes) for n in nodes), default=0)), -1, dtype=np.int64)
        self.index[self.node, self.slot] = np.arange(len(slots))


def proofs(draft: PlanBuilder) -> IntArray:
    """For each collective and send: the first compute row whose waits prove it ended; NEVER if there is none."""
    out = np.full(len(draft.rows), NEVER, dtype=np.int64)
    kinds = draft.kinds()
    for row, on in draft.waits:
        sel = (kinds[row] == OpKind.COMPUTE) & (kinds[on] == OpKind.COLLECTIVE)
        np.minimum.at(out, on[sel], row[sel])
    send, _ = draft.messages
    if len(send):
        producer = producers(draft, send)
        out[send] = _answers(draft, producer, out, kinds == OpKind.COMPUTE)
        _unanswered(draft, producer, out)
        # A collective whose result only leaves: the send waited for it.
        only = (kinds[producer] == OpKind.COLLECTIVE) & (out[producer] == NEVER) & (out[send] < NEVER)
        np.minimum.at(out, producer[only], out[send[only]])
        draft.wait(out[producer[only]], producer[only])
    return out


def _unanswered(draft: PlanBuilder, producer: IntArray, out: IntArray) -> None:
    """Sends of stages to which nothing comes back end before what stands behind their microbatch's backward."""
    if not draft.graph.silent:
        return
    (send, _), rows = draft.messages, draft.rows
    node = np.array([s.slot[0] if s.slot else -1 for s in draft.templates.shapes], dtype=np.int64)[rows.shape[send]]
    stage = np.array([n.stage for n in draft.graph.nodes], dtype=np.int64)[node]
    row = draft.behind[stage, rows.mb[send]]
    open_ = (out[send] == NEVER) & (row > producer)
    out[send[open_]] = row[open_]


def _answers(draft: PlanBuilder, producer: IntArray, done: IntArray, compute: BoolArray) -> IntArray:
    """For each send: the first compute row here that consumes what the peer produced after consuming our message."""
    rows = draft.rows
    send, recv = draft.messages
    programs = len(draft.start) - 1
    consumer = np.where(compute[draft.recv_of], draft.recv_of, done[draft.recv_of])
    there, here = rows.program[recv], rows.program[send]
    channel, back = here * programs + there, there * programs + here
    by = order_by(channel, producer)
    segment = segments(channel[by])
    earliest = -running_max(-consumer[by][::-1], segment[-1] - segment[::-1])[::-1]
    wide = len(rows) + 1
    at = np.searchsorted(channel[by] * wide + producer[by], back * wide + consumer)
    ok = (at < len(by)) & (consumer < NEVER)
    ok[ok] = channel[by][at[ok]] == back[ok]
    out = np.full(len(send), NEVER, dtype=np.int64)
    out[ok] = earliest[at[ok]]
    return out
