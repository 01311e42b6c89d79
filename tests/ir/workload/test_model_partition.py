from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ir.core.errors import ErrorKind
from ir.workload import load_config, model_chunks
from ir.workload.part import chunk_flops
from ir.workload.partition import partition
from ir.workload.setting import MicrobatchShape, ModelPrecision
from ir.workload.work import ConfigModelWork
from tests.refusals import refusal


def llama(layers):
    return model_chunks(load_config("llama3-8b", {"num_hidden_layers": layers}))


def counts(stages):
    return [sum("L" in c.tags for c in stage) for stage in stages]


def refused(*args):
    e = refusal(partition, *args)
    assert e.kind is ErrorKind.JOB
    assert e.kind.exit_code == 2
    assert e.allowed
    assert e.suggestion
    return e


def test_even_divides_layers_or_layers_and_both_ends():
    assert counts(partition(llama(32), 4, "even")) == [8, 8, 8, 8]
    assert counts(partition(llama(30), 4, "even")) == [7, 8, 8, 7]
    assert counts(partition(llama(126), 16, "even")) == [7, *[8] * 14, 7]
    assert counts(partition(llama(7), 1, "even")) == [7]
    assert counts(partition(llama(2), 4, "even")) == [0, 1, 1, 0]


def test_even_refuses_the_rest_and_names_what_is_legal():
    assert "balanced" in refused(llama(61), 16, "even").suggestion
    assert refused(llama(61), 64, "even").suggestion == "61 stages or fewer"
    assert "4 stages" in refused(llama(32), 5, "even").suggestion
    assert "16 stages" in refused(llama(30), 17, "even").suggestion, "which divides the layers and both ends"


@pytest.mark.parametrize("layers", ["even", "balanced"])
def test_61_layers_on_64_stages_are_refused(layers):
    v3 = model_chunks(load_config("deepseek-v3"))
    e = refused(v3, 64, layers)
    assert e.key == "parallel.layers"
    assert "61" in e.message


def test_listed_counts_may_hold_zeros_and_must_fit():
    stages = partition(llama(4), 4, [0, 2, 2, 0])
    assert [[c.name for c in s] for s in stages] == [["embed"], ["l0", "l1"], ["l2", "l3"], ["head"]]
    assert "sum to 5" in refused(llama(4), 2, [2, 3]).message
    assert "3 layer counts for 2 stages" in refused(llama(4), 2, [2, 1, 1]).message
    refusal(partition, llama(4), 2, [5, -1], match="not layer counts")
    refusal(partition, llama(4), 2, [True, 3], match="not layer counts")


def test_unknown_words_are_refused():
    assert refused(llama(4), 2, "balance").suggestion == "balanced"
    refusal(partition, llama(4), 0, "even", match="0 stages")


def test_ends_go_to_the_outer_stages_in_order():
    source = ConfigModelWork(load_config("deepseek-v3"), MicrobatchShape(), ModelPrecision())
    v3 = model_chunks(source.config)
    stages = partition(v3, 16, "balanced", lambda c: chunk_flops(source, c))
    assert stages[0][0].name == "embed"
    assert [c.name for c in stages[-1]][-2:] == ["mtp0", "head"]
    assert [c.name for s in stages for c in s] == [c.name for c in v3]
    assert max(counts(stages)) == 4


def test_balanced_gives_the_head_fewer_layers():
    config = load_config("llama3-8b")
    chunks = model_chunks(config)
    source = ConfigModelWork(config, MicrobatchShape(), ModelPrecision())
    costs = [chunk_flops(source, c) for c in chunks]
    got = counts(partition(chunks, 4, "balanced", costs))
    assert got[-1] < got[0]
    assert sum(got) == 32
    # Negative control: the even split's dearest stage is dearer.
    assert worst(got, costs) < worst([8, 8, 8, 8], costs)


def worst(split, costs):
    """The dearest stage; costs: embedding, layers, head."""
    inner, out, at = list(costs[1:-1]), [], 0
    for n in split:
        out.append(sum(inner[at : at + n]))
        at += n
    out[0] += costs[0]
    out[-1] += costs[-1]
    return max(out)


@given(st.lists(st.integers(0, 9), min_size=3, max_size=10), st.integers(1, 8))
def test_balanced_is_optimal_and_contiguous(costs, stages):
    chunks = llama(len(costs) - 2)
    n = len(costs) - 2
    if stages > n:
        refused(chunks, stages, "balanced", costs)
        return
    got = counts(partition(chunks, stages, "balanced", costs))
    splits = [
        [b - a for a, b in zip((0, *cuts), (*cuts, n), strict=True)] for cuts in combinations(range(1, n), stages - 1)
    ]
    assert got in splits
    assert worst(got, costs) == min(worst(s, costs) for s in splits)


def test_balanced_is_quick_and_even_on_equal_layers():
    assert counts(partition(llama(126), 64, "balanced")) in ([[2] * 62 + [1] * 2][0], sorted([2] * 62 + [1] * 2))
    assert sorted(counts(partition(llama(61), 16, "balanced"))) == [3] * 3 + [4] * 13


def test_costs_must_be_one_finite_number_per_chunk():
    for costs in ([1.0], [float("nan")] * 6, [-1.0] * 6):
        refusal(partition, llama(4), 2, "balanced", costs, match="costs")


def test_a_stage_without_layers_hands_its_input_on() -> None:
    stages = partition(model_chunks(load_config("tiny-llama", {"num_hidden_layers": 4})), 3, [2, 0, 2])
    assert [[c.name for c in stage] for stage in stages] == [["embed", "l0", "l1"], ["skip1"], ["l2", "l3", "head"]]
