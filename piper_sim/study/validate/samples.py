"""What a run says about classes of nodes, messages and the host: samples in seconds, by the names a profile uses."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from cost_models.profile.profile import MeasuredCost
from ir.core.order import FloatArray
from ir.graph.classes import link_class, node_classes
from ir.plan.plan import OpKind, OpShape, Plan
from ir.trace.durations import emulated_nodes
from piper_sim.folding.uses import CollectiveUse, message_of
from piper_sim.pricing.costs import FIRST, CostModel
from piper_sim.study.validate.runs import MeasuredSteps
from piper_sim.study.validate.times import alone, dispatch

Samples = dict[str, list[float]]
TRIM = 0.1


def measured(values: Sequence[float]) -> MeasuredCost:
    """Median, the distance of the quartiles, and how many.

    >>> measured([1.0, 2.0, 3.0, 4.0, 90.0])
    MeasuredCost(median_s=3.0, spread_s=2.0, count=5)
    """
    low, middle, high = np.quantile(np.array(values), [0.25, 0.5, 0.75]).tolist()
    return MeasuredCost(middle, high - low, len(values))


def trimmed(values: FloatArray) -> float:
    """The mean of what is left when the largest and the smallest tenth are put aside.

    >>> trimmed(np.array([1.0] * 9 + [50.0]))
    1.0
    """
    cut = int(len(values) * TRIM)
    return float(np.sort(values)[cut : len(values) - cut].mean()) if len(values) else 0.0


def node_samples(r: MeasuredSteps, model: CostModel, emulate: float | None) -> Samples:
    """Seconds of single nodes, by class: an op's, divided as its nodes were timed.

    Where they were not, they are divided as the emulation does, or as the nodes are modelled.
    """
    plan, seconds = r.whole.plan, alone(r.whole, r.times)
    names = node_classes(plan.graph)
    given = _given(plan, model, emulate)
    out: Samples = defaultdict(list)
    for i, nodes in _compute(plan):
        for step in range(len(seconds)):
            weights = np.array(r.parts.get((step, i)) or given[nodes])
            total = weights.sum()
            shares = weights / total if total > 0 else np.full(len(nodes), 1 / len(nodes))
            for n, share in zip(nodes, shares.tolist(), strict=True):
                out[names[n]].append(float(seconds[step, i]) * share)
    return dict(out)


def _given(plan: Plan, model: CostModel, emulate: float | None) -> FloatArray:
    if emulate is not None:
        return emulated_nodes(plan.graph, emulate)
    return np.array([sum(model.node_shares(n)) for n in plan.graph.nodes])


def _compute(plan: Plan) -> Iterator[tuple[int, list[int]]]:
    """Compute ops, and the nodes that each covers."""
    covers = [[n for n, _ in s.covers] for s in plan.shapes]
    for i in np.flatnonzero(plan.kind == OpKind.COMPUTE).tolist():
        yield i, covers[int(plan.shape[i])]


def link_samples(r: MeasuredSteps, model: CostModel) -> Samples:
    """Seconds of messages once all ends are there, by class; a collective counts once for every rank in it."""
    seconds = alone(r.whole, r.times)
    keys = link_keys(r.plan, model)
    out: Samples = defaultdict(list)
    for i, key in enumerate(keys[s] for s in r.whole.plan.shape.tolist()):
        if key is not None:
            out[key] += seconds[:, i].tolist()
    return dict(out)


def link_keys(plan: Plan, model: CostModel) -> list[str | None]:
    """[shape] the class of what it sends or takes part in; None: it does neither."""
    return [_link_key(plan, model, s) for s in plan.shapes]


def _link_key(plan: Plan, model: CostModel, s: OpShape) -> str | None:
    if s.kind is OpKind.SEND:
        return link_class(message_of(plan, s), 2)
    if s.kind is not OpKind.COLLECTIVE:
        return None
    use = CollectiveUse.of_op(plan, s, model.ground.positions.programs)
    return link_class(message_of(plan, s), model.ground.spread(use, FIRST).ranks)


def host_seconds(r: MeasuredSteps) -> float:
    """What the host needs for an op of its own: the trimmed mean over all ops."""
    return trimmed(dispatch(r.whole, r.times)[1:].ravel())
