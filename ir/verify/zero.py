"""What ZeRO-2 and ZeRO-3 promise, checked on the final order: reductions reach the update, gathers their users."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from ir.core.ops import Pass
from ir.core.order import IntArray
from ir.graph.graph import Node, Once, illegal
from ir.graph.sync import Bucket, buckets
from ir.graph.zero import gathered, part_nodes, per_microbatch
from ir.plan.plan import OpKind, Plan
from ir.verify.coverage import Instances

_GATHER = re.compile(r"(\d+)AG_[FIWR]\*/(.+?)(?:\+\d+)?", re.ASCII)


@dataclass
class ZeroNeeds:
    """needs: (writer, reader) ops of one program. uses: (op, buffer) of those who write or read a flat buffer, called
    after the op that gathers or reduces it.
    """

    needs: list[tuple[int, int]] = field(default_factory=list)
    uses: list[tuple[int, int]] = field(default_factory=list)


def zero_needs(plan: Plan, found: Instances) -> ZeroNeeds:
    """W -> RS -> what sums it further, AG -> compute. Raises where a reduction or gather is missing."""
    out = ZeroNeeds()
    all_buckets = buckets(plan.graph)
    sharded = per_microbatch(all_buckets)
    if not sharded:
        return out
    flat = [k for k, s in enumerate(plan.shapes) if s.kind is OpKind.COLLECTIVE and not s.covers]
    rows = np.flatnonzero(np.isin(plan.shape, flat)).tolist()
    named = {(int(plan.program[i]), plan.text(i)): i for i in rows}
    for b in sharded:
        for p in b.owners:
            _reductions(plan, found, b, p, named, out)
    _gathers(plan, all_buckets, rows, out)
    return out


def _reductions(
    plan: Plan, found: Instances, b: Bucket, p: int, named: dict[tuple[int, str], int], out: ZeroNeeds
) -> None:
    g = plan.graph
    ws = np.array(part_nodes(g, b, frozenset({Pass.W})), dtype=np.int64)
    inst = found.op[ws, : g.mbs]
    mine = plan.program[inst] == p
    after = [int(found.op[i, p]) for i, n in enumerate(g.nodes) if n.once and p in n.groups and _sums(n, b)]
    for mb in np.flatnonzero(mine.any(axis=0)).tolist():
        contributions = inst[mine[:, mb], mb]
        last = int(contributions.max())
        text = f"{b.stage}RS{mb}/{b.name}"
        row = named.get((p, text))
        if row is None:
            raise illegal(f"program {p}: {text} is missing", f"reduce behind {plan.text(last)}")
        out.needs += [(last, row), *((row, x) for x in after)]
        out.uses += [(int(w), row) for w in contributions] + [(row, row)]


def _sums(node: Node, b: Bucket) -> bool:
    """Whether a once-node reads the bucket's reduced gradients: the update, the norm, the sum over several owners."""
    if node.kind is Once.ALL_REDUCE:
        return (node.stage, node.part) == (b.stage, b.name)
    return node.kind in (Once.NORM, Once.UPDATE)


def _gathers(plan: Plan, found: tuple[Bucket, ...], flat: list[int], out: ZeroNeeds) -> None:
    users = gathered(plan.graph, found)
    if not users:
        return
    at: dict[tuple[int, str], list[int]] = defaultdict(list)
    for row in flat:
        if m := _GATHER.fullmatch(plan.shapes[int(plan.shape[row])].text):
            at[int(plan.program[row]), f"{m[1]}/{m[2]}"].append(row)
    wanted = [{b.key for node, _ in s.covers for b in users.get(node, ())} for s in plan.shapes]
    for shape, keys in enumerate(wanted):
        for key in keys:
            rows = np.flatnonzero(plan.shape == shape)
            for p in np.unique(plan.program[rows]).tolist():
                mine = rows[plan.program[rows] == p]
                _latest(plan, key, mine, np.array(at[p, key], dtype=np.int64), out)


def _latest(plan: Plan, key: str, users: IntArray, gathers: IntArray, out: ZeroNeeds) -> None:
    k = np.searchsorted(gathers, users) - 1
    if (k < 0).any():
        row = int(users[np.argmax(k < 0)])
        raise illegal(f"program {int(plan.program[row])}: nothing gathers {key} before {plan.text(row)}")
    pairs = list(zip(gathers[k].tolist(), users.tolist(), strict=True))
    out.needs += pairs
    out.uses += [(user, gather) for gather, user in pairs]
