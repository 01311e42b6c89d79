"""Megatron's layout strings: read and printed both ways, on their stages, refused by position with what would do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ir.core.errors import PiperError
from ir.job import load_job
from ir.job.build import prepare
from ir.workload import load_config, model_chunks
from ir.workload.layout import format_layout, laid_out, layout_of, parse_layout
from ir.workload.partition import partition
from tests.refusals import refusal

# NVIDIA-NeMo/Megatron-Bridge's recipe of DeepSeek-V3, Megatron-LM pull request 6429, and what Megatron's guide shows.
KNOWN = {
    "Et*3|(tt|)*29,m|L": ["Ettt", *["tt"] * 29, "m", "L"],
    "Ett|(tt|)*6mL": ["Ett", *["tt"] * 6, "mL"],
    "E|t*3|t*3||L": ["E", "ttt", "ttt", "", "L"],
    "E t, t\t".replace("\t", "") + "|ttL": ["Ett", "ttL"],
}
REFUSED = {
    "Et|x|L": ("position 4: 'x' is no part", None),
    "Et3|L": ("position 3: '3' is no part", "a digit only behind *"),
    "E(t|t": ("position 6: '(' without ')'", "E(t|t)"),
    "Et)L": ("position 3: ')' without '('", "(Et)"),
    "E((t))L": ("position 3: a group inside", "write the inner one out"),
    "*3": ("position 1: '*3' repeats nothing", "t*3, (tt|)*3"),
    "Et*0|L": ("position 3: '*0' repeats nothing", "t*3, (tt|)*3"),
    "E(t|)*999999L": ("position 6: more than 100,000 parts", "a smaller number"),
}
PARTS = st.lists(st.tuples(st.text("Etm L".replace(" ", ""), max_size=6), st.integers(1, 4)), min_size=1, max_size=9)


@pytest.mark.parametrize("text", KNOWN)
def test_known_layouts_are_read_as_megatron_reads_them(text: str) -> None:
    assert list(parse_layout(text)) == KNOWN[text]


@given(PARTS)
def test_what_is_printed_is_read_as_the_same_stages_and_is_no_longer(parts: list[tuple[str, int]]) -> None:
    stages = tuple(stage for stage, n in parts for _ in range(n))
    text = format_layout(stages)
    assert parse_layout(text) == stages and format_layout(parse_layout(text)) == text
    assert len(text) <= len("|".join(stages)) + 4 * len(parts)


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_layout_is_refused_where_it_stops_being_one(text: str) -> None:
    e = refusal(parse_layout, text)
    message, fix = REFUSED[text]
    assert message in e.message and e.suggestion == fix and e.key == "schedule.layout"


def test_parts_stand_where_the_layout_says_and_a_list_of_layers_says_the_same() -> None:
    chunks = model_chunks(load_config("deepseek-v3", {"num_hidden_layers": 6}))
    apart = laid_out(chunks, parse_layout("Ett||t*3|t|m|L"))
    names = [" ".join(c.name for c in stage) for stage in apart]
    assert names == ["embed l0 l1", "skip1", "l2 l3 l4", "l5", "mtp0", "head"]
    assert layout_of(apart) == ("Ett", "", "ttt", "t", "m", "L")
    assert laid_out(chunks, layout_of(partition(chunks, 3, [1, 0, 5]))) == partition(chunks, 3, [1, 0, 5])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Et*5|tt|m|L", "part 8, on stage 1, is t, where the model has MTP module (m); decoder layer 7 of 6"),
        ("Et*5|t|L", "part 8, on stage 2, is L, where the model has MTP module (m); MTP module 0 of 1"),
        ("Et*6|L|m", "part 8, on stage 1, is L, where the model has MTP module (m); in another order"),
        ("Et*6|m", "part 9, on stage 1, is nothing, where the model has head (L); head 0 of 1"),
    ],
)
def test_parts_the_model_does_not_have_are_refused_with_a_layout_that_would_do(text: str, message: str) -> None:
    chunks = model_chunks(load_config("deepseek-v3", {"num_hidden_layers": 6}))
    e = refusal(laid_out, chunks, parse_layout(text))
    assert message in e.message
    assert len(laid_out(chunks, parse_layout(e.suggestion or ""))) == len(parse_layout(text))


def test_a_job_s_layout_says_how_many_stages_a_rank_has_and_stands_alone() -> None:
    table = {"model": {"config": "tiny-llama", "num_hidden_layers": 4}, "parallel": {"pp": 2}}
    job = load_job(table | {"schedule": {"name": "vpp", "layout": "E|tt||tt|(|)*1L"}}, ["schedule.layout=E|tt|t|tL"])
    made = prepare(job)
    assert made.stages == 4 and made.layers == (0, 2, 1, 1) and made.layout == ("E", "tt", "t", "tL")
    for sets, message in (
        (["schedule.layout=E|tttt|L"], "the layout has 3 stages, vpp on 2 ranks has 4"),
        (["schedule.stages_per_rank=3"], "the layout has 5 stages, vpp on 2 ranks has 6"),
        (["parallel.layers=even"], "both say where layers stand"),
    ):
        with pytest.raises(PiperError, match=message):
            prepare(load_job(table | {"schedule": {"name": "vpp", "layout": "E|tt||tt|L"}}, sets))


@pytest.mark.parametrize("text", ["((t)*2)", "t(t(t)*2)"])
def test_groups_are_not_put_inside_of_groups(text: str) -> None:
    refusal(parse_layout, text, match="a group inside of a group")
