"""Seconds of ops that come from no cost model: a given time per layer, or a trace. Both engines read these."""

from collections import Counter

import numpy as np

from ir.core.errors import ErrorKind, PiperError
from ir.core.grid import quantised
from ir.core.ops import Pass
from ir.core.order import FloatArray
from ir.graph.graph import Graph, GraphNode
from ir.plan.plan import OpKind, Plan
from ir.trace.trace import Trace


def emulated_seconds(plan: Plan, seconds: float, comm_seconds: float = 0.0) -> FloatArray:
    """[op] seconds under `--emulate` and `--emulate-comm`: what an emulated run takes, and what predicts it.

    Each pass of one layer (F, I, W; so B = I + W takes twice as long) takes `seconds`, in equal parts over the nodes
    that it consists of; a node that is recomputed (R) takes what its F does. An op takes the sum over what it covers.
    Layers are decoder and MTP layers: embedding, head and update take none. In a graph without layers (a captured one)
    each chunk counts as a layer.

    Each transfer, and each collective of a microbatch, takes `comm_seconds`: on a transfer's send, since engines ask
    there. What exists once per step takes none.
    """
    graph, node = plan.graph, emulated_nodes(plan.graph, seconds)
    of_shape = np.zeros(len(plan.shapes))
    for i, s in enumerate(plan.shapes):
        match s.kind:
            case OpKind.COMPUTE:
                of_shape[i] = sum(node[n] for n, _ in s.covers)
            case OpKind.SEND:
                of_shape[i] = comm_seconds
            case OpKind.COLLECTIVE:
                of_shape[i] = 0.0 if any(graph.nodes[n].once for n, _ in s.covers) else comm_seconds
            case OpKind.RECV:
                pass
    return np.asarray(quantised(of_shape)[plan.shape])


def emulated_nodes(graph: Graph, seconds: float) -> FloatArray:
    """[node] seconds of one instance under `--emulate`; 0 of a message."""
    node, pieces = np.zeros(len(graph.nodes)), _pieces(graph)
    for i, n in enumerate(graph.nodes):
        if (key := _key(n)) in pieces and _computes(n):
            node[i] = seconds / pieces[key]
    return node


def _pieces(graph: Graph) -> Counter[tuple[int, str, str]]:
    """Into how many nodes a pass of a layer falls, by (stage, pass, chunk)."""
    layers = {_chunk(n) for n in graph.nodes if n.tags.keys() & {"L", "MTP"}}
    found = [n for n in graph.nodes if _computes(n) and n.kind is not Pass.R]
    return Counter(_key(n) for n in found if not layers or _chunk(n) in layers)


def _computes(n: GraphNode) -> bool:
    return not n.once and n.message is None


def _chunk(n: GraphNode) -> str:
    return n.part.split(".", 1)[0]


def _key(n: GraphNode) -> tuple[int, str, str]:
    return n.stage, str(Pass.F if n.kind is Pass.R else n.kind), _chunk(n)


def replayed_seconds(plan: Plan, trace: Trace) -> FloatArray:
    """[step, op] seconds that the plan's compute ops took in a trace, which either engine wrote; 0 for communication.

    Raises PiperError: an op of the plan that some step of the trace lacks.
    """
    columns = zip(plan.program.tolist(), plan.texts, (plan.kind == OpKind.COMPUTE).tolist(), strict=True)
    at = {(rank, text): i for i, (rank, text, computes) in enumerate(columns) if computes}
    steps = sorted(set(trace.step.tolist()))
    row = {step: k for k, step in enumerate(steps)}
    out = np.full((len(steps), len(plan)), np.nan)
    out[:, plan.kind != OpKind.COMPUTE] = 0.0
    took = (trace.end_s - trace.start_s).tolist()
    for step, rank, op, seconds in zip(trace.step.tolist(), trace.rank.tolist(), trace.op, took, strict=True):
        if (i := at.get((rank, op))) is not None:
            out[row[step], i] = seconds
    lacking = np.argwhere(np.isnan(out))
    if not steps or len(lacking):
        what = f"op {plan.text(int(lacking[0][1]))} in step {steps[int(lacking[0][0])]}" if steps else "any step"
        fix = "a trace of a run of this very plan"
        raise PiperError(ErrorKind.ILLEGAL_PLAN, f"the trace lacks {what}", key="replay", suggestion=fix)
    return out
