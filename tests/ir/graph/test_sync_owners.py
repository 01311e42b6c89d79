"""Who holds a shard, over which mesh axes, and whose gradient is whole already: tensor and context parallel jobs."""

from math import prod

import pytest

from ir.core.filters import parse_filter
from ir.core.work import MessageKind
from ir.directives import ReplicateDirective
from ir.graph.graph import Graph, PerStepOp
from ir.graph.sync import Bucket, buckets, repeated
from ir.job.build import prepare
from ir.job.load import job_from
from ir.workload.params import local_numel
from tests.ir.plans import moe_graph


def graph(config: str = "tiny-llama", zero: int = 0, *, planned: bool = False, **parallel: object) -> Graph:
    """planned: with what exists once per step."""
    job = {
        "model": {"config": config, "seq_len": 64},
        "parallel": {"zero": zero, **parallel},
        "schedule": {"microbatches": 2},
        "cluster": {"gpu": "h100-sxm"},
    }
    prepared = prepare(job_from(job))
    return prepared.plan().graph if planned else prepared.graph()


def by_axes(g: Graph) -> dict[tuple[str, ...], set[str]]:
    out: dict[tuple[str, ...], set[str]] = {}
    for b in buckets(g):
        out.setdefault(b.axes, set()).update(p.split(".")[-2] for p in b.params)
    return out


LINEARS = {"embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}
NORMS = {"input_layernorm", "post_attention_layernorm", "norm"}


def test_with_sequence_parallelism_what_is_not_cut_is_summed_over_tp() -> None:
    g = graph(tp=2, cp=2, dp=2, planned=True)
    assert by_axes(g) == {("cp", "dp"): LINEARS, ("tp", "cp", "dp"): NORMS} and repeated(g) == frozenset()
    assert {b.axes: b.ranks for b in buckets(g)} == {("cp", "dp"): 4, ("tp", "cp", "dp"): 8}
    messages = {n.part: n.message for n in g.nodes if n.kind is PerStepOp.ALL_REDUCE}
    assert {m.axes for m in messages.values() if m} == {("cp", "dp"), ("tp", "cp", "dp")}


def test_without_it_every_tp_rank_has_their_gradients_and_one_counts_them() -> None:
    g = graph(tp=2, dp=2, sequence_parallel=False)
    assert by_axes(g) == {("cp", "dp"): LINEARS | NORMS}
    assert {p.split(".")[-2] for p in repeated(g)} == NORMS
    assert repeated(graph(dp=2)) == frozenset()


@pytest.mark.parametrize("sequence", [True, False])
def test_norms_of_heads_are_summed_over_tp_in_any_case(sequence: bool) -> None:
    g = graph("qwen3-8b", tp=4, dp=2, sequence_parallel=sequence)
    found = by_axes(g)["tp", "cp", "dp"]
    assert found == ({"q_norm", "k_norm"} | (NORMS if sequence else set()))
    assert not any("q_norm" in p for p in repeated(g))


def test_narrow_latent_projections_are_whole_on_every_rank() -> None:
    narrow = {"q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"}
    g = graph("deepseek-v3", tp=4, dp=2, ep=8, sequence_parallel=True)
    assert narrow | {"gate", "eh_proj"} <= by_axes(g)["tp", "cp", "dp"]
    assert set(by_axes(g)) == {("cp", "dp"), ("tp", "cp", "dp"), ("edp",)}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_element_is_in_one_bucket_and_zero_cuts_it_over_all_who_hold_it(zero: int) -> None:
    g = graph(zero=zero, planned=True, tp=2, cp=2, dp=2, pp=2)
    found, layouts = buckets(g), {p.name: (p, e.layout) for e in g.entries for p in e.part.params}
    assert sorted(n for b in found for n in b.params) == sorted(layouts)
    for b in found:
        assert b.numel == sum(local_numel(*layouts[n]) for n in b.params)
        sizes = {"tp": 2, "cp": 2, "dp": 2}
        assert b.ranks == prod(sizes[a] for a in b.axes) and b.shard == -(-b.numel // b.ranks)
    assert len({b.key for b in found}) == len(found)
    assert not any(b.alone for b in found) and all(b.alone for b in buckets(graph(zero=zero, pp=2)))
    if zero in (1, 2):
        assert _gathers(g) == {b.key: b.axes for b in found}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_does_not_divide_is_padded_where_it_travels_and_updated_share_by_share(zero: int) -> None:
    g = graph(zero=zero, planned=True, dp=3, pp=2)
    found = buckets(g)
    assert any(b.numel % 3 for b in found)
    for n in (n for n in g.nodes if n.kind in (PerStepOp.REDUCE, PerStepOp.ALL_REDUCE, PerStepOp.GATHER)):
        (numel,) = (b.numel for b in found if b.key == n.bucket)
        element = 2 if n.kind is PerStepOp.GATHER else 4
        assert n.message and n.message.bytes == element * (numel + -numel % 3)
    for n in (n for n in g.nodes if n.kind is PerStepOp.UPDATE):
        mine = [b.numel for b in found if n.groups[0] in b.owners]
        assert n.numel == sum((x + -x % 3) // 3 if zero else x for x in mine)


def _gathers(g: Graph) -> dict[str, tuple[str, ...]]:
    nodes = [n for n in g.nodes if n.kind is PerStepOp.GATHER]
    assert all(n.message and n.message.kind is MessageKind.ALL_GATHER for n in nodes)
    return {f"{n.stage}/{n.part}": n.message.axes for n in nodes if n.message}


def test_a_bucket_says_that_tp_holds_it() -> None:
    def names(found: tuple[Bucket, ...]) -> set[str]:
        return {b.name for b in found}

    assert names(buckets(graph(tp=2, dp=2))) == {"dense", "dense.tp"}
    assert names(buckets(graph(tp=2, dp=2, sequence_parallel=False))) == {"dense"}


def test_buckets_that_would_be_called_the_same_say_in_what_they_differ_and_no_more() -> None:
    less = ReplicateDirective(parse_filter({"L": "1"}), 0, None, "dp", "dp")
    g = moe_graph("1f1b", 2, 2, zero=1, layers=4, then=(less,))
    apart = {f"0/{kind}.zero{level}" for kind in ("dense", "experts") for level in (0, 1)}
    assert {b.key for b in buckets(g)} == apart | {"1/dense", "1/experts"}


@pytest.mark.parametrize(
    ("limit", "first", "second"), [(1055, 1, 2), (1056, 1, 3), (1279, 1, 4), (1280, 2, 3), (1281, 2, 3), (1360, 3, 2)]
)
def test_a_bucket_is_as_large_as_was_asked(limit: int, first: int, second: int) -> None:
    """Of the first stage: a table of 50 x 4 elements, attention of 30 x 4 and of 31 x 4, routers of 5 x 4; four bytes
    each."""
    found = {b.key: b.params for b in buckets(moe_graph("1f1b", 2, 2, layers=4, bucket_MiB=limit / 2**20))}
    names = ("embed.weight", "l0.attn", "l0.router", "l1.attn", "l1.router")
    assert found["0/dense.0"] == names[:first] and found["0/dense.1"] == names[first : first + second]
