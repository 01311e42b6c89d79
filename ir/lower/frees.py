"""Buffers of a plan: when each is written, and the compute op whose waits prove that every reader is done."""

import numpy as np

from ir.core.order import BoolArray, IntArray
from ir.core.waits import running_max, segments
from ir.lower.plan_builder import Edges, PlanBuilder, producers
from ir.plan.plan import AT_START, CATEGORIES, OpKind

NEVER = 2**40  # a row behind all others


def node_buffers(draft: PlanBuilder, edges: Edges) -> None:
    """Add every buffer that microbatch nodes write or receive, with the op and cover that frees it.

    Proofs that a reader is done: a compute op, itself; a collective, the first compute op that waits for it; a send,
    the first op that consumes what the peer sent after it had consumed ours (that op then waits for the send). A buffer
    dies at the last of its readers' proofs, one that nobody reads where it was written; without proof it stays.
    """
    table = _Slots(draft)
    if not table.count:
        return
    edge, mb, writer, reader = edges
    g, kinds = draft.graph, draft.kinds()
    src, dst, slot = (np.array([getattr(e, k) for e in g.edges], np.int64)[edge] for k in ("src", "dst", "slot"))
    of = table.index[src, slot]
    some = np.flatnonzero(of >= 0)
    of, mb, writer, reader, dst = of[some], mb[some], writer[some], reader[some], dst[some]
    done = proofs(draft)
    remote = kinds[writer] == OpKind.RECV
    received, which = np.unique(writer[remote], return_inverse=True)
    read = of * g.mbs + mb
    send_of = np.zeros(len(draft.rows), dtype=np.int64)
    send_of[draft.messages[1]] = draft.messages[0]
    sent, send = read[remote], send_of[writer[remote]]
    read[remote] = table.count + which

    direct = kinds[reader] == OpKind.COMPUTE
    scale = 2 + int(draft.cover.max(initial=0))  # one number per (row, cover), so that the last is a maximum
    alloc = np.concatenate([draft.inst[table.node, table.mb], received])
    alloc_cover = np.concatenate([draft.cover[table.node, table.mb], np.zeros(len(received), np.int64)])
    last = alloc * scale + alloc_cover + 1
    last[table.count :] = -1  # what is received is read
    cover = np.where(direct, draft.cover[dst, mb], AT_START)
    np.maximum.at(last, read, np.where(direct, reader, done[reader]) * scale + cover + 1)
    np.maximum.at(last, sent, done[send] * scale + AT_START + 1)
    row = last // scale
    known = np.flatnonzero(done[send] < NEVER)
    draft.wait(done[send[known]], send[known])
    free = np.where(row < NEVER, row, -1)
    carried = np.zeros(len(received), dtype=np.int64)
    carried[which] = of[remote]
    draft.buffers.append(
        dict(
            node=np.concatenate([table.node, np.full(len(received), -1)]),
            slot=np.concatenate([table.slot, received]),
            mb=np.concatenate([table.mb, draft.rows.mb[received]]),
            bytes=np.concatenate([np.repeat(table.bytes, g.mbs), table.bytes[carried]]),
            alloc=alloc,
            alloc_cover=alloc_cover,
            free=free,
            free_cover=np.where(free >= 0, last % scale - 1, 0),
            category=np.concatenate([table.category, np.full(len(received), CATEGORIES.index("buffers"))]),
        )
    )


class _Slots:
    """Every (node, slot, microbatch) whose buffer has a size. index[node, slot] numbers the slots; -1: no size."""

    def __init__(self, draft: PlanBuilder) -> None:
        g = draft.graph
        slots = [
            (n, s, b)
            for n, node in enumerate(g.nodes)
            if not node.once
            for s, b in enumerate(node.writes)
            if b.bytes > 0
        ]
        self.count = len(slots) * g.mbs
        self.bytes = np.array([b.bytes for _, _, b in slots], dtype=np.int64)
        self.node = np.repeat(np.array([n for n, _, _ in slots], dtype=np.int64), g.mbs)
        self.slot = np.repeat(np.array([s for _, s, _ in slots], dtype=np.int64), g.mbs)
        kind = np.array([CATEGORIES.index(str(b.category)) for _, _, b in slots], dtype=np.int64)
        self.category = np.repeat(kind, g.mbs)
        self.mb = np.tile(np.arange(g.mbs), len(slots))
        self.index = np.full((len(g.nodes), 1 + max((len(n.writes) for n in g.nodes), default=0)), -1, dtype=np.int64)
        for k, (n, s, _) in enumerate(slots):
            self.index[n, s] = k


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
        # A collective whose result only leaves: the send waited for it.
        only = (kinds[producer] == OpKind.COLLECTIVE) & (out[producer] == NEVER) & (out[send] < NEVER)
        np.minimum.at(out, producer[only], out[send[only]])
        draft.wait(out[producer[only]], producer[only])
    return out


def _answers(draft: PlanBuilder, producer: IntArray, done: IntArray, compute: BoolArray) -> IntArray:
    """For each send: the first compute row here that consumes what the peer produced after consuming our message."""
    rows = draft.rows
    send, recv = draft.messages
    programs = len(draft.start) - 1
    consumer = np.where(compute[draft.recv_of], draft.recv_of, done[draft.recv_of])
    there, here = rows.program[recv], rows.program[send]
    channel, back = here * programs + there, there * programs + here
    by = np.lexsort((producer, channel))
    segment = segments(channel[by])
    earliest = -running_max(-consumer[by][::-1], segment[-1] - segment[::-1])[::-1]
    wide = len(rows) + 1
    at = np.searchsorted(channel[by] * wide + producer[by], back * wide + consumer)
    ok = (at < len(by)) & (consumer < NEVER)
    ok[ok] = channel[by][at[ok]] == back[ok]
    out = np.full(len(send), NEVER, dtype=np.int64)
    out[ok] = earliest[at[ok]]
    return out
