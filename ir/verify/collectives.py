"""What meets across programs meets in one order: both ends of a channel, all members of a collective."""

from collections import defaultdict

import numpy as np

from ir.graph.graph import illegal
from ir.plan.plan import OpKind, Plan
from ir.verify.coverage import OpInstances


def check_channels(plan: Plan) -> None:
    """Per ordered pair of programs, the k-th send is the k-th receive. P2P matches by order, without tags.

    Raises PiperError (illegal_plan): a send without its receive, or in another order.
    """
    kinds = plan.kind
    send = np.flatnonzero(kinds == OpKind.SEND)
    recv = np.flatnonzero(kinds == OpKind.RECV)
    for row in (*send[plan.partner[send] < 0].tolist(), *recv[plan.partner[recv] < 0].tolist()):
        what = "receives" if kinds[row] == OpKind.SEND else "sends"
        peer = plan.shapes[int(plan.shape[row])].peer
        raise illegal(f"{plan.where(row)}, but program {peer} never {what} it")
    _check_pairs(plan)
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


def _check_pairs(plan: Plan) -> None:
    """Both ends of a transfer name each other, and the same buffer of the same microbatch."""
    slots = {s.slot: k for k, s in enumerate(plan.shapes)}
    slot = np.array([slots[s.slot] for s in plan.shapes], dtype=np.int64)
    peer = np.array([s.peer for s in plan.shapes], dtype=np.int64)
    row = np.flatnonzero(plan.partner >= 0)
    other = plan.partner[row]
    good = (plan.partner[other] == row) & (plan.mb[row] == plan.mb[other])
    good &= (slot[plan.shape[row]] == slot[plan.shape[other]]) & (peer[plan.shape[row]] == plan.program[other])
    good &= plan.kind[row] + plan.kind[other] == OpKind.SEND + OpKind.RECV
    if not good.all():
        a = int(row[np.argmin(good)])
        b = int(plan.partner[a])
        there = f"{plan.text(b)} of program {int(plan.program[b])}"
        raise illegal(f"{plan.where(a)} meets {there}, which is not its other end")
    queues = {s.stream == "p2p" for s in plan.shapes if s.kind in (OpKind.SEND, OpKind.RECV)}
    if len(queues) > 1:
        raise illegal("some transfers stand in one queue p2p, others on channels", "use one kind of queue")


def check_collectives(plan: Plan, found: OpInstances) -> None:
    """Members of collectives that span programs stand in one order on each pair of programs' common stream.

    Raises PiperError (illegal_plan): members that are not the owners, or stand in two orders.
    """
    groups: list[list[int]] = []
    wanted = np.full(len(plan), -1, dtype=np.int64)
    for i, n in enumerate(plan.graph.nodes):
        if n.once and len(n.groups) > 1:
            rows = [int(found.op[i, p]) for p in n.groups]
            wanted[rows] = len(groups)
            groups.append(rows)
    for rows in groups:
        ids = set(plan.collective[rows].tolist())
        if len(ids) > 1 or min(ids) < 0 or np.count_nonzero(plan.collective == min(ids)) != len(rows):
            raise illegal(f"{plan.text(rows[0])} has other members than its owners {plan.program[rows].tolist()}")
    stray = np.flatnonzero((wanted < 0) & (plan.collective >= 0))
    if len(stray):
        row = int(stray[0])
        raise illegal(f"{plan.where(row)} meets other programs, but has one owner")
    both: dict[tuple[int, int, str], list[tuple[int, int]]] = defaultdict(list)
    for rows in groups:
        for x in rows:
            for y in rows:
                if plan.program[x] < plan.program[y]:
                    stream = plan.shapes[int(plan.shape[x])].stream
                    both[int(plan.program[x]), int(plan.program[y]), stream].append((x, y))
    for (p, q, stream), pairs in both.items():
        pairs.sort()
        late = next((k for k in range(1, len(pairs)) if pairs[k][1] < pairs[k - 1][1]), None)
        if late is not None:
            (a, _), (b, _) = pairs[late - 1], pairs[late]
            raise illegal(
                f"stream {stream}: program {p} runs {plan.text(a)} before {plan.text(b)}, program {q} behind it",
                "one order of collectives for all their members",
            )
