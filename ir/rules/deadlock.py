"""Can the plan always move on? An op starts when its queue and waits allow; it ends when all its partners have started."""

from __future__ import annotations

import numpy as np

from ir.errors import ErrorKind, PiperError
from ir.plan import Plan


def check_progress(plan: Plan, serial: bool = False) -> None:
    """Run the plan without time; raise PiperError (deadlock) naming where every program stands.

    Queues are the plan's streams, or (serial) each program's dispatch order as its only stream.
    """
    if serial:
        bounds = plan.bounds.tolist()
        queues = [list(range(a, b)) for a, b in zip(bounds, bounds[1:], strict=False)]
    else:
        queues = plan.queues
    stuck = walk(plan, queues)
    if stuck:
        raise _story(plan, stuck, serial)


def walk(plan: Plan, queues: list[list[int]]) -> list[tuple[int, int]]:
    """Advance every queue as far as it goes; returns (queue, op) where it stopped, empty if all ends were reached.

    Each queue runs until it blocks, then is woken by the one op it waits for: linear in ops and waits.
    """
    n = len(plan)
    at, items = plan.waits.at.tolist(), plan.waits.items.tolist()
    partners = _partners(plan)
    started, ended = bytearray(n), bytearray(n)
    blocked: dict[int, list[int]] = {}
    pointer = [0] * len(queues)
    ready = list(range(len(queues) - 1, -1, -1))
    while ready:
        q = ready.pop()
        queue = queues[q]
        k, length = pointer[q], len(queue)
        while k < length:
            op = queue[k]
            if not started[op]:
                a, b = at[op], at[op + 1]
                while a < b and ended[items[a]]:
                    a += 1
                if a < b:
                    blocked.setdefault(items[a], []).append(q)
                    break
                started[op] = 1
                if ~op in blocked:
                    ready += blocked.pop(~op)
            mates = partners.get(op)
            if mates is not None:
                late = next((m for m in mates if not started[m]), -1)
                if late >= 0:
                    blocked.setdefault(~late, []).append(q)
                    break
            ended[op] = 1
            if op in blocked:
                ready += blocked.pop(op)
            k += 1
        pointer[q] = k
    return [(q, queue[k]) for q, (queue, k) in enumerate(zip(queues, pointer, strict=True)) if k < len(queue)]


def _partners(plan: Plan) -> dict[int, tuple[int, ...]]:
    rows = np.flatnonzero(plan.partner >= 0)
    out: dict[int, tuple[int, ...]] = {
        a: (b,) for a, b in zip(rows.tolist(), plan.partner[rows].tolist(), strict=True)
    }
    members: dict[int, list[int]] = {}
    for row in np.flatnonzero(plan.collective >= 0).tolist():
        members.setdefault(int(plan.collective[row]), []).append(row)
    for group in members.values():
        for row in group:
            out[row] = tuple(m for m in group if m != row)
    return out


def _story(plan: Plan, stuck: list[tuple[int, int]], serial: bool) -> PiperError:
    halted = {op for _, op in stuck}
    lines = []
    for _, op in stuck[:24]:
        program = int(plan.program[op])
        waits = [w for w in plan.waits.row(op).tolist() if w in halted or not serial]
        stream = plan.shapes[int(plan.shape[op])].stream
        mates = _partners(plan).get(op, ()) if len(stuck) <= 24 else ()
        need = [plan.text(w) for w in waits[:2]] + [f"{plan.text(m)} of program {int(plan.program[m])}" for m in mates[:2]]
        lines.append(f"  program {program} {stream} stands at {plan.text(op)}, which needs {', '.join(need) or 'its turn'}")
    how = "each program's dispatch order as one stream" if serial else "streams in order"
    return PiperError(
        ErrorKind.DEADLOCK,
        f"the plan cannot finish ({how}):\n" + "\n".join(lines),
        suggestion="let receives be posted before the sends of the peer that they stand against",
    )
