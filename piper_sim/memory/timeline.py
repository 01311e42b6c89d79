"""Memory of a plan, from its buffers in host dispatch order. No formula: every byte is a buffer someone wrote.

`memory` counts the bytes asked for, exact sums over the plan; `reserved` replays the same requests through a model of
the device's allocator.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from cost_models import DeviceHardware, OptimizerMemory, OptimizerPrecision, state_bytes
from cost_models.allocator import UNLIMITED, MemoryRequests, replay
from cost_models.allocator.bands import MemoryBand, replayed_band
from ir.core.ops import Pass
from ir.core.order import BoolArray, FloatArray, IntArray
from ir.core.waits import order_by
from ir.graph.sync import Bucket, buckets
from ir.plan.kept import once_per_plan
from ir.plan.plan import AT_START, CATEGORIES, OpKind, OpShape, Plan, covers_of, spread
from ir.trace.trace import MemorySamples
from ir.workload.params import local_numel

WORKSPACE = len(CATEGORIES)
GRADIENTS = WORKSPACE + 1
_COLUMNS = (*CATEGORIES, "workspace", "gradients")
_NOTHING = OpShape(OpKind.SEND, "", "")
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
        for i, name in enumerate(_COLUMNS):
            out[name] = out.get(name, 0) + int(self.dynamic[program, i])
        return out


@once_per_plan
def state(plan: Plan, recipe: OptimizerPrecision) -> tuple[OptimizerMemory, ...]:
    """Parameters, gradients and optimizer of each program, one copy of each parameter, sharded as its bucket says."""
    out = []
    found = buckets(plan.graph)
    for p in range(plan.programs):
        mine = [b for b in found if p in b.owners]
        parts = [_held(b, recipe) for b in mine]
        out.append(
            OptimizerMemory(
                sum(x.parameters for x in parts), sum(x.gradients for x in parts), sum(x.optimizer for x in parts)
            )
        )
    return tuple(out)


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
    dynamic = np.zeros((plan.programs, len(_COLUMNS)), dtype=np.int64)
    for p, (a, b) in enumerate(pairwise(cuts.tolist())):
        if a < b:
            k = a + int(np.argmax(total[a:b])) + 1
            peak[p] += total[k - 1]
            at[p] = found.op[k - 1]
            dynamic[p] = [size[a:k][found.column[a:k] == c].sum() for c in range(len(_COLUMNS))]
    after, high = _per_op(plan, found.op, total, found.running)
    dynamic[:, WORKSPACE] += library
    levels = (after + library, high + library)
    return Memory(persistent, peak + library, at, dynamic, *levels, (found.op, size, found.request), library, made)


@dataclass(frozen=True, eq=False)
class MemoryEvents:
    """Allocations and frees of a plan in host order: what does not depend on bytes.

    Within each cover of each op: allocations, end of the workspace, frees. What is freed at an op's start (cover
    AT_START) stands before its first cover. request: a >= 0 makes an allocation, ~a frees it; they are numbered as the
    plan's buffers, then the workspaces, then gradients that a step makes anew. running: behind an op's first frees.
    node, mb: of each workspace. made: bytes of each gradient. cuts: of programs.
    """

    op: IntArray
    running: BoolArray
    column: IntArray
    request: IntArray
    node: IntArray
    mb: IntArray
    cuts: IntArray
    made: IntArray

    @classmethod
    def of(cls, plan: Plan, made: IntArray | None = None) -> MemoryEvents:
        """Of a plan. made: as in `memory`; a program gives them up with its last op."""
        b = plan.buffers
        stride = 3 * (2 + max((len(s.covers) for s in plan.shapes), default=0))
        freed = np.flatnonzero(b.free >= 0)
        frees = b.free[freed] * stride + 3 * (b.free_cover[freed] - AT_START) + 2
        at, cover, node, mb = _workspaces(plan)
        at, number = at * stride + 3 * (cover - AT_START), len(b) + np.arange(len(at))
        first, over, size = _first_made(plan, made, stride)
        grads = len(b) + len(at) + np.arange(len(first))
        key = np.concatenate([b.alloc * stride + 3 * (b.alloc_cover - AT_START), frees, at, at + 1, first, over])
        order = order_by(key)
        none, kept = np.full(2 * len(at), WORKSPACE), np.full(2 * len(first), GRADIENTS)
        column = np.concatenate([b.category, b.category[freed], none, kept])[order]
        request = np.concatenate([np.arange(len(b)), ~freed, number, ~number, grads, ~grads])[order]
        key = key[order]
        op = key // stride
        return cls(op, key - op * stride >= 3, column, request, node, mb, np.searchsorted(op, plan.bounds), size)

    def sizes(self, plan: Plan, workspace: IntArray | None = None, buffers: IntArray | None = None) -> IntArray:
        """[allocation] bytes, where given those of workspaces [node, microbatch] and of buffers, else the plan's."""
        usual = np.array([n.workspace for n in plan.graph.nodes], dtype=np.int64)
        more = usual[self.node] if workspace is None else workspace[self.node, self.mb]
        return np.concatenate([plan.buffers.bytes if buffers is None else buffers, more, self.made])

    def signed(self, sizes: IntArray) -> IntArray:
        """[event] bytes more or less in use."""
        made = self.request >= 0
        return np.where(made, 1, -1) * sizes[np.where(made, self.request, ~self.request)]

    def levels(self, size: IntArray) -> IntArray:
        """[event] bytes in use on its program, behind it."""
        total = np.cumsum(size)
        before = np.where(self.cuts > 0, total[self.cuts - 1], 0) if len(total) else self.cuts
        return np.asarray(total - np.repeat(before[:-1], np.diff(self.cuts)))

    def peaks(self, sizes: IntArray) -> IntArray:
        """[program] the most bytes in use."""
        total = self.levels(self.signed(sizes))
        return np.array([total[a:b].max(initial=0) for a, b in pairwise(self.cuts.tolist())], dtype=np.int64)


def _first_made(plan: Plan, made: IntArray | None, stride: int) -> tuple[IntArray, IntArray, IntArray]:
    """(key of the allocation, key of the free, bytes) of every gradient of every program that a step makes anew."""
    if made is None:
        return (np.zeros(0, dtype=np.int64),) * 3
    op, cover, node, _ = _instances(plan, made > 0)
    owner = plan.program[op]
    _, first = np.unique(owner * len(made) + node, return_index=True)  # instances stand in dispatch order
    last = plan.bounds[1:][owner[first]] - 1
    return op[first] * stride + 3 * (cover[first] - AT_START), last * stride + stride - 1, made[node[first]]


def _workspaces(plan: Plan) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """(op, cover, node, microbatch) of every workspace, op by op."""
    return _instances(plan, np.array([n.workspace > 0 for n in plan.graph.nodes], dtype=np.bool_))


def _instances(plan: Plan, has: BoolArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """(op, cover, node, microbatch) of all runs of these nodes, op by op."""
    covers = covers_of([s if s.kind is OpKind.COMPUTE else _NOTHING for s in plan.shapes])
    shape, cover, node, member = covers[has[covers[:, 2]]].T
    op, at = spread(shape, plan.shape, len(plan.shapes))
    return op, cover[at], node[at], np.where(member[at] == 0, plan.mb[op], plan.mb2[op])


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


@dataclass(frozen=True, eq=False)
class ReservedMemory:
    """What one program's allocator takes from the driver, and whether it gets it.

    reserved: peak bytes. allocated: peak of `torch.cuda.memory_allocated`, whole blocks. given_back: how often cached
    segments went back to the driver for room under the limit; each time stalls the device. fits: whether the default
    allocator serves all requests under the limit; else, bytes are those of a device without limit: what the plan would
    need. asked: None where nothing is cached. op: of each event; where nothing is cached, of the peak alone. wanted:
    what it would reserve without limit. peak: bytes asked for.
    """

    reserved: int
    allocated: int
    given_back: int
    fits: bool
    asked: MemoryRequests | None
    op: IntArray
    wanted: int
    peak: int
    limit: int
    hardware: DeviceHardware

    @cached_property
    def refused(self) -> int | None:
        """The op whose request cannot be served, -1 where that is the persistent state, None: all are served."""
        if self.fits:
            return None
        at = 0 if self.asked is None else replay(self.asked, limit=self.limit).refused
        assert at is not None
        return int(self.op[at]) if at >= 0 else at

    @cached_property
    def band(self) -> MemoryBand:
        """Peak reserved bytes, see `replayed_band`."""
        return replayed_band(self.reserved, self._expandable, self.peak, self.hardware)

    @cached_property
    def expandable_fits(self) -> bool:
        """Whether expandable segments serve all requests."""
        if self.asked is None or self._expandable <= self.limit:
            return self._expandable <= self.limit
        tight = self.wanted > self.limit
        return tight and replay(self.asked, limit=self.limit, expandable=True).refused is None

    @cached_property
    def _expandable(self) -> int:
        """Peak with expandable segments, replayed when it is asked for."""
        return self.reserved if self.asked is None else replay(self.asked, expandable=True).reserved


def bands(found: Sequence[ReservedMemory]) -> list[MemoryBand]:
    """The bands of several programs; compiled replays hold no lock."""
    with _threads(len(found)) as threads:
        return list(threads.map(lambda r: r.band, found))


def _threads(tasks: int) -> ThreadPoolExecutor:
    """No more than can run: starting one takes as long as a small replay."""
    return ThreadPoolExecutor(max(1, min(tasks, os.cpu_count() or 1)))


def requests(plan: Plan, found: Memory) -> list[tuple[MemoryRequests, IntArray]]:
    """Each program's requests of one step, and the op of each. State is one flat buffer per kind, as in Megatron."""
    op, size, request = found.asked
    sizes = np.zeros(int(request.max(initial=-1)) + 1, dtype=np.int64)
    sizes[request[request >= 0]] = size[request >= 0]
    cuts = np.searchsorted(op, plan.bounds).tolist()
    more = (found.library,) if found.library else ()
    state = [(s.parameters, s.gradients, s.optimizer, *more) for s in found.state]
    return [(MemoryRequests(s, request[a:b], sizes), op[a:b]) for s, (a, b) in zip(state, pairwise(cuts), strict=True)]


def reserved(plan: Plan, found: Memory, hardware: DeviceHardware, limit: int = UNLIMITED) -> tuple[ReservedMemory, ...]:
    """Replay every program's requests. limit: bytes that the driver has for the allocator: less context and margin."""
    if hardware.reserved_over_allocated[1] == 1:
        return tuple(_uncached(int(b), int(at), hardware, limit) for b, at in zip(found.peak, found.at, strict=True))
    asked = requests(plan, found)
    with _threads(len(asked)) as threads:
        return tuple(threads.map(lambda x, peak: _cached(x[0], x[1], int(peak), hardware, limit), asked, found.peak))


def _uncached(peak: int, at: int, hardware: DeviceHardware, limit: int) -> ReservedMemory:
    whole = replayed_band(peak, peak, peak, hardware).middle
    return ReservedMemory(whole, peak, 0, whole <= limit, None, np.array([at]), whole, peak, limit, hardware)


def _cached(asked: MemoryRequests, op: IntArray, peak: int, hardware: DeviceHardware, limit: int) -> ReservedMemory:
    default = used = replay(asked)
    fits = default.reserved <= limit
    if not fits and peak <= limit:  # what is asked for at a time has no room where it is more than all of it
        tight = replay(asked, limit=limit)
        fits = tight.refused is None
        used = tight if fits else default
    counts = (used.reserved, used.allocated, used.given_back, fits)
    return ReservedMemory(*counts, asked, op, default.reserved, peak, limit, hardware)


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
    parts = np.where(events.column == np.arange(len(_COLUMNS))[:, None], size, 0)
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
    high = np.zeros((len(_COLUMNS), len(rows)), dtype=np.int64)
    high[:, owner[asks[top]]] = levels[:, top]
    both = np.stack([high, after[:, rows]], axis=2).reshape(len(_COLUMNS), -1)
    both[WORKSPACE] += found.library
    by = np.repeat(plan.program[rows], 2)
    fixed = {name: np.array([getattr(s, name) for s in found.state], dtype=np.int64)[by] for name in _STATE}
    dynamic = dict(zip(_COLUMNS, both, strict=True))
    return fixed | dynamic | {"gradients": fixed["gradients"] + dynamic["gradients"]}
