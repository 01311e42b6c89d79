"""What a plan keeps in memory, and its level over time: exact sums over its buffers, no formula."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from cost_models import OptimizerMemory, OptimizerPrecision, state_bytes
from ir.core.ops import Pass
from ir.core.order import BoolArray, FloatArray, IntArray
from ir.graph.sync import Bucket, buckets
from ir.plan.kept import once_per_plan
from ir.plan.plan import AT_START, OpKind, Plan
from ir.trace.trace import MemorySamples
from ir.workload.params import local_numel
from piper_sim.memory.events import COLUMNS, WORKSPACE, MemoryEvents

_STATE = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True, eq=False)
class Memory:
    """Bytes over one step. peak: per program, all that is allocated; at: the op that makes the peak.

    dynamic: [program, column] at the peak, columns activations, buffers, workspace, gradients made anew. level: [op]
    bytes after each op, high: [op] the most while it runs; both without `state`. asked: (op, signed bytes, request) of
    every event. made: of `gradients_made`.
    """

    state: tuple[OptimizerMemory, ...]
    peak: IntArray
    at: IntArray
    dynamic: IntArray
    level: IntArray
    high: IntArray
    asked: tuple[IntArray, IntArray, IntArray]
    library: int = 0
    made: IntArray | None = None

    def breakdown(self, program: int) -> dict[str, int]:
        """What the peak consists of, context left out."""
        s = self.state[program]
        out = {"parameters": s.parameters, "gradients": s.gradients, "optimizer": s.optimizer}
        for i, name in enumerate(COLUMNS):
            out[name] = out.get(name, 0) + int(self.dynamic[program, i])
        return out


@once_per_plan
def state(plan: Plan, recipe: OptimizerPrecision) -> tuple[OptimizerMemory, ...]:
    """Parameters, gradients and optimizer of each program, one copy of each parameter, sharded as its bucket says;
    those that nobody trains are whole."""
    out = []
    found, frozen = buckets(plan.graph), _frozen(plan)
    for p in range(plan.programs):
        mine = [b for b in found if p in b.owners]
        parts = [_held(b, recipe) for b in mine]
        out.append(
            OptimizerMemory(
                sum(x.parameters for x in parts) + frozen[p] * recipe.params.bytes,
                sum(x.gradients for x in parts),
                sum(x.optimizer for x in parts),
            )
        )
    return tuple(out)


def _frozen(plan: Plan) -> list[int]:
    """[program] elements of the parameters that it reads and nobody trains, each once."""
    held: list[dict[str, int]] = [{} for _ in range(plan.programs)]
    groups = {n.stage: n.groups for n in plan.graph.nodes if not n.once}
    for e in (e for e in plan.graph.entries if e.part.frozen):
        for program in groups[e.stage]:
            held[program] |= {p.name: local_numel(p, e.layout) for p in e.part.frozen}
    return [sum(x.values()) for x in held]


def _held(b: Bucket, recipe: OptimizerPrecision) -> OptimizerMemory:
    """What one owner of a bucket keeps. Where its shares are whole matrices, they are padded to the largest."""
    zero, own = b.replica.zero, recipe if b.matrices else recipe.others
    apart = recipe.tied_apart and zero == 1 and "tied" in b.name.split(".")
    ranks = b.ranks // len(b.owners) if apart else b.ranks
    numel = b.shard * ranks if zero and b.matrices else b.numel
    return state_bytes(numel, own, *(ranks if zero >= level else 1 for level in (3, 2, 1)), alone=b.alone)


def gradients_made(plan: Plan, recipe: OptimizerPrecision) -> IntArray | None:
    """[node] bytes of the gradients that its first pass makes, each where backward first comes to it; None: they
    persist.
    """
    if not recipe.fresh:
        return None
    graph, lasting = plan.graph, replace(recipe, fresh=False, grad_copy=0)
    share = {m: _held(b, lasting).gradients / b.numel for b in buckets(graph) for m in b.members if b.numel}
    where = {n.stage: n.groups for n in graph.nodes if not n.once}
    numel, known = dict[tuple[int, str], float](), set[tuple[str, tuple[int, ...] | None]]()
    for i, e in reversed(list(enumerate(graph.entries))):  # backward comes to a tied parameter by the head
        new = [p for p in e.part.params if (p.name, where.get(e.stage)) not in known]
        known |= {(p.name, where.get(e.stage)) for p in new}
        numel[e.stage, e.name] = share.get(i, 0.0) * sum(local_numel(p, e.layout) for p in new)
    return np.array([int(numel.get((n.stage, n.part), 0)) if n.kind is Pass.W else 0 for n in graph.nodes])


def memory(
    plan: Plan,
    persistent: tuple[OptimizerMemory, ...],
    workspace: IntArray | None = None,
    library: int = 0,
    made: IntArray | None = None,
) -> Memory:
    """Walk every program's dispatch order, cover by cover: allocate, note the level, free.

    workspace: [node, microbatch] bytes while a node runs, where they differ from the graph's. library: bytes that
    libraries keep for their own workspaces, always there. made: [node] bytes of gradients, where none persist.
    """
    found = MemoryEvents.of(plan, made)
    size = found.signed(found.sizes(plan, workspace))
    total, cuts = found.levels(size), found.cuts
    peak = np.array([s.total for s in persistent], dtype=np.int64)
    at = np.zeros(plan.programs, dtype=np.int64)
    dynamic = np.zeros((plan.programs, len(COLUMNS)), dtype=np.int64)
    for p, (a, b) in enumerate(pairwise(cuts.tolist())):
        if a < b:
            k = a + int(np.argmax(total[a:b])) + 1
            peak[p] += total[k - 1]
            at[p] = found.op[k - 1]
            dynamic[p] = [size[a:k][found.column[a:k] == c].sum() for c in range(len(COLUMNS))]
    after, high = _per_op(plan, found.op, total, found.running)
    dynamic[:, WORKSPACE] += library
    levels = (after + library, high + library)
    return Memory(persistent, peak + library, at, dynamic, *levels, (found.op, size, found.request), library, made)


def _per_op(plan: Plan, op: IntArray, total: IntArray, running: BoolArray) -> tuple[IntArray, IntArray]:
    """[op] bytes after it, and the most while it runs: from what it finds when its first frees are done."""
    n, b = len(plan), plan.buffers
    last = np.cumsum(np.bincount(op, minlength=n)) - 1
    valid = last >= 0
    valid[valid] = plan.program[op[last[valid]]] == plan.program[valid]
    after = np.zeros(n, dtype=np.int64)
    after[valid] = total[last[valid]]
    high = np.roll(after, 1)
    high[plan.bounds[:-1]] = 0
    early = np.flatnonzero((b.free >= 0) & (b.free_cover == AT_START))
    np.subtract.at(high, b.free[early], b.bytes[early])
    np.maximum.at(high, op[running], total[running])
    return after, high


def samples(plan: Plan, found: Memory, start: FloatArray, end: FloatArray) -> MemorySamples:
    """The level over time, at compute ops: the most while each runs, and what is left behind it.

    What communication allocates counts with the compute op dispatched behind it: the highest sample is the peak.
    """
    rows, owner = _owners(plan)
    program = plan.program[rows]
    high = np.zeros(len(rows), dtype=np.int64)
    np.maximum.at(high, owner, found.high)
    fixed = np.array([s.total for s in found.state], dtype=np.int64)[program]
    time = np.stack([start[rows], end[rows]], axis=1).ravel()
    value = np.stack([high + fixed, found.level[rows] + fixed], axis=1).ravel()
    return MemorySamples(np.repeat(program, 2), time, value)


def _owners(plan: Plan) -> tuple[IntArray, IntArray]:
    """Compute ops, and [op] which of them it counts with: itself, or the one dispatched behind it."""
    rows = np.flatnonzero(plan.kind == OpKind.COMPUTE)
    program = plan.program[rows]
    owner = np.minimum(np.searchsorted(rows, np.arange(len(plan))), len(rows) - 1)
    return rows, owner - (program[owner] != plan.program)


def samples_by_kind(plan: Plan, found: Memory) -> dict[str, IntArray]:
    """What each of `samples` consists of: kind -> [sample] bytes."""
    rows, owner = _owners(plan)
    b, n, events = plan.buffers, len(plan), MemoryEvents.of(plan, found.made)
    op, size, _ = found.asked
    parts = np.where(events.column == np.arange(len(COLUMNS))[:, None], size, 0)
    each = np.stack([events.levels(x) for x in parts])
    last = np.searchsorted(op, np.arange(n), side="right") - 1
    valid = last >= 0
    valid[valid] = plan.program[op[last[valid]]] == plan.program[valid]
    after = np.where(valid, each[:, last], 0)
    before = np.roll(after, 1, axis=1)
    before[:, plan.bounds[:-1]] = 0
    early = np.flatnonzero((b.free >= 0) & (b.free_cover == AT_START))
    np.subtract.at(before, (b.category[early], b.free[early]), b.bytes[early])
    # The most while an op runs is what it finds, or what one of its events leaves.
    asks = np.concatenate([np.arange(n), op[events.running]])
    levels = np.concatenate([before, each[:, events.running]], axis=1)
    order = np.lexsort((levels.sum(axis=0), owner[asks]))
    top = order[np.flatnonzero(np.diff(owner[asks][order], append=-1))]
    high = np.zeros((len(COLUMNS), len(rows)), dtype=np.int64)
    high[:, owner[asks[top]]] = levels[:, top]
    both = np.stack([high, after[:, rows]], axis=2).reshape(len(COLUMNS), -1)
    both[WORKSPACE] += found.library
    by = np.repeat(plan.program[rows], 2)
    fixed = {name: np.array([getattr(s, name) for s in found.state], dtype=np.int64)[by] for name in _STATE}
    dynamic = dict(zip(COLUMNS, both, strict=True))
    return fixed | dynamic | {"gradients": fixed["gradients"] + dynamic["gradients"]}
