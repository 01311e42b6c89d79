"""How much of a plan's time is measured, read between or beyond measurements, or modelled; class by class."""

from dataclasses import dataclass

import numpy as np

from cost_models.profile.profile import CostSource, ProfileCost
from ir.core.work import Message
from ir.graph.classes import link_class
from ir.graph.graph import GraphNode
from ir.plan.plan import OpKind, OpShape, Plan
from piper_sim.folding import RankSlot, RankSpread
from piper_sim.folding.uses import CollectiveUse, message_of
from piper_sim.pricing.costs import FIRST, CostModel
from piper_sim.pricing.measured import classes_of
from piper_sim.pricing.structure import KERNELS


@dataclass(frozen=True, slots=True)
class CostRow:
    """A class of nodes or messages: seconds of one, and how many one replica of the plan has in a step."""

    name: str
    source: CostSource
    seconds: float
    spread_s: float
    times: int


@dataclass(frozen=True)
class CostSources:
    """rows: by class, the most seconds first. shapes: [shape of the plan] where its seconds come from, in words."""

    rows: tuple[CostRow, ...]
    shapes: tuple[str, ...]
    edited: bool

    @property
    def word(self) -> str:
        """The result's `cost_source`: measured, modelled or mixed."""
        found = {r.source for r in self.rows if r.seconds}
        if found <= {CostSource.MODELLED}:
            return "modelled"
        return "measured" if found == {CostSource.MEASURED} else "mixed"

    @property
    def shares(self) -> dict[str, object]:
        """The result's `cost_shares`: of the seconds of all ops and messages, side by side or not.

        spread: of what is not modelled, relative; null where all is. edited: the profile was changed by hand.
        """
        total = sum(r.seconds * r.times for r in self.rows)
        by = {s: sum(r.seconds * r.times for r in self.rows if r.source is s) for s in CostSource}
        known = total - by[CostSource.MODELLED]
        spread = sum(r.spread_s * r.times for r in self.rows if r.source is not CostSource.MODELLED)
        shares: dict[str, object] = {
            str(s): by[s] / total if total else float(s is CostSource.MODELLED) for s in CostSource
        }
        return {**shares, "spread": spread / known if known > 0 else None, "edited": self.edited}

    def by_op(self, plan: Plan) -> dict[tuple[int, str], str]:
        """(program, op text) of every op: where its seconds come from."""
        ops = zip(plan.program.tolist(), plan.texts, plan.shape.tolist(), strict=True)
        return {(program, text): self.shapes[shape] for program, text, shape in ops}

    @property
    def text(self) -> str:
        """One line for people."""
        shares = self.shares
        parts = [f"{shares[s]:.0%} {s}" for s in CostSource if shares[s]]
        spread = shares["spread"]
        more = "" if spread is None else f"; what is measured or read off spreads by {spread:.1%}"
        return ", ".join(parts) + more + ("; the profile was edited by hand" if self.edited else "")


def sources(plan: Plan, model: CostModel) -> CostSources:
    """Of a plan as a model prices it, at the first replica."""
    if model.measured.profile is None:
        return CostSources((), ("modelled",) * len(plan.shapes), False)
    found: dict[str, tuple[ProfileCost, int]] = {}
    words = ["modelled"] * len(plan.shapes)
    names = tuple(name for _, name, _ in classes_of(plan.graph, model.job))
    pairs, counts = np.unique(plan.program * len(plan.shapes) + plan.shape, return_counts=True)
    for pair, times in zip(pairs.tolist(), counts.tolist(), strict=True):
        program, index = divmod(pair, len(plan.shapes))
        pieces = _pieces(plan, plan.shapes[index], program, model, names)
        for name, piece in pieces:
            before = found.get(name, (piece, 0))
            found[name] = piece, before[1] + times
        words[index] = _words([piece for _, piece in pieces])
    rows = [CostRow(name, f.source, f.seconds, f.spread_s, times) for name, (f, times) in found.items()]
    rows.sort(key=lambda r: (-r.seconds * r.times, r.name))
    return CostSources(tuple(rows), tuple(words), not model.measured.profile.sealed)


def _pieces(
    plan: Plan, s: OpShape, program: int, model: CostModel, names: tuple[str, ...]
) -> list[tuple[str, ProfileCost]]:
    """What an op's seconds are made of, by class."""
    seat = RankSlot(program, FIRST.position)
    match s.kind:
        case OpKind.COMPUTE:
            return [piece for n, _ in s.covers for piece in _node(plan.graph.nodes[n], names[n], model, seat)]
        case OpKind.SEND:
            nodes = 1 if model.ground.near(program, s.peer)[seat.position] else 2
            return [_message(message_of(plan, s), RankSpread(2, 3 - nodes, nodes), model)]
        case OpKind.COLLECTIVE:
            use = CollectiveUse.of_op(plan, s, model.ground.positions.programs)
            return [_message(message_of(plan, s), model.ground.spread(use, seat), model)]
        case OpKind.RECV:
            return []


def _node(n: GraphNode, name: str, model: CostModel, seat: RankSlot) -> list[tuple[str, ProfileCost]]:
    """A node's own seconds, and those of the messages inside it, unless it was measured with them."""
    found, shares = model.measured.node(n), model.node_shares(n, seat)
    if found is not None and not found.alone:
        return [(name, ProfileCost(sum(shares), found.spread_s, found.source))]
    seconds = sum(shares[s] for s in KERNELS)
    spread, source = (0.0, CostSource.MODELLED) if found is None else (found.spread_s, found.source)
    uses = [(m, CollectiveUse.of(m, model.ground.positions.programs)) for m in n.inline]
    inside = [_message(m, model.ground.spread(use, seat), model) for m, use in uses]
    return [(name, ProfileCost(seconds, spread, source)), *inside]


def _message(message: Message, spread: RankSpread, model: CostModel) -> tuple[str, ProfileCost]:
    return link_class(message, spread.ranks, spread.nodes), model.priced(message, spread)


def _words(pieces: list[ProfileCost]) -> str:
    """Of an op: the sources of its nodes, and the spread of their sum.

    >>> _words([ProfileCost(1.0, 0.1), ProfileCost(3.0, 0.3)])
    'measured ± 10 %'
    >>> _words([ProfileCost(1.0, 0.0, CostSource.MODELLED), ProfileCost(1.0, 0.2)])
    'modelled, measured ± 20 %'
    """
    if not pieces:
        return "its send's"
    known = [f for f in pieces if f.source is not CostSource.MODELLED]
    seconds, spread = sum(f.seconds for f in known), sum(f.spread_s for f in known)
    words = ", ".join(dict.fromkeys(str(f.source) for f in pieces))
    return f"{words} ± {100 * spread / seconds:.0f} %" if seconds > 0 else words
