"""What meets across programs meets in one order: both ends of a channel, all members of a collective."""

from __future__ import annotations

import numpy as np

from ir.graph import illegal
from ir.plan import OpKind, Plan


def check_channels(plan: Plan) -> None:
    """Per ordered pair of programs, the k-th send is the k-th receive. P2P matches by order, without tags."""
    kinds = plan.kind
    send = np.flatnonzero(kinds == OpKind.SEND)
    recv = np.flatnonzero(kinds == OpKind.RECV)
    for row in (*send[plan.partner[send] < 0].tolist(), *recv[plan.partner[recv] < 0].tolist()):
        what = "receives" if kinds[row] == OpKind.SEND else "sends"
        peer = plan.shapes[int(plan.shape[row])].stream[5:]
        raise illegal(f"program {int(plan.program[row])}: {plan.text(row)}, but program {peer} never {what} it")
    if not len(send):
        return
    to = plan.program[plan.partner[send]]
    channel = plan.program[send] * plan.programs + to
    by = np.lexsort((send, channel))
    there = plan.partner[send[by]]
    same = np.diff(channel[by]) == 0
    swapped = np.flatnonzero(same & (np.diff(there) < 0))
    if len(swapped):
        k = int(swapped[0])
        a, b = int(send[by[k]]), int(send[by[k + 1]])
        raise illegal(
            f"channel {int(plan.program[a])} -> {int(to[by[k]])}: {plan.text(a)} is sent before {plan.text(b)}, "
            f"but {plan.text(int(plan.partner[b]))} is received before {plan.text(int(plan.partner[a]))}",
            "receive in the sender's order",
        )


def check_collectives(plan: Plan) -> None:
    """Members of collectives that span programs stand in one order on each pair of programs' common stream."""
    rows = np.flatnonzero(plan.collective >= 0)
    if not len(rows):
        return
    members: dict[int, list[int]] = {}
    for row in rows.tolist():
        members.setdefault(int(plan.collective[row]), []).append(row)
    graph = plan.graph
    for group in members.values():
        node = graph.nodes[plan.shapes[int(plan.shape[group[0]])].covers[0][0]]
        have = sorted(int(plan.program[r]) for r in group)
        if have != sorted(node.groups):
            raise illegal(f"{plan.text(group[0])} has members {have}, its owners are {list(node.groups)}")
    seen: dict[tuple[int, int, str], list[int]] = {}
    for c, group in members.items():
        for x in group:
            for y in group:
                if x != y:
                    stream = plan.shapes[int(plan.shape[x])].stream
                    seen.setdefault((int(plan.program[x]), int(plan.program[y]), stream), []).append(c)
    for (p, q, stream), mine in seen.items():
        at_p = {int(plan.collective[r]): r for r in rows.tolist() if plan.program[r] == p}
        at_q = {int(plan.collective[r]): r for r in rows.tolist() if plan.program[r] == q}
        order_p = sorted(set(mine), key=lambda c: at_p[c])
        order_q = sorted(set(mine), key=lambda c: at_q[c])
        for a, b in zip(order_p, order_q, strict=True):
            if a != b:
                raise illegal(
                    f"stream {stream}: program {p} runs {plan.text(at_p[a])} where program {q} runs {plan.text(at_q[b])}",
                    "one order of collectives for all their members",
                )
