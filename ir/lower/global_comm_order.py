"""The joint order: transfers and meetings of all programs in one order, of which each program takes its projection.

One queue per program cannot close a cycle then: what is first in the joint order is first wherever it stands.
"""

import numpy as np

from ir.core.order import IntArray
from ir.core.waits import running_max, segments
from ir.lower.plan_builder import STEP, Edges, PlanBuilder, producers
from ir.lower.policy import MessageQueue
from ir.plan.plan import OpKind

# What a GPU computes while it moves a byte of its memory, or of a message: about an H100's, whose network is 8 cards a
# node. It only says which transfer is likely to be ready first; no order is wrong.
FLOPS_PER_BYTE, FLOPS_PER_MESSAGE_BYTE = 300, 15_000


def joint_order(draft: PlanBuilder, edges: Edges) -> None:
    """Put reductions between programs, and transfers where they share one queue, where the joint order wants them.

    edges: (edge, microbatch, receive, reader) of every data edge between programs. In one dry run over all programs
    each base row takes as long as its work, in its program's order. A transfer stands at its producer's end, a
    reduction at the end of its last contribution over all members. A send stays behind its producer; a reduction stands
    where its time comes; a receive stands before the earliest of its consumer and whatever is behind it in the queue.
    Reductions need this even where transfers have channels, if compute waits for others on their stream (ZeRO-2, 3).
    """
    met = [r for r in draft.reductions if len(r[0]) > 1]
    single = draft.policy.p2p is MessageQueue.SINGLE
    none = np.zeros(0, dtype=np.int64)
    send, recv = draft.messages if single else (none, none)
    if not met and not len(send):
        return
    rows = draft.rows
    end = dry_run(draft, edges)
    producer = producers(draft, send)
    time = np.concatenate([end[producer], [end[last].max() for _, last in met]]).astype(np.int64)
    kind = np.concatenate([np.zeros(len(send), np.int64), np.ones(len(met), np.int64)])
    tie = [np.concatenate([ids, [m[0] for m, _ in met]]).astype(np.int64) for ids in (send, producer)]
    rank = np.empty(len(time), dtype=np.int64)
    rank[np.lexsort((*tie, kind, time))] = np.arange(len(time))
    member = np.array([r for m, _ in met for r in m], dtype=np.int64)
    meeting = np.repeat(np.arange(len(met)) + len(send), [len(m) for m, _ in met]).astype(np.int64)
    at = _position(draft, end, rows.program[member], time[meeting])
    rows.key[member] = at * STEP - STEP // 2
    rows.sub[member] = rank[meeting]
    for later, first in draft.further:  # was added behind it, and stays there
        rows.key[later], rows.sub[later] = rows.key[first], rows.sub[first]
    if not single:
        return
    item = np.concatenate([np.arange(len(send)), np.arange(len(send)), meeting])
    row = np.concatenate([send, recv, member])
    position = np.concatenate([draft.local(send), draft.local(draft.recv_of), at])
    order = np.lexsort((rank[item], rows.program[row]))
    segment = segments(rows.program[row][order])
    late = np.empty(len(row), dtype=np.int64)
    late[order] = -running_max(-position[order][::-1], segment[-1] - segment[::-1])[::-1]
    rows.key[recv] = late[len(send) : len(send) + len(recv)] * STEP - STEP // 2
    rows.sub[recv] = rank[: len(recv)]


def dry_run(draft: PlanBuilder, edges: Edges) -> IntArray:
    """End of each base row, sends taking no time. Rows that never come up end behind all others."""
    edge, mb, _, reader = edges
    writer = draft.inst[draft.graph.ends[edge, 0], mb]
    start = draft.start.tolist()
    length = _lengths(draft)[draft.rows.shape[: start[-1]]].tolist()
    needs: dict[int, list[int]] = {}
    for a, b in zip(writer.tolist(), reader.tolist(), strict=True):
        needs.setdefault(b, []).append(a)
    end = [-1] * start[-1]
    blocked: dict[int, list[int]] = {}
    at, clock = start[:-1].copy(), [0] * (len(start) - 1)
    ready = list(range(len(start) - 2, -1, -1))
    while ready:
        p = ready.pop()
        now = clock[p]
        for row in range(at[p], start[p + 1]):
            if row in needs:
                late = next((a for a in needs[row] if end[a] < 0), -1)
                if late >= 0:
                    blocked.setdefault(late, []).append(p)
                    at[p] = row
                    break
                now = max(now, *(end[a] for a in needs[row]))
            now += length[row]
            end[row] = now
            if row in blocked:
                ready += blocked.pop(row)
        else:
            at[p] = start[p + 1]
        clock[p] = now
    out = np.array(end, dtype=np.int64)
    out[out < 0] = int(out.max(initial=0)) + 1
    return out


def _lengths(draft: PlanBuilder) -> IntArray:
    """How long each shape of row takes: thousands of FLOPs, and bytes as so many; at least 1, a send nothing."""
    of_node = [
        sum(k.count * (k.flops + FLOPS_PER_BYTE * k.bytes) for k in n.work)
        + (FLOPS_PER_MESSAGE_BYTE * n.message.bytes if n.message is not None else 0)
        for n in draft.graph.nodes
    ]
    shapes = draft.templates.shapes
    long = [s.kind is not OpKind.SEND and max(1, sum(of_node[n] for n, _ in s.covers) // 1000) for s in shapes]
    return np.array(long, dtype=np.int64)


def _position(draft: PlanBuilder, end: IntArray, program: IntArray, time: IntArray) -> IntArray:
    """The local position behind all base rows of a program that end by a time."""
    out = [
        np.searchsorted(end[draft.start[p] : draft.start[p + 1]], t, side="right")
        for p, t in zip(program.tolist(), time.tolist(), strict=True)
    ]
    return np.array(out, dtype=np.int64)
