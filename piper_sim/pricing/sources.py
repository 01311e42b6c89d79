"""How much of a plan's time is measured, read between or beyond measurements, or modelled; class by class."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cost_models.profile.profile import Found, Source
from ir.core.work import CommKind, Message
from ir.graph.classes import link_class, node_classes
from ir.graph.graph import Node
from ir.plan.plan import OpKind, Plan, Shape
from piper_sim.folding import Seat, Spread
from piper_sim.folding.uses import Use, joined
from piper_sim.pricing.costs import FIRST, KERNELS, CostModel


@dataclass(frozen=True, slots=True)
class Row:
    """A class of nodes or messages: seconds of one, and how many one replica of the plan has in a step."""

    name: str
    source: Source
    seconds: float
    spread_s: float
    times: int


@dataclass(frozen=True)
class Sources:
    """rows: by class, the most seconds first. shapes: [shape of the plan] where its seconds come from, in words."""

    rows: tuple[Row, ...]
    shapes: tuple[str, ...]
    edited: bool

    @property
    def word(self) -> str:
        """The result's `cost_source`: measured, modelled or mixed."""
        found = {r.source for r in self.rows if r.seconds}
        if found <= {Source.MODELLED}:
            return "modelled"
        return "measured" if found == {Source.MEASURED} else "mixed"

    @property
    def shares(self) -> dict[str, object]:
        """The result's `cost_shares`: of the seconds of all ops and messages, side by side or not.

        spread: of what is not modelled, relative; null where all is. edited: the profile was changed by hand.
        """
        total = sum(r.seconds * r.times for r in self.rows)
        by = {s: sum(r.seconds * r.times for r in self.rows if r.source is s) for s in Source}
        known = total - by[Source.MODELLED]
        spread = sum(r.spread_s * r.times for r in self.rows if r.source is not Source.MODELLED)
        shares: dict[str, object] = {str(s): by[s] / total if total else float(s is Source.MODELLED) for s in Source}
        return {**shares, "spread": spread / known if known > 0 else None, "edited": self.edited}

    def by_op(self, plan: Plan) -> dict[tuple[int, str], str]:
        """(program, op text) of every op: where its seconds come from."""
        ops = zip(plan.program.tolist(), plan.texts, plan.shape.tolist(), strict=True)
        return {(program, text): self.shapes[shape] for program, text, shape in ops}

    @property
    def text(self) -> str:
        """One line for people."""
        shares = self.shares
        parts = [f"{shares[s]:.0%} {s}" for s in Source if shares[s]]
        spread = shares["spread"]
        more = "" if spread is None else f"; what is measured or read off spreads by {spread:.1%}"
        return ", ".join(parts) + more + ("; the profile was edited by hand" if self.edited else "")


def sources(plan: Plan, model: CostModel) -> Sources:
    """Of a plan as a model prices it, at the first replica."""
    if model.measured.profile is None:
        return Sources((), ("modelled",) * len(plan.shapes), False)
    found: dict[str, tuple[Found, int]] = {}
    words = ["modelled"] * len(plan.shapes)
    names = node_classes(plan.graph)
    pairs, counts = np.unique(plan.program * len(plan.shapes) + plan.shape, return_counts=True)
    for pair, times in zip(pairs.tolist(), counts.tolist(), strict=True):
        program, index = divmod(pair, len(plan.shapes))
        pieces = _pieces(plan, plan.shapes[index], program, model, names)
        for name, piece in pieces:
            before = found.get(name, (piece, 0))
            found[name] = piece, before[1] + times
        words[index] = _words([piece for _, piece in pieces])
    rows = [Row(name, f.source, f.seconds, f.spread_s, times) for name, (f, times) in found.items()]
    rows.sort(key=lambda r: (-r.seconds * r.times, r.name))
    return Sources(tuple(rows), tuple(words), not model.measured.profile.sealed)


def _pieces(plan: Plan, s: Shape, program: int, model: CostModel, names: tuple[str, ...]) -> list[tuple[str, Found]]:
    """What an op's seconds are made of, by class."""
    seat = Seat(program, FIRST.position)
    match s.kind:
        case OpKind.COMPUTE:
            return [piece for n, _ in s.covers for piece in _node(plan.graph.nodes[n], names[n], model, seat)]
        case OpKind.SEND:
            assert s.slot is not None
            message = Message(CommKind.P2P, plan.graph.nodes[s.slot[0]].writes[s.slot[1]].bytes, ("pp",))
            nodes = 1 if model.ground.near(program, s.peer)[seat.position] else 2
            return [_message(message, Spread(2, 3 - nodes, nodes), model)]
        case OpKind.COLLECTIVE:
            node = plan.graph.nodes[s.covers[0][0]] if s.covers else None
            message = s.message if node is None else node.message  # type: ignore[assignment]
            use = Use.of(message, model.ground.positions.programs, () if node is None else joined(node))
            return [_message(message, model.ground.spread(use, seat), model)]
        case OpKind.RECV:
            return []


def _node(n: Node, name: str, model: CostModel, seat: Seat) -> list[tuple[str, Found]]:
    """A node's own seconds, and those of the messages inside it, unless it was measured with them."""
    found, shares = model.measured.node(n), model.node_shares(n, seat)
    if found is not None and not found.alone:
        return [(name, Found(sum(shares), found.spread_s, found.source))]
    seconds = sum(shares[s] for s in KERNELS)
    spread, source = (0.0, Source.MODELLED) if found is None else (found.spread_s, found.source)
    uses = [(m, Use.of(m, model.ground.positions.programs)) for m in n.inline]
    inside = [_message(m, model.ground.spread(use, seat), model) for m, use in uses]
    return [(name, Found(seconds, spread, source)), *inside]


def _message(message: Message, spread: Spread, model: CostModel) -> tuple[str, Found]:
    return link_class(message, spread.ranks, spread.nodes), model.priced(message, spread)


def _words(pieces: list[Found]) -> str:
    """Of an op: the sources of its nodes, and the spread of their sum.

    >>> _words([Found(1.0, 0.1), Found(3.0, 0.3)]), _words([Found(1.0, 0.0, Source.MODELLED), Found(1.0, 0.2)])
    ('measured ± 10 %', 'modelled, measured ± 20 %')
    """
    if not pieces:
        return "its send's"
    known = [f for f in pieces if f.source is not Source.MODELLED]
    seconds, spread = sum(f.seconds for f in known), sum(f.spread_s for f in known)
    words = ", ".join(dict.fromkeys(str(f.source) for f in pieces))
    return f"{words} ± {100 * spread / seconds:.0f} %" if seconds > 0 else words
