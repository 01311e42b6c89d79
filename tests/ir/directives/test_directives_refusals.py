"""Directives say what they cannot do: which directive, which op, what is allowed, the nearest fix."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from msgspec import structs

from ir.core.errors import ErrorKind, PiperError
from ir.core.filters import DirectiveFilter, parse_filter
from ir.core.mesh import Mesh
from ir.core.order import Order
from ir.directives import (
    Directive,
    OrderDirective,
    PlaceDirective,
    ReplicateDirective,
    ShardDirective,
    SplitDirective,
    apply,
)
from ir.graph.build import model_graph, stage_graph
from ir.graph.graph import Graph, GraphEdge, MicrobatchSpan, check
from ir.lower import PassMerge, PlanPolicy, lower
from ir.verify import check_plan
from tests.ir.plans import InventedSource, cut, moe_chunks
from tests.refusals import refusal


def f(**tags: object) -> DirectiveFilter:
    return parse_filter(tags)


SPLIT = SplitDirective(f(), "MB", 4)
PLACED = [SPLIT, *(PlaceDirective(f(PP=s), s) for s in range(2))]


def moe() -> Graph:
    mesh = Mesh.of(tp=1, cp=1, dp=4, pp=2, ep=2)
    return replace(model_graph(cut(moe_chunks(4), 2), InventedSource()), mesh=mesh)


def refused(
    strategy: Sequence[Directive], match: str, graph: Graph | None = None, kind: ErrorKind = ErrorKind.DIRECTIVE
) -> PiperError:
    caught = refusal(lambda: lower(apply(stage_graph(2) if graph is None else graph, strategy)), match=match)
    assert caught.kind is kind
    return caught


ILLEGAL = ErrorKind.ILLEGAL_PLAN

# --- filters in directives -----------------------------------------------------------------


def test_an_unknown_tag_is_refused_with_the_nearest() -> None:
    error = refused([PlaceDirective(f(PPP=0), 0)], r"place\(.*\): no node carries the tag 'PPP'")
    assert error.suggestion == "PP"
    assert error.allowed == "PP, PASS"


def test_a_microbatch_tag_is_unknown_before_split() -> None:
    refused([PlaceDirective(f(PP=0, MB=1), 0)], "no node carries the tag 'MB'")


def test_a_filter_that_selects_nothing_is_refused_with_what_there_is() -> None:
    assert refused([PlaceDirective(f(PP=7), 0)], "selects nothing").allowed == "PP 0..1"
    assert refused([SPLIT, PlaceDirective(f(PP=1, MB="4..9"), 0)], "selects nothing").allowed == "PP 0..1, MB 0..3"


# --- split ---------------------------------------------------------------------------------


def test_split_refuses_none_a_second_time_after_place_and_a_part() -> None:
    refused([SplitDirective(f(), "MB", 0)], "0 microbatches")
    refused([SPLIT, SPLIT], "already split by MB")
    refused([PlaceDirective(f(PP=0), 0), SPLIT], "nodes are already placed")
    refused([SplitDirective(f(PP=0), "MB", 4)], "leaves part of the model out")


# --- place ---------------------------------------------------------------------------------


def test_place_refuses_a_second_home() -> None:
    error = refused([*PLACED, PlaceDirective(f(PP=1), 5)], "1F0 is already on group 1")
    assert error.suggestion and "drop one" in error.suggestion
    refused(
        [SPLIT, PlaceDirective(f(PP=1, MB="0..2"), 0), PlaceDirective(f(PP=1, MB="2..3"), 1)],
        "1F2 is already on group 0",
    )


def test_passes_of_one_part_cannot_live_apart() -> None:
    refused([SPLIT, PlaceDirective(f(PP=1, PASS="F"), 0)], "1I is placed on nothing but 1F on group 0", kind=ILLEGAL)


def test_a_stage_that_is_placed_nowhere_is_named() -> None:
    refused([SPLIT, PlaceDirective(f(PP=0), 0)], "1F0 is placed nowhere", kind=ILLEGAL)
    refused(
        [SPLIT, PlaceDirective(f(PP=0), 0), PlaceDirective(f(PP=1, MB="0..2"), 1)],
        "1F3 is placed nowhere",
        kind=ILLEGAL,
    )


def test_a_stage_placed_in_two_pieces_is_refused() -> None:
    pieces = [SPLIT, PlaceDirective(f(PP=0), 0), PlaceDirective(f(PP=1, L="*"), 1), PlaceDirective(f(PP=1, L="-"), 0)]
    refused(pieces, "is on group 0, the rest of stage 1 on 1", moe(), ILLEGAL)


def test_a_chunk_placed_in_pieces_is_refused() -> None:
    pieces = [SPLIT, PlaceDirective(f(PP=0), 0), PlaceDirective(f(PP=1, EP="*"), 1), PlaceDirective(f(PP=1, EP="-"), 0)]
    refused(pieces, "place all passes of a chunk together", moe(), ILLEGAL)


def test_a_group_that_holds_nothing_is_named() -> None:
    refused(
        [SPLIT, PlaceDirective(f(PP=0), 0), PlaceDirective(f(PP=1), 2)], "nothing is placed on group 1", kind=ILLEGAL
    )


# --- replicate, shard ----------------------------------------------------------------------


def test_replicate_refuses_levels_and_bucket_sizes_that_do_not_exist() -> None:
    assert refused([ReplicateDirective(f(), 4)], "zero is a level", moe()).allowed == "0, 1, 2, 3"
    refused([ReplicateDirective(f(), 1, 0.0)], "bucket_MiB = 0.0", moe())
    refused([ReplicateDirective(f(DP=0), 1)], "no node carries the tag 'DP'", moe())


def test_shard_refuses_unknown_axes_and_bare_pipelines() -> None:
    assert refused([ShardDirective(f(), "epp")], "no such axis", moe()).suggestion == "ep"
    refused([ShardDirective(f(), "ep")], "a bare pipeline has nothing to shard")
    refused([ShardDirective(f(EP=9), "ep")], "selects nothing", moe())


# --- order ---------------------------------------------------------------------------------


def rows(*chains: Sequence[Sequence[DirectiveFilter]]) -> OrderDirective:
    return OrderDirective(rows=tuple(tuple(tuple(group) for group in chain) for chain in chains))


def test_an_order_table_of_a_group_that_is_not_there_is_refused() -> None:
    error = refused([*PLACED, OrderDirective(table=((7, Order.of(["0F0"])),))], "nothing is placed on group 7")
    assert error.allowed == "0..1"


def test_rows_that_cross_programs_are_refused() -> None:
    refused([*PLACED, rows([[f(PP=0, PASS="F", MB=0)], [f(PP=1, PASS="F", MB=0)]])], r"actions of programs \[0, 1\]")


def test_rows_that_close_a_cycle_are_refused_with_what_is_stuck() -> None:
    chain = [[f(PP=0, MB=0, PASS="B")], [f(PP=0, MB=0, PASS="F")]]
    refused([*PLACED, rows(chain)], r"close a cycle; none of .*0F0.* can come first", kind=ILLEGAL)


def test_rows_that_close_a_cycle_across_programs_are_refused() -> None:
    first = [[f(PP=0, MB=1, PASS="F")], [f(PP=0, MB=0, PASS="F")]]
    second = [[f(PP=1, MB=0, PASS="F")], [f(PP=1, MB=1, PASS="F")]]
    lower(apply(stage_graph(2), [*PLACED, rows(first, second)]))  # strange, but it can run
    early = [[f(PP=0, MB=0, PASS="B")], [f(PP=0, MB=1, PASS="F")]]
    late = [[f(PP=1, MB=1, PASS="F")], [f(PP=1, MB=0, PASS="B")]]
    refused([*PLACED, rows(early, late)], "close a cycle", kind=ILLEGAL)


def test_rows_of_a_stage_that_is_placed_nowhere_are_refused() -> None:
    chain = [[f(PP=1, MB=0, PASS="F")], [f(PP=1, MB=0, PASS="B")]]
    refused([SPLIT, PlaceDirective(f(PP=0), 0), rows(chain)], "1F0 is placed nowhere", kind=ILLEGAL)


def test_an_action_ordered_twice_is_refused() -> None:
    twice = [[f(PP=0, MB=0, PASS="F")], [f(PP=0, MB="0..1", PASS="F")]]
    refused([*PLACED, rows(twice)], "0F0 is ordered twice")


def test_a_filter_that_names_part_of_a_stage_is_refused() -> None:
    chain = [[f(L=0, PASS="F")], [f(PP=0, PASS="B")]]
    places = [SPLIT, *(PlaceDirective(f(PP=s), s) for s in range(2))]
    refused([*places, rows(chain)], "names a part of stage 0", moe())


def test_an_interleave_group_needs_one_action_each() -> None:
    group = [[f(PP=0, PASS="F"), f(PP=0, PASS="B", MB=0)], [f(PP=0, PASS="B", MB=1)]]
    refused([*PLACED, rows(group)], "an interleave group needs filters of one action each")


def test_rows_complete_by_dataflow_into_a_plan_that_runs() -> None:
    chain = [[f(PP=0, PASS="F", MB="0..1")], [f(PP=0, PASS="B", MB=0)], [f(PP=0, PASS="F", MB=2)]]
    plan = lower(apply(stage_graph(2), [*PLACED, rows(chain)]))
    check_plan(plan)
    mine = [t for t in plan.texts if t[0] == "0" and t[1] in "FB"]
    assert mine.index("0B0") < mine.index("0F2")


# --- the graph's own rules -----------------------------------------------------------------


def test_a_data_cycle_is_refused_by_name() -> None:
    graph = stage_graph(2)
    with pytest.raises(PiperError, match=r"data edges form a cycle through .*0F"):
        check(replace(graph, edges=(*graph.edges, GraphEdge(3, 0, 0))))


def test_an_edge_to_nowhere_is_refused() -> None:
    graph = stage_graph(2)
    with pytest.raises(PiperError, match="names a node that is not in the graph"):
        check(replace(graph, edges=(*graph.edges, GraphEdge(3, 99, 0))))
    refusal(check, replace(graph, edges=(*graph.edges, GraphEdge(0, 3, 7))), match="1F reads a buffer that 0F lacks")


def test_a_microbatch_placed_twice_or_out_of_range_is_refused() -> None:
    graph = apply(stage_graph(1), [SPLIT])
    for spans, match in (
        ((MicrobatchSpan(range(2), 0), MicrobatchSpan(range(1, 4), 1)), "a microbatch is placed twice"),
        ((MicrobatchSpan(range(1, 4), 1), MicrobatchSpan(range(2), 0)), "a microbatch is placed twice"),
        ((MicrobatchSpan(range(5), 0),), "range(0, 5) of 4"),
    ):
        nodes = tuple(structs.replace(n, spans=spans) for n in graph.nodes)
        refusal(check, replace(graph, nodes=nodes), match=match.replace("(", r"\(").replace(")", r"\)"))


# --- orders that lowering refuses ----------------------------------------------------------


def table(*cells: Sequence[str]) -> OrderDirective:
    return OrderDirective(table=tuple((p, Order.of(list(c))) for p, c in enumerate(cells)))


LATER = [f"1{k}{m}" for m in range(4) for k in "FB"]


@pytest.mark.parametrize(
    ("cells", "match"),
    [
        (["0F0", "0B0"], "0F1 is in no program's order"),
        ([f"0{k}{m}" for m in range(4) for k in "BF"], "0B0 stands before 0F0, whose result it reads"),
        ([f"0{k}{m}" for m in (0, 0, 1, 2, 3) for k in "FB"], "0F0 runs twice"),
        ([f"0{k}{m}" for m in range(5) for k in "FB"], "0F4: there are 2 stages and 4 microbatches"),
        ([*(f"0{k}{m}" for m in range(4) for k in "FB"), "2F0"], "2F0: there are 2 stages"),
        (
            [*(f"0{k}{m}" for m in range(4) for k in "FB"), "1F0"],
            "program 0 is to run 1F0, but stage 1 is on program 1",
        ),
        ([], "program 0 has an empty order"),
        ([f"0{k}{m}" for m in range(4) for k in "FI"], "0W0 is in no program's order"),
    ],
)
def test_an_order_that_is_no_order_of_the_graph_is_refused(cells: list[str], match: str) -> None:
    refused([*PLACED, table(cells, LATER)], match, kind=ILLEGAL)


def test_some_programs_ordered_and_others_not_is_refused() -> None:
    half = OrderDirective(table=((0, Order.of([f"0{k}{m}" for m in range(4) for k in "FB"])),))
    refused([*PLACED, half], r"programs \[1\] have no order while others have", kind=ILLEGAL)


def test_an_order_that_can_never_run_is_refused_with_the_story() -> None:
    mine = [*(f"0F{m}" for m in (1, 0, 2, 3)), *(f"0B{m}" for m in range(4))]
    late = ["1F0", "1B0", *(f"1{k}{m}" for m in (1, 2, 3) for k in "FB")]
    graph = apply(stage_graph(2), [*PLACED, table(mine, late)])
    check_plan(lower(graph))  # the receives are hoisted: F1 comes first, is kept, and used second
    stuck = ["0F0", "0B0", *(f"0{k}{m}" for m in (1, 2, 3) for k in "FB")]
    backwards = [f"1{k}{m}" for m in (1, 0, 2, 3) for k in "FB"]
    with pytest.raises(PiperError, match="the plan cannot finish") as caught:
        check_plan(lower(apply(stage_graph(2), [*PLACED, table(stuck, backwards)])))
    assert caught.value.kind is ErrorKind.DEADLOCK
    assert "program 0 compute stands at 0B0" in caught.value.message
    assert "program 1 compute stands at 1F1" in caught.value.message


def test_a_group_that_cannot_be_one_op_is_refused() -> None:
    graph = apply(moe(), [*PLACED, ShardDirective(f(EP="*"), "ep"), ReplicateDirective(f(), 0)])
    cells = ["0F0", "0F1", "(0F2;0B0)OVERLAP_F_B", "0F3", "0B1", "0B2", "0B3"]
    ordered = apply(graph, [table(cells, LATER)])
    check_plan(lower(ordered))
    refusal(lower, ordered, PlanPolicy(merge=PassMerge.FUSED), match="0F 0B cannot be one fused op")
