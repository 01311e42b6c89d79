"""`check` after a directive looks at what it touched, and refuses what a look at everything would refuse."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

import ir.directives.strategy
import ir.graph.graph
from ir.core.errors import PiperError
from ir.core.filters import parse_filter
from ir.core.ops import Pass
from ir.directives import PlaceDirective, SplitDirective, apply
from ir.graph.build import stage_graph
from ir.graph.graph import Graph, GraphEdge, GraphNode, MicrobatchSpan, check
from tests.ir.plans import fewer, moe_graph

GRAPH = moe_graph("dualpipe", 4, 6, recompute=("norm",), tied=True)
HARMLESS = ("the same", "another stage")  # a chunk may lie on several stages
Change = Callable[[Graph, int], Graph]


def at(change: Callable[[GraphNode], GraphNode]) -> Change:
    """The graph with one node changed."""
    return lambda g, k: replace(
        g, nodes=tuple(change(n) if i == k % len(g.nodes) else n for i, n in enumerate(g.nodes))
    )


CHANGES: dict[str, Change] = {
    "placed again": at(lambda n: structs.replace(n, spans=(*n.spans, MicrobatchSpan(range(0, 1), 3)))),
    "moved": at(lambda n: structs.replace(n, spans=tuple(structs.replace(s, group=s.group + 1) for s in n.spans))),
    "out of range": at(lambda n: structs.replace(n, spans=(MicrobatchSpan(range(0, 99), 0),))),
    "nowhere": at(lambda n: structs.replace(n, spans=())),
    "no writes": at(lambda n: structs.replace(n, writes=())),
    "another stage": at(lambda n: structs.replace(n, stage=(n.stage + 1) % 4)),
    "the same": at(lambda n: structs.replace(n)),
    "fewer microbatches": lambda g, k: replace(g, mbs=k % 7),
    "a dangling edge": lambda g, k: replace(g, edges=(*g.edges, GraphEdge(k % len(g.nodes), len(g.nodes) + k, 0))),
    "an edge back": lambda g, k: replace(g, edges=(*g.edges, GraphEdge(g.edges[k % len(g.edges)].dst, 0, 0))),
    "one node less": lambda g, k: replace(g, nodes=g.nodes[:-1]),
    "one node more": lambda g, k: replace(g, nodes=(*g.nodes, structs.replace(g.nodes[k % len(g.nodes)], spans=()))),
}


def verdict(graph: Graph, since: Graph | None) -> str:
    try:
        check(graph, since)
    except PiperError as e:
        return str(e)
    return "passes"


def differs(change: Change, k: int) -> bool:
    changed = change(GRAPH, k)
    return verdict(changed, GRAPH) != verdict(changed, None)


def test_what_a_weight_gradient_reads_lives_until_then() -> None:
    node = {(n.kind, n.part): i for i, n in enumerate(GRAPH.nodes)}
    kept = [(e, k.of) for e in GRAPH.entries for k in e.part.keeps if k.of and k.until is Pass.W]
    assert kept, "a router reads what attention made"
    for e, of in kept:
        src = node[Pass.F, f"{e.chunk.name}.{of}"]
        assert GraphEdge(src, node[Pass.W, e.name], 0) in GRAPH.edges
        assert GraphEdge(src, node[Pass.I, e.name], 0) not in GRAPH.edges


@fewer
@given(st.sampled_from(sorted(CHANGES)), st.integers(0, 10_000))
def test_what_was_checked_before_changes_no_verdict(name: str, k: int) -> None:
    assert not differs(CHANGES[name], k)


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_each_change_but_the_harmless_is_refused(name: str) -> None:
    refused = {verdict(CHANGES[name](GRAPH, k), GRAPH) != "passes" for k in range(0, 400, 7)}
    assert (True in refused) != (name in HARMLESS)


@pytest.mark.parametrize("part", ["_touched", "_same_edges"])
def test_a_look_that_skips_would_be_noticed(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ir.graph.graph, part, lambda graph, since: () if part == "_touched" else True)
    assert any(differs(change, k) for change in CHANGES.values() for k in range(40))


def test_every_directive_is_checked_against_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Graph, Graph | None]] = []
    monkeypatch.setattr(ir.directives.strategy, "check", lambda graph, since: seen.append((graph, since)))
    apply(stage_graph(1), [SplitDirective(parse_filter({}), "MB", 2), PlaceDirective(parse_filter({"PP": 0}), 0)])
    assert [s for _, s in seen] == [None, seen[0][0]]  # nobody has checked what it starts from


def test_a_graph_without_nodes_has_no_stages() -> None:
    assert (Graph((), ()).stages, GRAPH.stages) == (0, 4)
