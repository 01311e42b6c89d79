"""Buffers of a plan: when each is written, and the compute op whose waits prove that every reader is done."""

from __future__ import annotations

import numpy as np

from ir.graph import Category
from ir.lower.draft import Draft, producers
from ir.lower.waits import running_max
from ir.order import BoolArray, IntArray
from ir.plan import CATEGORIES, OpKind

NEVER = -1


def node_buffers(draft: Draft, edges: tuple[IntArray, IntArray, IntArray, IntArray]) -> None:
    """Add every buffer that microbatch nodes write or receive, with the row that frees it.

    Free positions and the waits they need: a compute reader frees at itself; a collective's input at the first
    compute op that reads its output; a sent buffer at the first op that consumes what the peer sent after it had
    consumed ours (and that op then waits for the send); without such an answer, at the step's end.
    """
    edge, mb, writer, reader = edges
    g = draft.graph
    slots = [(n, s) for n, node in enumerate(g.nodes) if not node.once for s, b in enumerate(node.writes) if b.bytes > 0]
    if not slots:
        return
    index = np.full((len(g.nodes), 1 + max(s for _, s in slots)), -1, dtype=np.int64)
    for k, (n, s) in enumerate(slots):
        index[n, s] = k
    mbs = g.mbs
    node = np.repeat(np.array([n for n, _ in slots], dtype=np.int64), mbs)
    slot = np.repeat(np.array([s for _, s in slots], dtype=np.int64), mbs)
    all_mb = np.tile(np.arange(mbs), len(slots))
    alloc = draft.inst[node, all_mb]
    size = np.array([g.nodes[n].writes[s].bytes for n, s in slots], dtype=np.int64)
    category = np.array([_category(g.nodes[n].writes[s].category) for n, s in slots], dtype=np.int64)
    of = index[np.array([e.src for e in g.edges], np.int64)[edge], np.array([e.slot for e in g.edges], np.int64)[edge]]
    counted = of >= 0
    dst = np.array([e.dst for e in g.edges], dtype=np.int64)[edge]
    remote = draft.kinds()[writer] == OpKind.RECV
    send_of = _send_of_receive(draft)
    proof = _proofs(draft)
    n_local = len(node)
    recv_ids, recv_at = np.unique(writer[counted & remote], return_inverse=True)
    buffer = np.where(remote, 0, of * mbs + mb)
    buffer[counted & remote] = n_local + recv_at
    reader_pos, reader_cover = _reader_position(draft, reader, dst, mb, proof)
    total = n_local + len(recv_ids)
    last = np.full(total, -1, dtype=np.int64)
    forever: BoolArray = np.zeros(total, dtype=bool)
    b, r = buffer[counted], reader_pos[counted]
    np.maximum.at(last, b, r)
    forever[b[r == NEVER]] = True
    sent = np.flatnonzero(counted & remote)
    send = send_of[writer[sent]]
    np.maximum.at(last, of[sent] * mbs + mb[sent], proof[send])
    forever[(of[sent] * mbs + mb[sent])[proof[send] == NEVER]] = True
    has = proof[send] != NEVER
    if has.any():
        pairs = np.unique(np.stack([proof[send][has], send[has]]), axis=1)
        draft.wait(pairs[0], pairs[1])
    cover = np.zeros(total, dtype=np.int64)
    at_last = r == last[b]
    np.maximum.at(cover, b[at_last], reader_cover[counted][at_last])
    alloc_all = np.concatenate([alloc, recv_ids])
    alloc_cover = np.concatenate([draft.cover[node, all_mb], np.zeros(len(recv_ids), np.int64)])
    unread = (last < 0) & ~forever
    last[unread], cover[unread] = alloc_all[unread], alloc_cover[unread]
    last[forever] = NEVER
    first_edge = np.zeros(len(recv_ids), dtype=np.int64)
    first_edge[recv_at] = of[counted & remote]
    draft.buffers.append(
        dict(
            node=np.concatenate([node, np.full(len(recv_ids), -1)]),
            slot=np.concatenate([slot, recv_ids]),
            mb=np.concatenate([all_mb, draft.rows.mb[recv_ids]]),
            bytes=np.concatenate([np.repeat(size, mbs), size[first_edge]]),
            alloc=alloc_all,
            alloc_cover=alloc_cover,
            free=last,
            free_cover=cover,
            category=np.concatenate([np.repeat(category, mbs), np.full(len(recv_ids), CATEGORIES.index("buffers"))]),
        )
    )


def _category(category: Category) -> int:
    return CATEGORIES.index(str(category))


def _reader_position(
    draft: Draft, reader: IntArray, dst: IntArray, mb: IntArray, proof: IntArray
) -> tuple[IntArray, IntArray]:
    """The compute row at which each reading edge is proven done, and the cover within it."""
    collective = draft.kinds()[reader] == OpKind.COLLECTIVE
    row = reader.copy()
    cover = draft.cover[dst, mb]
    if collective.any():
        row[collective] = first_consumer(draft)[reader[collective]]
        cover = np.where(collective, 0, cover)
    return row, cover


def first_consumer(draft: Draft) -> IntArray:
    """For each collective row, the first compute row that waits for it, NEVER if none does."""
    out = np.full(len(draft.rows), np.iinfo(np.int64).max)
    kinds = draft.kinds()
    for row, on in draft.waits:
        sel = (kinds[row] == OpKind.COMPUTE) & (kinds[on] == OpKind.COLLECTIVE)
        np.minimum.at(out, on[sel], row[sel])
    out[out == np.iinfo(np.int64).max] = NEVER
    return out


def _send_of_receive(draft: Draft) -> IntArray:
    out = np.full(len(draft.rows), -1, dtype=np.int64)
    send, recv = draft.messages
    out[recv] = send
    return out


def _proofs(draft: Draft) -> IntArray:
    """For each send row: the first row here that consumes what the peer produced after consuming our message."""
    out = np.full(len(draft.rows), NEVER, dtype=np.int64)
    send, recv = draft.messages
    if not len(send):
        return out
    rows = draft.rows
    programs = len(draft.start) - 1
    consumer = draft.recv_of
    there, here = rows.program[recv], rows.program[send]
    producer = producers(draft, send)
    channel = here * programs + there
    back = there * programs + here
    by = np.lexsort((producer, channel))
    segment = np.cumsum(np.concatenate([[0], (np.diff(channel[by]) != 0).astype(np.int64)]))
    earliest = -running_max(-consumer[by][::-1], segment[-1] - segment[::-1])[::-1]
    wide = len(rows) + 1
    sorted_key = channel[by] * wide + producer[by]
    at = np.searchsorted(sorted_key, back * wide + consumer)
    ok = at < len(by)
    ok[ok] = channel[by][at[ok]] == back[ok]
    out[send[ok]] = earliest[at[ok]]
    return out
