"""Nodes that nobody knows to be slow: which step is likely where each node may be, and how the others spread.

MegaScale (arXiv 2402.15627) found about 0.5 % of its machines a tenth slower than the rest: a chance that one node can
forget, and a job on thousands of GPUs cannot, where all wait for the slowest.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from ir.job.schema import JobSlowNodes
from piper_sim.folding.ground import DevicePlacement
from piper_sim.study.planned import PlannedJob
from piper_sim.study.sure import SlowStepChances


def with_likely(p: PlannedJob, step: Callable[[PlannedJob], float]) -> PlannedJob:
    """The job with the slow node that its median step has, or none, as `[cluster] speed`.

    Each node is slow with the same chance, whatever the others are. The step is that of the worst one met: simulated
    for every kind of node (by the pipeline ranks on it) with `step`. A second slow node in one replica is not
    simulated, it adds little to the worse of both.
    """
    asked = p.prepared.job.cluster.slow_nodes
    assert asked is not None
    ground = p.model.ground
    found = [(0, _slowed(p, asked, ()))]
    found += [(nodes, _slowed(p, asked, ranks)) for ranks, nodes in kinds(ground)]
    timed = [(step(one), nodes, one) for nodes, one in found]
    least = timed[0][0]
    timed.sort(key=lambda x: max(x[0], least))
    steps = met([(max(seconds, least), nodes) for seconds, nodes, _ in timed], asked.share)
    median = int(np.searchsorted(np.cumsum([chance for _, chance in steps]), 0.5))
    return replace(timed[median][2], slow=SlowStepChances(asked, sum(nodes for _, nodes, _ in timed), tuple(steps)))


def met(steps: list[tuple[float, int]], share: float) -> list[tuple[float, float]]:
    """(seconds, chance) of each step, (seconds, nodes that make it so long if slow) in rising order: that one of these
    nodes is slow, and none that is worse. The first is also that of no slow node.

    >>> [(s, round(chance, 3)) for s, chance in met([(1.0, 0), (1.1, 2), (1.2, 1)], 0.1)]
    [(1.0, 0.729), (1.1, 0.171), (1.2, 0.1)]
    """
    fine = (1.0 - share) ** np.array([nodes for _, nodes in steps])
    none_worse = np.append(np.cumprod(fine[::-1])[::-1][1:], 1.0)  # [step] chance that no step is longer
    chance = none_worse * (1.0 - fine)
    chance[0] = none_worse[0]
    return [(seconds, float(c)) for (seconds, _), c in zip(steps, chance, strict=True)]


def kinds(ground: DevicePlacement) -> Iterator[tuple[tuple[int, ...], int]]:
    """(ranks of its first node, nodes) of each kind: nodes that hold equally many ranks of every pipeline rank."""
    programs = len(ground.node)
    held = np.zeros((int(ground.node.max()) + 1, programs), dtype=np.int64)
    np.add.at(held, (ground.node, np.arange(programs)[:, None]), 1)
    _, first, count = np.unique(held, axis=0, return_index=True, return_counts=True)
    for node, nodes in zip(first.tolist(), count.tolist(), strict=True):
        yield tuple(sorted(ground.rank[ground.node == node].tolist())), nodes


def _slowed(p: PlannedJob, asked: JobSlowNodes, ranks: tuple[int, ...]) -> PlannedJob:
    """The job on nodes that are known: these ranks slow."""
    job = p.prepared.job
    speed = dict.fromkeys(map(str, ranks), asked.speed)
    cluster = replace(job.cluster, slow_nodes=None, speed=speed)
    return PlannedJob.of(replace(p.prepared, job=replace(job, cluster=cluster)), p.hardware)
