"""The smallest ways to spoil a plan: one op, one cover, one name off; with the names of which a refusal says one."""

from dataclasses import replace
from itertools import pairwise
from random import Random
from weakref import WeakKeyDictionary

import numpy as np

from ir.graph.graph import Graph, PerStepOp
from ir.graph.sync import Bucket, buckets
from ir.plan.plan import AT_START, CollectiveRole, OpKind, Plan
from tests.ir.verify.defects import Defect, Spoiled, names
from tests.ir.verify.edits import csr, rearranged, with_buffers


def wait_one_op_short(plan: Plan, rng: Random) -> Spoiled:
    """A wait for an op becomes one for the op before it on its stream; of neighbours in the plan, if there are any."""
    row, on = plan.waits.rows(), plan.waits.items
    before = {b: a for queue in plan.queues for a, b in pairwise(queue)}
    found = [(r, w) for r, w in zip(row.tolist(), on.tolist(), strict=True) if w in before]
    near = [(r, w) for r, w in found if before[w] == w - 1]
    if not found:
        return None
    r, w = rng.choice(near or found)
    return _waiting(plan, r, w, before[w]), names(plan, r, w)


def _waiting(plan: Plan, r: int, w: int, instead: int | None) -> Plan:
    rows = [plan.waits.row(i).tolist() for i in range(len(plan))]
    rows[r].remove(w)
    if instead is not None and instead not in rows[r]:
        rows[r].append(instead)
    return replace(plan, waits=csr(rows))


def _once(plan: Plan, *kinds: PerStepOp) -> list[int]:
    of = [plan.graph.nodes[s.covers[0][0]].kind if s.covers else None for s in plan.shapes]
    return [i for i, s in enumerate(plan.shape.tolist()) if of[s] in kinds]


def norm_before_reduction(plan: Plan, rng: Random) -> Spoiled:
    """The norm is taken before the last sum of its stream, or does not wait for those of another."""
    sums = [i for i, s in enumerate(plan.shape.tolist()) if plan.shapes[s].role is CollectiveRole.REDUCE]
    sums += _once(plan, PerStepOp.REDUCE, PerStepOp.ALL_REDUCE)
    pairs = []
    for n in _once(plan, PerStepOp.NORM):
        mine = [i for i in sums if plan.program[i] == plan.program[n]]
        waited = [i for i in mine if i in plan.waits.row(n).tolist()]
        pairs += [(n, i) for i in waited] or [(n, i) for i in mine[-1:] if plan.stream[i] == plan.stream[n]]
    if not pairs:
        return None
    norm, last = rng.choice(pairs)
    if plan.stream[norm] != plan.stream[last]:
        return _waiting(plan, norm, last, None), names(plan, norm, last)
    rows = list(range(len(plan)))
    rows.insert(rows.index(max(i for i in sums if i < norm)), rows.pop(norm))
    return rearranged(plan, rows), names(plan, norm, last)


def doubled_transfer(plan: Plan, rng: Random) -> Spoiled:
    """A message is sent, and received, twice in a row: each copy has its other end."""
    sends = np.flatnonzero((plan.kind == OpKind.SEND) & (plan.partner >= 0)).tolist()
    if not sends:
        return None
    send = rng.choice(sends)
    recv = int(plan.partner[send])
    rows = [x for i in range(len(plan)) for x in ([i, i] if i in (send, recv) else [i])]
    twice = rearranged(plan, rows)
    partner = twice.partner.copy()
    a, b = rows.index(send) + 1, rows.index(recv) + 1
    partner[[a, b]] = [b, a]
    return replace(twice, partner=partner), names(plan, send, recv)


def _gathers(plan: Plan) -> list[int]:
    return [i for i, s in enumerate(plan.shape.tolist()) if plan.shapes[s].role is CollectiveRole.GATHER]


def lost_first_gather(plan: Plan, rng: Random) -> Spoiled:
    """Nobody brings a bucket's weights before they are read the first time."""
    first = {(plan.program[i], plan.shapes[int(plan.shape[i])].bucket): i for i in reversed(_gathers(plan))}
    if not first:
        return None
    (_, bucket), lost = rng.choice(sorted(first.items(), key=lambda x: x[1]))
    return rearranged(plan, [i for i in range(len(plan)) if i != lost]), {f"nothing gathers {bucket} before "}


def idle_reduction(plan: Plan, rng: Random) -> Spoiled:
    """A bucket is reduced once more: of a microbatch whose gradient is not made there, or by a program without it."""
    of = {i: plan.shapes[s] for i, s in enumerate(plan.shape.tolist()) if plan.shapes[s].role is CollectiveRole.REDUCE}
    made = {(int(plan.program[i]), s.bucket, int(plan.mb[i])) for i, s in of.items()}
    holds = {(p, bucket): p for p, bucket, _ in made}
    places = [(i, p, mb) for i in of for p in range(plan.programs) for mb in range(plan.graph.mbs)]
    idle = [(i, p, mb) for i, p, mb in places if (p, of[i].bucket, mb) not in made and plan.mb[i] <= mb]
    if not idle:
        return None
    i, p, mb = rng.choice(idle)
    rows, program = [*range(len(plan)), i], [*plan.program.tolist(), p]
    more = rearranged(plan, rows, program)
    at = int(more.bounds[p + 1]) - 1
    more.mb[at] = mb
    return more, {f"does not {'make' if (p, of[i].bucket) in holds else 'hold'}"}


def gather_one_op_early(plan: Plan, rng: Random) -> Spoiled:
    """A gather is dispatched before the compute op that it stood behind, and follows the one before that."""
    gathers = _gathers(plan)
    compute = plan.kind == OpKind.COMPUTE
    found = []
    for g in gathers:
        back = [i for i in range(int(plan.bounds[plan.program[g]]), g) if compute[i]]
        queue = plan.queues[int(plan.stream[g])]
        if back and not any(back[-1] < other < g for other in {*gathers, *queue}):  # it passes compute alone
            found.append((g, back))
    if not found:
        return None
    g, back = rng.choice(found)
    waits = [plan.waits.row(i).tolist() for i in range(len(plan))]
    # What it waited for, the next op of its stream waits for now.
    behind = next((i for i in plan.queues[int(plan.stream[g])] if i > g), None)
    if behind is not None:
        waits[behind] += [w for w in waits[g] if w >= back[-1]]
    waits[g] = [w for w in waits[g] if w < back[-1]] + ([back[-2]] if back[1:] else [])
    rows = list(range(len(plan)))
    rows.insert(back[-1], rows.pop(g))
    return rearranged(replace(plan, waits=csr([sorted({*w}) for w in waits])), rows), names(plan, g)


def torn_free_off_by_one(plan: Plan, rng: Random) -> Spoiled:
    """A buffer dies one cover before the last that reads it, inside one op."""
    b = plan.buffers
    found = np.flatnonzero((b.free >= 0) & (b.free_cover > AT_START)).tolist()
    if not found:
        return None
    k = rng.choice(found)
    cover = b.free_cover.copy()
    cover[k] -= 1
    return with_buffers(plan, free_cover=cover), {plan.buffer_name(k)}


# -- buckets ----------------------------------------------------------------------------------------------------------


_SPOILED: WeakKeyDictionary[Graph, tuple[Bucket, ...]] = WeakKeyDictionary()


def found_buckets(graph: Graph) -> tuple[Bucket, ...]:
    """In place of `buckets`: a spoiled graph's are others than it would have."""
    return _SPOILED.get(graph) or buckets(graph)


def _rebucketed(plan: Plan, old: Bucket, new: Bucket) -> Plan:
    """The plan of a graph that has another bucket instead of one."""
    graph = replace(plan.graph)
    _SPOILED[graph] = tuple(new if b is old else b for b in buckets(plan.graph))
    return replace(plan, graph=graph)


def shared_bucket_key(plan: Plan, rng: Random) -> Spoiled:
    found = buckets(plan.graph)
    pairs = [(a, b) for a in found for b in found if a is not b and a.stage == b.stage]
    if not pairs:
        return None
    a, b = rng.choice(pairs)
    return _rebucketed(plan, b, replace(b, name=a.name)), {a.key}


def bucket_without_a_parameter(plan: Plan, rng: Random) -> Spoiled:
    found = [b for b in buckets(plan.graph) if b.params]
    if not found:
        return None
    b = rng.choice(found)
    lost = rng.choice(b.params)
    return _rebucketed(plan, b, replace(b, params=tuple(p for p in b.params if p != lost))), {lost}


def bucket_without_an_owner(plan: Plan, rng: Random) -> Spoiled:
    found = [b for b in buckets(plan.graph) if len(b.owners) > 1]
    if not found:
        return None
    b = rng.choice(found)
    return _rebucketed(plan, b, replace(b, owners=b.owners[1:])), {b.key}


def bucket_of_a_smaller_share(plan: Plan, rng: Random) -> Spoiled:
    found = buckets(plan.graph)
    if not found:
        return None
    b = rng.choice(found)
    return _rebucketed(plan, b, replace(b, numel=b.numel - 1)), {b.key}


SMALL: dict[str, Defect] = {
    f.__name__: f
    for f in (
        wait_one_op_short,
        norm_before_reduction,
        doubled_transfer,
        lost_first_gather,
        idle_reduction,
        gather_one_op_early,
        torn_free_off_by_one,
        shared_bucket_key,
        bucket_without_a_parameter,
        bucket_without_an_owner,
        bucket_of_a_smaller_share,
    )
}
