"""Peak bytes of every rank of a run before it runs: the very code of a rank, one rank after the other, without peers.

What a rank takes and lets go of depends on its program alone, so the peak is what a run of the plan measures, to the
byte. Where a step is quick it is computed; where its arithmetic would take longer than telling what it would need,
tensors are fake. Either way a rank costs about as much as two of its steps.
"""

from __future__ import annotations

from executor.measure.fake_rank import FakeRank, values
from ir.graph.expert_rows import spread_over
from ir.job.build import PreparedJob
from ir.plan.places import RankPlacement
from ir.plan.plan import Plan

QUICK_FLOPS = 2**28  # of one node: some 10 ms on a core, about what its kernels take as fake ones


def peak_bytes(prepared: PreparedJob, plan: Plan) -> tuple[int, ...] | None:
    """Peak allocated bytes of each rank over one step of the executor, as `piper-sim run` finds them.

    None where nobody knows before: ranks exchange rows of tokens, and routers choose how many.
    """
    if spread_over(plan.graph) and not prepared.job.routing.forced:
        return None
    return peaks(prepared, plan, real=prepared.job.model.module is not None or quick(plan))


def quick(plan: Plan) -> bool:
    """Whether arithmetic is the cheaper way."""
    return max(sum(k.flops * k.count for k in n.work) for n in plan.graph.nodes if not n.once) <= QUICK_FLOPS


def peaks(prepared: PreparedJob, plan: Plan, *, real: bool) -> tuple[int, ...]:
    """The same, by rank. real: with values. A user's own module needs them: it may do what fake tensors cannot."""
    known: dict[object, int] = {}
    out = []
    for number in range(RankPlacement.of(plan).ranks):
        with values(real):
            rank = FakeRank(prepared, plan, number)
            if (alike := rank.alike()) not in known:
                known[alike] = rank.peak()
        out.append(known[alike])
    return tuple(out)
