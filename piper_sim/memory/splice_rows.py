"""How many rows of tokens exchanges bring a rank, where routing is forced, hence known before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ir.graph.expert_rows import spread_over
from ir.job.build import Prepared
from ir.job.routing.forced import Forced
from ir.plan.places import Places
from ir.plan.plan import Plan


@dataclass(frozen=True)
class Rows:
    """Of one rank. own: that its tokens make in a layer; got: (stage's chunk, microbatch) → that its experts get."""

    own: int = 0
    got: Mapping[tuple[str, int], int] = field(default_factory=dict)

    @classmethod
    def of(cls, prepared: Prepared, plan: Plan, rank: int, places: Places) -> Rows:
        """As `[routing]` has it."""
        spread = spread_over(plan.graph)
        if not spread:
            return cls()
        forced = Forced.of(prepared, plan.graph)
        ranks = places.group(rank, ("ep",), (places.program(rank),))
        sources, mine, own, got = [places.position(r) for r in ranks], ranks.index(rank), 0, {}
        for layer in forced.layers:
            if layer.entry.chunk.name in spread:
                own = layer.tokens * forced.top_k
                for mb in range(plan.graph.mbs):
                    counts = forced.counts.tokens(layer.number, mb)[sources]
                    to = counts.reshape(len(ranks), len(ranks), -1).sum(axis=2)
                    got[layer.entry.chunk.name, mb] = int(to[:, mine].sum())
        return cls(own, got)
