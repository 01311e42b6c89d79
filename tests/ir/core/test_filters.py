"""The filter language: what each form accepts, and what is refused with a hint."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ir.core.errors import ErrorKind
from ir.core.filters import PASSES, parse_filter, parse_match, runs
from ir.core.ops import Pass
from ir.directives.select import select
from tests.ir.plans import moe_graph
from tests.refusals import refusal

ITEMS = st.lists(
    st.one_of(st.integers(0, 20), st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted).map(tuple)),
    min_size=1,
    max_size=5,
)


def members(items: list[int | tuple[int, int]]) -> set[int]:
    return {m for i in items for m in ([i] if isinstance(i, int) else range(i[0], i[1] + 1))}


def text(items: list[int | tuple[int, int]]) -> str:
    return ",".join(str(i) if isinstance(i, int) else f"{i[0]}..{i[1]}" for i in items)


@given(ITEMS, st.booleans())
def test_sets_and_ranges_accept_their_members_and_negations_the_rest(
    items: list[int | tuple[int, int]], negated: bool
) -> None:
    match = parse_match("MB", ("!" if negated else "") + text(items))
    assert {m for m in range(30) if match.accepts(m)} == {m for m in range(30) if (m in members(items)) != negated}
    assert not match.accepts(None)


@given(ITEMS, st.integers(0, 25), st.booleans())
def test_microbatches_are_the_sorted_disjoint_ranges_of_what_is_accepted(
    items: list[int | tuple[int, int]], mbs: int, negated: bool
) -> None:
    found = parse_filter({"MB": ("!" if negated else "") + text(items)}).microbatches("MB", mbs)
    assert [m for r in found for m in r] == [m for m in range(mbs) if (m in members(items)) != negated]
    assert all(a.stop < b.start for a, b in pairwise(found))


def test_a_list_says_the_same_as_a_set() -> None:
    assert parse_match("PP", [0, 2, "5..7"]).ranges == parse_match("PP", "0,2,5..7").ranges


def test_star_means_the_tag_and_dash_means_its_absence() -> None:
    has, lacks = parse_match("EP", "*"), parse_match("EP", "-")
    for index in (None, 3):
        assert has.accepts(index) != lacks.accepts(index)
        assert has.accepts(index) == (index is not None)


def test_tags_are_a_conjunction_and_pass_is_one_of_them() -> None:
    f = parse_filter({"PP": "0..1", "MOE": "*", "PASS": "B"})
    graph = moe_graph("1f1b", 4, 4)
    hits = [graph.nodes[i] for i in select(graph, f, "filter")]
    backward = [n for n in graph.nodes if n.kind in (Pass.I, Pass.W) and n.stage < 2]
    assert hits == [n for n in backward if "MOE" in n.tags] and 0 < len(hits) < len(backward)
    assert f.tags == ("PP", "MOE")


def test_every_pass_has_a_spelling() -> None:
    assert {p for spelled in PASSES.values() for p in spelled} == set(Pass)


@given(st.dictionaries(st.sampled_from(["PP", "EP", "L", "MB"]), st.integers(0, 9)))
def test_a_filter_is_written_as_it_was_read(tags: dict[str, int]) -> None:
    assert parse_filter(tags).json() == tags
    assert json.loads(str(parse_filter(tags))) == tags


@given(st.sets(st.integers(0, 40)))
def test_runs_are_maximal(indices: set[int]) -> None:
    found = runs(sorted(indices))
    assert [m for r in found for m in r] == sorted(indices)
    assert all(a.stop < b.start for a, b in pairwise(found))


@pytest.mark.parametrize(
    ("value", "match", "fix"),
    [
        ([], "a filter is an object of tags", None),
        ("PP=0", "a filter is an object of tags", None),
        ({"PP": -1}, "PP: indices are not negative", None),
        ({"PP": True}, "PP: True selects nothing", None),
        ({"PP": None}, "PP: None selects nothing", None),
        ({"PP": 1.5}, "PP: 1.5 is no index", None),
        ({"PP": {}}, "PP: {} is no index", None),
        ({"PP": "one"}, "PP: 'one' is no index, range or set", None),
        ({"PP": "1..2..3"}, "PP: '1..2..3' is no index", None),
        ({"PP": ""}, "PP: '' is no index", None),
        ({"PP": "5..3"}, "the range '5..3' is empty", "3..5"),
        ({"PP": [1, "x"]}, "PP: 'x' is no index", None),
        ({"PASS": "FB"}, "PASS: 'FB' is no pass", None),
        ({"PASS": 3}, "PASS: 3 is no pass", None),
        ({"PASS": "bi"}, "PASS: 'bi' is no pass", "BI"),
    ],
)
def test_what_selects_nothing_is_refused(value: object, match: str, fix: str | None) -> None:
    refused = refusal(parse_filter, value, match=match)
    assert refused.kind is ErrorKind.DIRECTIVE
    assert refused.allowed
    assert fix is None or refused.suggestion == fix
