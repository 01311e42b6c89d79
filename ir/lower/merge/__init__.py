"""Interleave groups as one static order, by a named policy: alternate, template, profile. Every policy is a shuffle."""

from collections.abc import Sequence

from ir.core.ops import OpToken, Pass
from ir.graph.graph import COMPUTE, Graph
from ir.lower.merge.alternate import Item, alternate, delayed
from ir.lower.merge.cycle import CYCLE, cycled
from ir.lower.merge.listed import listed
from ir.lower.policy import PassMerge, PlanPolicy

__all__ = ["CYCLE", "Item", "alternate", "cycled", "listed", "merged"]


def merged(graph: Graph, policy: PlanPolicy, tokens: Sequence[OpToken], members: Sequence[Sequence[int]]) -> list[Item]:
    """One order of a group's members, each the nodes of one action.

    A group that is not one forward and one backward has no template: its members take turns.
    Raises PiperError (illegal_plan): `profile` without seconds.
    """

    def turns(late: bool) -> list[Item]:
        chains = [delayed(m, comm, weight) if late else m for m in members]
        return alternate(chains, comm, weight)

    def comm(n: int) -> bool:
        return graph.nodes[n].stream != COMPUTE

    def weight(n: int) -> bool:
        return graph.nodes[n].kind is Pass.W

    pair = sorted(t is not OpToken.F for t in tokens) == [False, True] and OpToken.W not in tokens
    if policy.merge is PassMerge.ALTERNATE or not pair:
        return turns(policy.delay_wgrad)
    forward = list(tokens).index(OpToken.F)
    if policy.merge is PassMerge.TEMPLATE:
        return cycled(graph, members, forward, CYCLE, policy.delay_wgrad)
    made = [turns(late) for late in (False, True)]
    made += [cycled(graph, members, forward, CYCLE, late) for late in (False, True)]
    return listed(graph, policy.seconds, members, made)
