"""What ZeRO-2 and ZeRO-3 promise, checked on the final order: each microbatch's reductions, gathers and their room."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ir.core.errors import PiperError
from ir.core.order import IntArray
from ir.graph.graph import illegal
from ir.plan.plan import CollectiveRole, OpKind, Plan
from ir.verify.coverage import OpInstances
from ir.verify.held import HeldShards
from ir.verify.once import StepTail

_NONE, _UNUSED = np.zeros((0, 2), dtype=np.int64), np.zeros((0, 3), dtype=np.int64)


@dataclass(frozen=True, eq=False)
class BufferReading:
    """Which op reads which gathered weights: one entry per op and bucket, in the plan's order of ops.

    cover: the last of the op's that does. gather: the op that brought them. gathers: all there are.
    """

    op: IntArray
    cover: IntArray
    bucket: IntArray
    gather: IntArray
    gathers: IntArray


@dataclass(frozen=True, eq=False)
class ZeroBucketNeeds:
    """needs: [needed op, op that needs it] of one program. uses: [op, cover, flat buffer] of those who write or read
    one, which is called after the op that gathers or reduces it.
    """

    needs: IntArray
    uses: IntArray
    read: BufferReading


def zero_needs(plan: Plan, found: OpInstances, holds: Sequence[HeldShards], tail: StepTail) -> ZeroBucketNeeds:
    """W -> RS -> what sums it further, AG -> compute. Raises where a reduction or gather is missing, early or idle."""
    passing = [h for h in holds if h.passing]
    at = {h.bucket.key: k for k, h in enumerate(passing)}
    roles = {
        role: np.flatnonzero(np.array([s.role is role for s in plan.shapes])[plan.shape]) for role in CollectiveRole
    }
    of_shape = np.array([at.get(s.bucket, -1) if s.role else -1 for s in plan.shapes], dtype=np.int64)
    for rows in roles.values():
        if (stray := rows[of_shape[plan.shape[rows]] < 0]).size:
            raise _wrong(plan, stray, "is about a bucket that is not divided")
    if not passing:
        nothing = np.zeros(0, dtype=np.int64)
        return ZeroBucketNeeds(_NONE, _UNUSED, BufferReading(nothing, nothing, nothing, nothing, nothing))
    _check_messages(plan, passing, of_shape)
    needs, uses = _reductions(plan, found, passing, tail, roles[CollectiveRole.REDUCE], of_shape)
    read = _readings(plan, passing, roles[CollectiveRole.GATHER], of_shape)
    needs = np.concatenate([needs, np.stack([read.gather, read.op], 1)])
    return ZeroBucketNeeds(needs, np.concatenate([uses, np.stack([read.op, read.cover, read.gather], 1)]), read)


def _check_messages(plan: Plan, passing: Sequence[HeldShards], of_shape: IntArray) -> None:
    assert plan.graph.source is not None
    reduce, gather = plan.graph.source.sync_bytes()
    for s, k in zip(plan.shapes, of_shape.tolist(), strict=True):
        if k >= 0:
            h = passing[k]
            size = h.share * h.inside * (reduce if s.role is CollectiveRole.REDUCE else gather)
            if s.message is None or set(s.message.axes) != h.over or s.message.bytes != size:
                raise illegal(f"{s.text} is not {size} bytes over {sorted(h.over)}: {s.message}")


def _reductions(
    plan: Plan, found: OpInstances, passing: Sequence[HeldShards], tail: StepTail, rows: IntArray, of_shape: IntArray
) -> tuple[IntArray, IntArray]:
    """Each bucket's gradient of each microbatch is reduced once, where all of it was made, before anybody reads it."""
    g, needs, uses = plan.graph, [_NONE], [_UNUSED]
    bucket = of_shape[plan.shape[rows]]
    reducing = np.full((len(passing), plan.programs, g.mbs), -1, dtype=np.int64)
    reducing[bucket, plan.program[rows], plan.mb[rows]] = rows
    if (twice := rows[reducing[bucket, plan.program[rows], plan.mb[rows]] != rows]).size:
        raise _wrong(plan, twice, "reduces it again")
    for k, h in enumerate(passing):
        adds = np.array(h.adds, dtype=np.int64)
        op, cover = found.op[adds, : g.mbs], found.cover[adds, : g.mbs]
        for p in h.bucket.owners:
            mine = plan.program[op] == p
            made, done = mine.any(axis=0), reducing[k, p]
            if (lost := np.flatnonzero(made & (done < 0))).size:
                text = f"{h.bucket.stage}{CollectiveRole.REDUCE}{int(lost[0])}/{h.bucket.name}"
                last = int(np.where(mine, op, -1)[:, lost[0]].max())
                raise illegal(f"program {p}: {text} is missing", f"reduce behind {plan.text(last)}")
            if (idle := done[~made & (done >= 0)]).size:
                raise _wrong(plan, idle, "reduces what this program does not make")
            done = done[made]
            after = [tail.follow(p), tail.updates[p], *tail.summing(g, h.bucket, p)]
            needs += [np.stack([np.where(mine, op, -1)[:, made].max(axis=0), done], 1)]
            needs += [np.stack([done, np.full(len(done), found.op[i, p])], 1) for i in dict.fromkeys(after)]
            into = np.broadcast_to(reducing[k, p], op.shape)
            uses += [np.stack([op[mine], cover[mine], into[mine]], 1), np.stack([done, 0 * done, done], 1)]
        reducing[k, list(h.bucket.owners)] = -1
    if (idle := reducing[reducing >= 0]).size:
        raise _wrong(plan, idle, "reduces what this program does not hold")
    return np.concatenate(needs), np.concatenate(uses)


def _readings(plan: Plan, passing: Sequence[HeldShards], gathers: IntArray, of_shape: IntArray) -> BufferReading:
    """Every op that reads divided weights, with the gather that stands last before it. Each gather brings some."""
    readers: dict[int, list[int]] = {}
    for k, h in enumerate(passing):
        if h.level == 3:
            for i in h.users:
                readers.setdefault(i, []).append(k)
    # The last cover of a shape that reads each bucket: later ones overwrite what earlier ones said.
    wanted = [{k: c for c, (node, _) in enumerate(s.covers) for k in readers.get(node, ())} for s in plan.shapes]
    count = np.array([len(w) for w in wanted], dtype=np.int64)
    flat, last_cover = np.array([x for w in wanted for x in w.items()], dtype=np.int64).reshape(-1, 2).T
    ops = np.flatnonzero((count[plan.shape] > 0) & (plan.kind == OpKind.COMPUTE))
    per = count[plan.shape[ops]]
    op = np.repeat(ops, per)
    inside = np.arange(len(op)) - np.repeat(np.cumsum(per) - per, per)
    entry = (np.cumsum(count) - count)[plan.shape[op]] + inside
    bucket = flat[entry]

    def code(rows: IntArray, buckets: IntArray) -> IntArray:
        return (plan.program[rows] * len(passing) + buckets) * len(plan) + rows

    brings = np.concatenate([[-1], np.sort(code(gathers, of_shape[plan.shape[gathers]]))])
    wants = code(op, bucket)
    last = brings[np.searchsorted(brings, wants) - 1]
    none = last // len(plan) != wants // len(plan)
    if none.any():
        row, key = int(op[np.argmax(none)]), passing[int(bucket[np.argmax(none)])].bucket.key
        raise illegal(f"program {int(plan.program[row])}: nothing gathers {key} before {plan.text(row)}")
    return BufferReading(op, last_cover[entry], bucket, last % len(plan), gathers)


def check_room(plan: Plan, read: BufferReading) -> None:
    """No gather comes before its room: `prefetch` readings ahead of its own, and when no more buckets are there than
    that, or than its op reads, beside it; and none brings what is there, or what nobody reads.

    Buffers are known to be sound.
    """
    ahead = max(plan.graph.prefetch, 0)
    gathers, first = np.unique(read.gather, return_index=True)
    op, bucket = read.op[first], read.bucket[first]
    if (idle := np.setdiff1d(read.gathers, gathers)).size:
        raise _wrong(plan, idle, "gathers what nobody reads")
    begin, end = np.searchsorted(read.op, op), np.searchsorted(read.op, op, side="right")
    # An op's weights that are there already count before those that are gathered for it, which count in their order.
    by = np.lexsort((gathers, op))
    highest = np.searchsorted(op[by], op, side="right")
    number = np.empty(len(op), dtype=np.int64)
    number[by] = np.arange(len(op))
    start = np.searchsorted(read.op, plan.bounds[plan.program[op]])
    since = read.op[np.maximum(end - highest + number - ahead, start)]
    compute = np.maximum.accumulate(np.where(plan.kind == OpKind.COMPUTE, np.arange(len(plan)), -1))
    before = np.where(since > 0, compute[since - 1], -1)
    if (early := gathers[(gathers < before) & (plan.program[np.maximum(before, 0)] == plan.program[gathers])]).size:
        raise _wrong(plan, early, f"is more than {ahead} readings ahead of its own")
    ends = _freed(plan, gathers)
    alive = np.arange(1, len(gathers) + 1) - np.searchsorted(np.sort(ends), gathers)
    if (full := gathers[alive > np.maximum(ahead + 1, end - begin)]).size:
        raise _wrong(plan, full, "is dispatched before there is room for it")
    by = np.lexsort((gathers, bucket, plan.program[gathers]))
    same = (np.diff(bucket[by]) == 0) & (np.diff(plan.program[gathers[by]]) == 0)
    if (again := gathers[by[1:]][same & (ends[by[:-1]] > gathers[by[1:]])]).size:
        raise _wrong(plan, again, "gathers again what is there")


def _freed(plan: Plan, gathers: IntArray) -> IntArray:
    """The op that frees what each gather brings; what nobody frees stays to its program's end."""
    b, out = plan.buffers, np.full(len(plan), -1, dtype=np.int64)
    out[b.slot[b.node < 0]] = b.free[b.node < 0]
    ends = out[gathers]
    return np.where(ends >= 0, ends, plan.bounds[plan.program[gathers] + 1] - 1)


def _wrong(plan: Plan, rows: IntArray, why: str) -> PiperError:
    return illegal(f"{plan.where(int(rows[0]))} {why}")
