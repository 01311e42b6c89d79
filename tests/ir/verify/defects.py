"""Ways to spoil a plan, each with the names of which a refusal must say one."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np

from ir.core.order import IntArray
from ir.plan.plan import AT_START, OpKind, Plan
from tests.ir.verify.edits import doubled_buffer, rearranged, with_buffers, with_waits

Spoiled = tuple[Plan, set[str]] | None  # None: this plan has no place for the defect
Defect = Callable[[Plan, Random], Spoiled]


def names(plan: Plan, *rows: int) -> set[str]:
    """What an op may be called in a message: its text, or its first nodes' where it stands for several."""
    out = set()
    for i in rows:
        out.add(plan.text(i))
        mbs = (int(plan.mb[i]), int(plan.mb2[i]))
        out |= {
            plan.graph.nodes[n].text(None if plan.graph.nodes[n].once else mbs[m])
            for n, m in plan.shapes[int(plan.shape[i])].covers
        }
        if plan.shapes[int(plan.shape[i])].role:
            stage, _, bucket = plan.shapes[int(plan.shape[i])].bucket.partition("/")
            out |= {f"{stage}/{bucket}", f"/{bucket}"}
    return out


def dropped_op(plan: Plan, rng: Random) -> Spoiled:
    i = rng.randrange(len(plan))
    other = [int(plan.partner[i])] if plan.partner[i] >= 0 else []
    # Whoever waited for it has lost, with that wait, what stands before it on its stream; and so has who follows there.
    other += plan.waits.rows()[plan.waits.items == i].tolist()
    other += (i + 1 + np.flatnonzero(plan.stream[i + 1 :] == plan.stream[i])[:1]).tolist()
    return rearranged(plan, [k for k in range(len(plan)) if k != i]), names(plan, i, *other)


def doubled_op(plan: Plan, rng: Random) -> Spoiled:
    i = rng.randrange(len(plan))
    p = int(plan.program[i])
    at = rng.randrange(int(plan.bounds[p]), int(plan.bounds[p + 1]) + 1)
    rows = list(range(len(plan)))
    rows.insert(at, i)
    program = plan.program.tolist()
    program.insert(at, p)
    return rearranged(plan, rows, program), names(plan, i)


def swapped_sends(plan: Plan, rng: Random) -> Spoiled:
    channels: dict[tuple[int, int], list[int]] = {}
    for i in np.flatnonzero(plan.kind == OpKind.SEND).tolist():
        channels.setdefault((int(plan.program[i]), plan.shapes[int(plan.shape[i])].peer), []).append(i)
    pairs = [(a, b) for sends in channels.values() for a, b in pairwise(sends)]
    if not pairs:
        return None
    a, b = rng.choice(pairs)
    return _swapped(plan, a, b), {plan.text(a)} if rng.random() < 0.5 else {plan.text(b)}


def swapped_across_an_edge(plan: Plan, rng: Random) -> Spoiled:
    """Two compute ops of which the second reads the first change places."""
    g = plan.graph
    where: dict[tuple[int, int], int] = {}
    for i in np.flatnonzero(plan.kind == OpKind.COMPUTE).tolist():
        mbs = (int(plan.mb[i]), int(plan.mb2[i]))
        where.update(((n, mbs[m]), i) for n, m in plan.shapes[int(plan.shape[i])].covers if not g.nodes[n].once)
    pairs = [
        (where[e.src, mb], where[e.dst, mb])
        for e in g.edges
        if not e.join
        for mb in range(g.mbs)
        if (e.src, mb) in where and (e.dst, mb) in where
    ]
    pairs = [(a, b) for a, b in pairs if a != b and plan.program[a] == plan.program[b]]
    if not pairs:
        return None
    a, b = rng.choice(pairs)
    return _swapped(plan, a, b), names(plan, b)


def _swapped(plan: Plan, a: int, b: int) -> Plan:
    rows = list(range(len(plan)))
    rows[a], rows[b] = b, a
    return rearranged(plan, rows)


def freed_too_early(plan: Plan, rng: Random) -> Spoiled:
    """A buffer that another op reads is freed by the compute op before that reader."""
    b = plan.buffers
    compute = np.flatnonzero(plan.kind == OpKind.COMPUTE)
    candidates = []
    for k in np.flatnonzero((b.free >= 0) & (b.free_cover > AT_START) & (b.free != b.alloc)).tolist():
        before = compute[(compute < b.free[k]) & (compute >= b.alloc[k])]
        if len(before):
            candidates.append((k, int(before[-1])))
    if not candidates:
        return None
    k, at = rng.choice(candidates)
    return with_buffers(plan, free=_with(b.free, k, at)), {plan.buffer_name(k)}


def freed_twice(plan: Plan, rng: Random) -> Spoiled:
    own = np.flatnonzero(plan.buffers.node >= 0).tolist()
    if not own:
        return None
    k = rng.choice(own)
    return doubled_buffer(plan, k), {plan.buffer_name(k)}


def lost_buffer(plan: Plan, rng: Random) -> Spoiled:
    b = plan.buffers
    if not len(b):
        return None
    k = rng.randrange(len(b))
    index = np.delete(np.arange(len(b)), k)
    names_of = {plan.text(int(b.slot[k]))} if b.node[k] < 0 else names(plan, int(b.alloc[k]))
    node = int(b.node[k])
    called = names_of | ({plan.graph.nodes[node].text(int(b.mb[k]))} if node >= 0 else set())
    return with_buffers(plan, **{f: getattr(b, f)[index] for f in b.__dataclass_fields__}), called


def freed_by_communication(plan: Plan, rng: Random) -> Spoiled:
    b = plan.buffers
    wires = np.flatnonzero(plan.kind != OpKind.COMPUTE)
    found = []
    for k in np.flatnonzero((b.free >= 0) & (b.free != b.alloc)).tolist():
        later = wires[(wires > b.free[k]) & (plan.program[wires] == plan.program[b.free[k]])]
        if len(later):
            found.append((k, int(later[0])))
    if not found:
        return None
    k, at = rng.choice(found)
    return with_buffers(plan, free=_with(b.free, k, at)), {plan.text(at)}


def freed_elsewhere(plan: Plan, rng: Random) -> Spoiled:
    b = plan.buffers
    if plan.programs < 2 or not (b.free >= 0).any():
        return None
    k = rng.choice(np.flatnonzero(b.free >= 0).tolist())
    there = np.flatnonzero((plan.program != plan.program[b.free[k]]) & (plan.kind == OpKind.COMPUTE))
    return with_buffers(plan, free=_with(b.free, k, int(rng.choice(there.tolist())))), {plan.buffer_name(k)}


def _with(column: IntArray, k: int, value: int) -> IntArray:
    out = column.copy()
    out[k] = value
    return out


def missing_wait(plan: Plan, rng: Random) -> Spoiled:
    """Every wait is there for a reason: data, memory, or a proof that a reader is done."""
    row, on = plan.waits.rows(), plan.waits.items
    if not len(row):
        return None
    k = rng.randrange(len(row))
    r, w = int(row[k]), int(on[k])
    # A free's wait is missed where the buffer dies, which may be later on the same stream.
    later = [i for i in plan.queues[int(plan.stream[r])] if i >= r]
    spoiled = with_waits(plan, drop=(r, w))
    return spoiled, {plan.text(w)} | names(plan, w) | ({plan.text(r)} if later else set())


def wait_on_another_program(plan: Plan, rng: Random) -> Spoiled:
    i, j = rng.randrange(len(plan)), rng.randrange(len(plan))
    if plan.program[i] == plan.program[j]:
        return None
    return with_waits(plan, add=(i, j)), {plan.text(j)}


def wait_for_what_comes_later(plan: Plan, rng: Random) -> Spoiled:
    i = rng.randrange(len(plan) - 1)
    j = rng.randrange(i + 1, len(plan))
    return (with_waits(plan, add=(i, j)), {plan.text(j)}) if plan.program[i] == plan.program[j] else None


def bucket_begun_late(plan: Plan, rng: Random) -> Spoiled:
    """A flat gradient is allocated behind the op that first writes to it."""
    b = plan.buffers
    found = []
    for k in np.flatnonzero((b.node < 0) & (b.alloc != b.slot)).tolist():
        later = [i for i in range(int(b.alloc[k]) + 1, int(b.slot[k])) if plan.kind[i] == OpKind.COMPUTE]
        if later:
            found.append((k, later[0]))
    if not found:
        return None
    k, at = rng.choice(found)
    return with_buffers(plan, alloc=_with(b.alloc, k, at)), {plan.buffer_name(k)}


def wrong_program(plan: Plan, rng: Random) -> Spoiled:
    if plan.programs < 2:
        return None
    i = rng.randrange(len(plan))
    program = plan.program.tolist()
    program[i] = (program[i] + rng.randrange(1, plan.programs)) % plan.programs
    other = [int(plan.partner[i])] if plan.partner[i] >= 0 else []
    return rearranged(plan, list(range(len(plan))), program), names(plan, i, *other)


def missing_once(plan: Plan, rng: Random) -> Spoiled:
    nodes = plan.graph.nodes
    once = [i for i in range(len(plan)) if (c := plan.shapes[int(plan.shape[i])].covers) and nodes[c[0][0]].once]
    if not once:
        return None
    i = rng.choice(once)
    return rearranged(plan, [k for k in range(len(plan)) if k != i]), {plan.text(i)}


def swapped_reductions(plan: Plan, rng: Random) -> Spoiled:
    """Two reductions over the same owners stand in another order on one of them."""
    met = np.flatnonzero(plan.collective >= 0).tolist()
    owners: dict[int, list[int]] = {}
    for i in met:
        owners.setdefault(int(plan.collective[i]), []).append(int(plan.program[i]))
    streams = [plan.shapes[int(s)].stream for s in plan.shape]
    pairs = [
        (a, b)
        for a in met
        for b in met
        if a < b
        and plan.program[a] == plan.program[b]
        and streams[a] == streams[b]
        and len({*owners[int(plan.collective[a])]} & {*owners[int(plan.collective[b])]}) > 1
    ]
    if not pairs:
        return None
    a, b = rng.choice(pairs)
    return _swapped(plan, a, b), {plan.text(a), plan.text(b)}


def wrong_partner(plan: Plan, rng: Random) -> Spoiled:
    """Two receives are told each other's sends."""
    recv = np.flatnonzero(plan.kind == OpKind.RECV).tolist()
    if len(recv) < 2:
        return None
    a, b = rng.sample(recv, 2)
    partner = plan.partner.copy()
    partner[[a, b]] = partner[[b, a]]
    partner[partner[[a, b]]] = [a, b]
    return replace(plan, partner=partner), {plan.text(a), plan.text(b), *(plan.text(int(s)) for s in partner[[a, b]])}


LARGE: dict[str, Defect] = {
    f.__name__: f
    for f in (
        dropped_op,
        doubled_op,
        swapped_sends,
        swapped_across_an_edge,
        freed_too_early,
        freed_twice,
        lost_buffer,
        freed_by_communication,
        freed_elsewhere,
        missing_wait,
        wait_on_another_program,
        wait_for_what_comes_later,
        bucket_begun_late,
        wrong_program,
        missing_once,
        swapped_reductions,
        wrong_partner,
    )
}
