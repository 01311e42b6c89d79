"""Host models: `inline` executes compute itself, `ahead` launches it and runs ahead. docs/ENGINE.md, 7."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from cost_models.compute.host import UPDATE_LAUNCHES, HostCosts
from ir.core.grid import quantise
from ir.core.ops import Pass
from ir.core.order import IntArray
from ir.graph.graph import GraphNode, PerStepOp
from ir.plan.host import host_reads
from ir.plan.kept import once_per_plan
from ir.plan.plan import OpKind, OpLists, OpShape, Plan
from piper_sim.engine import HostModel


def inline(plan: Plan, seconds: float = 0.0) -> HostModel:
    """A host that executes compute ops and posts communication between them: gloo, CPU.

    Each op is held by the compute op before it in its program, of this step or of the last, and an exchange of rows by
    that of their counts. seconds: what the host needs of its own for each op, before it comes to it.
    """
    return HostModel(np.full(len(plan), quantise(seconds)), _inline(plan))


@once_per_plan
def _inline(plan: Plan) -> OpLists:
    n, rows, on = len(plan), [], []
    for a, b in pairwise(plan.bounds.tolist()):
        ops = np.arange(a, b)
        last = np.maximum.accumulate(np.where(plan.kind[a:b] == OpKind.COMPUTE, ops, -1))
        before = np.concatenate([[-1], last[:-1]])
        wrapped = np.where(before >= 0, before, n + last[-1]) if last[-1] >= 0 else before
        rows.append(ops[wrapped >= 0])
        on.append(wrapped[wrapped >= 0])
    reads = host_reads(plan)
    rows, on = [*rows, reads[0]], [*on, reads[1]]
    return OpLists.of(n, np.concatenate(rows), np.concatenate(on))


def ahead(plan: Plan, costs: HostCosts) -> HostModel:
    """A host that launches kernels and runs ahead of the device: CUDA.

    It is held where its window of launched kernels is full, and where it must read what the device has got: the expert
    counts, without which it cannot size a forward dispatch. With `costs.turn`, also at each pass of a pipeline. A pass
    starts with its first kernel, unless the host came to it from waiting.
    """
    kernels, later, hold, turns = _ahead(plan, costs.graphs != "none", costs.window, costs.turn > 0)
    launch = np.where(plan.kind == OpKind.COMPUTE, (kernels - later) * costs.launch, costs.comm)
    launch[turns] = costs.turn
    launch[1:] += later[:-1] * costs.launch
    return HostModel(launch, hold)


def _later(plan: Plan, kernels: IntArray) -> IntArray:
    """[op] of a pass's kernels those that the host launches while it runs, before it turns to the next op: all but one;
    but none, where the host then reads what the op made.
    """
    passes = np.array([not any(plan.graph.nodes[n].once for n, _ in s.covers) for s in plan.shapes], dtype=np.bool_)
    later = np.where((plan.kind == OpKind.COMPUTE) & passes[plan.shape], np.maximum(kernels - 1, 0), 0)
    read = host_reads(plan)[0] - 1
    later[read[read >= 0]] = 0
    later[plan.bounds[1:] - 1] = 0
    return later


@once_per_plan
def _ahead(plan: Plan, graphs: bool, window: int, turning: bool) -> tuple[IntArray, IntArray, OpLists, IntArray]:
    """([op] kernels, those launched later, what holds the host, ops at which it turns to another pass)."""
    kernels = launches(plan)
    if graphs:
        kernels = np.minimum(kernels, 1)
    # Of an op with more kernels than half the window, the first run while the last are launched.
    holds = [_window(plan, np.clip(kernels, 1, max(1, window // 2)), window), host_reads(plan)]
    turns = np.zeros(0, dtype=np.int64)
    if turning and (plan.kind == OpKind.SEND).any():
        holds.append(_turns(plan))
        turns = holds[-1][0]
    rows, on = (np.concatenate(x) for x in zip(*holds, strict=True))
    later = np.zeros_like(kernels) if turning else _later(plan, kernels)
    return kernels, later, OpLists.of(len(plan), rows, on), turns


def one_queue(plan: Plan, host: HostModel) -> HostModel:
    """The same host on a device with one queue for all streams (CUDA_DEVICE_MAX_CONNECTIONS = 1).

    Streams then start in launch order: an op that waits for another stream holds up all that was launched behind it. So
    each op is held until the op before it can start: what that waits for has ended, and what is ahead on its stream.
    """
    return HostModel(host.launch, _one_queue(plan, host.hold))


@once_per_plan
def _one_queue(plan: Plan, hold: OpLists) -> OpLists:
    n = len(plan)
    last = np.full(n, -1, dtype=np.int64)
    for queue in plan.queues:
        last[queue[1:]] = queue[:-1]
    rows = np.concatenate([plan.waits.rows(), np.flatnonzero(last >= 0)]) + 1
    on = np.concatenate([plan.waits.items, last[last >= 0]])
    mine = rows < n
    mine[mine] = plan.program[rows[mine]] == plan.program[rows[mine] - 1]
    both = (np.concatenate(x) for x in ((hold.rows(), rows[mine]), (hold.items, on[mine])))
    return OpLists.of(n, *both)


def launches(plan: Plan) -> IntArray:
    """[op] kernels that a compute op launches; a communication op is one."""
    of_node = [_kernels(n) for n in plan.graph.nodes]
    of_shape = [sum(of_node[n] for n, _ in s.covers) if s.kind is OpKind.COMPUTE else 1 for s in plan.shapes]
    return np.array(of_shape, dtype=np.int64)[plan.shape]


def _kernels(n: GraphNode) -> int:
    if n.kind is PerStepOp.UPDATE:
        return UPDATE_LAUNCHES
    return sum(k.count for k in n.work) + len(n.inline)


def _window(plan: Plan, kernels: IntArray, window: int) -> tuple[IntArray, IntArray]:
    """(ops, the compute op whose end makes room for them): no compute behind it fits the window with the op's own.

    A host never starts an op before the same op of the step before has ended. Kernels of communication count, but the
    host is never held by one alone: a plan that an inline host can finish is then safe for any window.
    """
    n, rows, on, compute = len(plan), [], [], plan.kind == OpKind.COMPUTE
    for a, b in pairwise(plan.bounds.tolist()):
        total = np.concatenate([[0], np.cumsum(kernels[a:b])])
        step = int(total[-1])
        ends = np.concatenate([total[1:] - step, total[1:]])  # of the step before, then of this one
        wanted = np.maximum(total[1:] - window, ends[: b - a])
        # The last op whose kernels must all have gone by then, or the compute op before; an op never waits for itself.
        last = np.minimum(np.searchsorted(ends, wanted, side="left"), np.arange(b - a) + (b - a) - 1)
        last = np.maximum.accumulate(np.where(np.tile(compute[a:b], 2), np.arange(2 * (b - a)), -1))[last]
        rows.append(np.arange(a, b)[last >= 0])
        on.append(np.where(last < b - a, n + a + last, a + last - (b - a))[last >= 0])
    return np.concatenate(rows), np.concatenate(on)


def _turns(plan: Plan) -> tuple[IntArray, IntArray]:
    """(compute ops that open a pass of a stage, what the host waits for: the compute op before, what they receive)."""
    nodes, opening = plan.graph.nodes, dict[tuple[int, Pass], int]()
    for i, n in enumerate(nodes):
        if n.message is None and isinstance(n.kind, Pass):
            opening.setdefault((n.stage, n.kind), i)
    first = set(opening.values())
    opens = np.array([s.kind is OpKind.COMPUTE and _opens(nodes, s, first) for s in plan.shapes])
    ops = plan.waits.rows()
    received = opens[plan.shape[ops]] & (plan.kind[plan.waits.items] == OpKind.RECV)
    rows, on = [ops[received]], [plan.waits.items[received]]
    for a, b in pairwise(plan.bounds.tolist()):
        ops = a + np.flatnonzero(plan.kind[a:b] == OpKind.COMPUTE)
        mine = opens[plan.shape[ops]] & (np.arange(len(ops)) > 0)
        rows.append(ops[mine])
        on.append(np.roll(ops, 1)[mine])
    return np.concatenate(rows), np.concatenate(on)


def _opens(nodes: Sequence[GraphNode], s: OpShape, first: set[int]) -> bool:
    """Whether an op opens a pass. Weight gradients are one of their own only where no input gradient goes before."""
    kinds = {nodes[n].kind for n, _ in s.covers if n in first}
    return bool(kinds) and (kinds != {Pass.W} or all(nodes[n].kind is Pass.W for n, _ in s.covers))
