"""A plan unfolded: one copy of all programs for each class of replicas, and the meetings between them."""

from dataclasses import replace

import numpy as np

from ir.core.mesh import Mesh
from ir.core.order import IntArray
from ir.plan.plan import OpLists, Plan
from piper_sim.engine import EngineRun
from piper_sim.engine.scenario import carried
from piper_sim.folding.classes import RankClasses
from piper_sim.folding.ground import RankPositions
from piper_sim.folding.uses import shape_axes


def unfold(plan: Plan, classes: RankClasses, mesh: Mesh) -> Plan:
    """Copies of all programs, one per class: program p of class k is k * programs + p, its op i is op k * n + i.

    The copies of an op meet where their classes stand in one group; those of compute with messages inside do too: it
    begins in all of them when the last is there. The graph, the shapes' peers and the buffers stay class 0's.
    One class: the plan itself.
    """
    count, n = classes.count, len(plan)
    if count == 1:
        return plan
    shift = np.arange(count)[:, None]
    partner = np.where(plan.partner >= 0, plan.partner + shift * n, -1)
    return replace(
        plan,
        program=(plan.program + shift * plan.programs).ravel(),
        shape=np.tile(plan.shape, count),
        mb=np.tile(plan.mb, count),
        mb2=np.tile(plan.mb2, count),
        waits=_stacked(plan.waits, count, n),
        partner=partner.ravel(),
        collective=_meetings(plan, classes, RankPositions(mesh)),
        unit=np.tile(plan.unit, count),
    )


def carry(plan: Plan, classes: RankClasses) -> tuple[IntArray, IntArray]:
    """`late` and `before` of the unfolded plan's scenario: what the folded plan carries over, for every class."""
    shift = np.arange(classes.count)[:, None] * len(plan)
    late, before = ((x + shift).ravel() for x in carried(plan))
    return late, before


def replica(run: EngineRun, k: int, count: int) -> EngineRun:
    """The part of an unfolded plan's run that is class k's, of `count` classes: a run of the folded plan."""
    n = run.start.shape[1] // count
    start, end, post = (None if x is None else x[:, k * n : (k + 1) * n] for x in (run.start, run.end, run.post))
    assert start is not None and end is not None
    return EngineRun(start, end, post)


def _stacked(rows: OpLists, count: int, n: int) -> OpLists:
    shift = np.arange(count)[:, None]
    at = rows.at[:-1] + shift * len(rows.items)
    return OpLists(np.append(at.ravel(), count * len(rows.items)), (rows.items + shift * n).ravel())


def _meetings(plan: Plan, classes: RankClasses, at: RankPositions) -> IntArray:
    """[op] its collective. Members: the folded op's, in each class that stands in one group with the op's own."""
    axes = shape_axes(plan)
    sets = list(dict.fromkeys(a for a in axes if a is not None))
    which = np.array([-1 if a is None else sets.index(a) for a in axes], dtype=np.int64)[plan.shape]
    op = np.flatnonzero(which >= 0)
    joint = int(plan.collective.max(initial=-1)) + 1
    folded = np.where(plan.collective[op] >= 0, plan.collective[op], joint + np.arange(len(op)))
    block = np.array([_blocks(classes, at, a) for a in sets], dtype=np.int64).reshape(len(sets), classes.count)
    out = np.full((classes.count, len(plan)), -1, dtype=np.int64)
    out[:, op] = _together(folded * classes.count + block[which[op]].T)
    return out.ravel()


def _blocks(classes: RankClasses, at: RankPositions, axes: tuple[str, ...]) -> IntArray:
    """[class] the least class in a group over these axes that it stands in."""
    group = at.group(axes)
    least = np.full(len(at), classes.count, dtype=np.int64)
    np.minimum.at(least, group, classes.of)
    return least[group[classes.first]]


def _together(keys: IntArray) -> IntArray:
    """Numbers from 0 for keys that stand there more than once, in their order; -1 for the others."""
    many = np.bincount(keys.ravel()) > 1
    number = np.where(many, np.cumsum(many) - 1, -1)
    return np.asarray(number[keys])
