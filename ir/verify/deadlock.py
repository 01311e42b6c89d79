"""Can the plan always move on? An op starts when its queue and waits allow, and ends when all its partners started."""

from enum import StrEnum
from itertools import pairwise

import numpy as np

from ir.core.errors import ErrorKind, PiperError
from ir.plan.host import held
from ir.plan.plan import OpLists, Plan

_NONE, _MANY = -1, -2


class OpDispatch(StrEnum):
    """What moves a program's ops.

    streams: queues move by themselves, whatever the host does. inline: the host executes compute itself, so nothing is
    posted before the compute op dispatched before it has ended, or before the host has read the counts that an exchange
    needs. serial: the dispatch order is the only stream.
    """

    STREAMS = "streams in order"
    INLINE = "streams in order, compute executed by the host"
    SERIAL = "each program's dispatch order as one stream"


def check_progress(plan: Plan, dispatch: OpDispatch = OpDispatch.STREAMS) -> None:
    """Run the plan without time; raise PiperError (deadlock) naming where every program stands."""
    serial, inline = dispatch is OpDispatch.SERIAL, dispatch is OpDispatch.INLINE
    queues = _one_each(plan) if serial else plan.queues
    stuck = walk(plan, queues, held(plan) if inline else plan.waits)
    if stuck:
        raise _story(plan, stuck, dispatch)


def takes_turns(plan: Plan) -> bool:
    """Whether the plan finishes even if a rank's messages never run side by side, as its dispatch order is one stream.

    >>> from ir.job.build import prepare
    >>> from ir.job.load import job_from
    >>> job = {"model": {"config": "tiny-llama", "num_hidden_layers": 4}, "parallel": {"pp": 2}}
    >>> [takes_turns(prepare(job_from({**job, "schedule": {"name": name}})).plan()) for name in ("1f1b", "zbv")]
    [True, False]
    """
    return not walk(plan, _one_each(plan), plan.waits)


def walk(plan: Plan, queues: list[list[int]], waits: OpLists) -> list[tuple[int, int]]:
    """Advance every queue as far as it goes; returns (queue, op) where it stopped, empty if all ends were reached.

    Each queue runs until it blocks, then is woken by the one op it waits for: linear in ops and waits.
    """
    n = len(plan)
    at, items = waits.at.tolist(), waits.items.tolist()
    wait, meetings = _waits(waits), partners(plan)
    # the other end of a transfer, _MANY of a member of a collective, _NONE of what meets nobody
    mate: list[int] = np.where(plan.collective >= 0, _MANY, plan.partner).tolist()
    started, ended = bytearray(n), bytearray(n)
    asleep = [_NONE] * n  # op -> a queue that waits for it to start (a partner does) or to end
    behind = [_NONE] * len(queues)  # queue -> another queue that waits for the same op
    place = [0] * len(queues)
    ready = list(range(len(queues) - 1, -1, -1))
    while ready:
        q = ready.pop()
        queue, k = queues[q], place[q]
        end = len(queue)
        while k < end:
            op = queue[k]
            if not started[op]:
                w = wait[op]
                if w >= 0:
                    if not ended[w]:
                        behind[q], asleep[w] = asleep[w], q
                        break
                elif w == _MANY:
                    w = next((x for x in items[at[op] : at[op + 1]] if not ended[x]), _NONE)
                    if w >= 0:
                        behind[q], asleep[w] = asleep[w], q
                        break
                started[op] = 1
            m = mate[op]
            if m != _NONE:
                while asleep[op] >= 0:
                    ready.append(asleep[op])
                    asleep[op] = behind[asleep[op]]
                if m == _MANY:
                    m = next((x for x in meetings[op] if not started[x]), op)
                if not started[m]:
                    behind[q], asleep[m] = asleep[m], q
                    break
            ended[op] = 1
            while asleep[op] >= 0:
                ready.append(asleep[op])
                asleep[op] = behind[asleep[op]]
            k += 1
        place[q] = k
    return [(q, queue[k]) for q, (queue, k) in enumerate(zip(queues, place, strict=True)) if k < len(queue)]


def _one_each(plan: Plan) -> list[list[int]]:
    """Each program's dispatch order."""
    return [list(range(a, b)) for a, b in pairwise(plan.bounds.tolist())]


def _waits(waits: OpLists) -> list[int]:
    """What each op waits for: an op, _NONE or _MANY."""
    count = np.diff(waits.at)
    out = np.where(count > 1, _MANY, _NONE)
    one = np.flatnonzero(count == 1)
    out[one] = waits.items[waits.at[one]]
    found: list[int] = out.tolist()
    return found


def partners(plan: Plan) -> dict[int, tuple[int, ...]]:
    """The other members of each collective that spans programs."""
    members: dict[int, list[int]] = {}
    rows = np.flatnonzero(plan.collective >= 0)
    for row, c in zip(rows.tolist(), plan.collective[rows].tolist(), strict=True):
        members.setdefault(c, []).append(row)
    return {row: tuple(m for m in group if m != row) for group in members.values() for row in group}


def _story(plan: Plan, stuck: list[tuple[int, int]], dispatch: OpDispatch) -> PiperError:
    halted = {op for _, op in stuck}
    meetings = partners(plan)
    lines = []
    for _, op in stuck[:24]:
        program = int(plan.program[op])
        waits = [w for w in plan.waits.row(op).tolist() if w in halted or dispatch is not OpDispatch.SERIAL]
        stream = plan.shapes[int(plan.shape[op])].stream
        mate = int(plan.partner[op])
        mates = (mate,) if mate >= 0 else meetings.get(op, ())
        need = [plan.text(w) for w in waits[:2]]
        need += [f"{plan.text(m)} of program {int(plan.program[m])}" for m in mates[:2]]
        what = ", ".join(need) or "its turn"
        lines.append(f"  program {program} {stream} stands at {plan.text(op)}, which needs {what}")
    return PiperError(
        ErrorKind.DEADLOCK,
        f"the plan cannot finish ({dispatch}):\n" + "\n".join(lines),
        suggestion="let receives be posted before the sends of the peer that they stand against",
    )
