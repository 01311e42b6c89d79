"""Which weights are cast, by whom, and what the copies weigh: counted anew from a config's own sizes."""

from typing import Any

import pytest

from ir.core.filters import parse_filter
from ir.core.ops import Pass
from ir.core.work import WEIGHTS_CAST
from ir.directives import ReplicateDirective, apply
from ir.graph.casts import weight_casts, with_casts
from ir.graph.graph import Graph
from ir.job.build import prepare
from ir.job.load import job_from

MODEL = {"config": "tiny-llama", "seq_len": 16}
H, FFN, VOCAB, Q, KV = 64, 128, 256, 64, 32
SIZES = {
    "hidden_size": H, "intermediate_size": FFN, "vocab_size": VOCAB, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_hidden_layers": 2,
}  # fmt: skip
ATTN, MLP = H * Q + 2 * H * KV + Q * H, 3 * H * FFN


def graph_of(precision: dict[str, str], dp: int = 1, zero: int = 0, **more: Any) -> Graph:
    parallel = {"pp": 1, "dp": dp, "zero": zero}
    schedule = {"microbatches": 2, **more}
    return prepare(
        job_from({"model": MODEL | SIZES, "parallel": parallel, "schedule": schedule, "precision": precision})
    ).graph()


def copies(graph: Graph) -> dict[str, int]:
    return {part: x.bytes for (_, part), x in weight_casts(graph).items()}


MIXED = {"compute": "bf16", "params": "fp32"}


def test_matrices_are_cast_and_what_is_looked_up_is_not() -> None:
    layer = {"attn": 2 * ATTN, "mlp": 2 * MLP}
    expected = {f"l{n}.{part}": size for n in range(2) for part, size in layer.items()}
    assert copies(graph_of(MIXED)) == expected | {"head.head": 2 * VOCAB * H}


@pytest.mark.parametrize(
    ("precision", "dp", "zero", "cast"),
    [
        ({"compute": "bf16", "params": "bf16"}, 1, 0, False),
        ({"compute": "fp32", "params": "fp32"}, 1, 0, False),
        ({"compute": "fp8", "params": "fp32"}, 1, 0, False),  # each product's own casts are priced beside it
        ({"compute": "fp32", "params": "bf16"}, 1, 0, True),
        (MIXED, 2, 0, True),
        (MIXED, 2, 1, True),
        (MIXED, 2, 2, True),
        (MIXED, 2, 3, False),
        (MIXED, 1, 3, True),  # nobody to gather from
        (MIXED | {"gather": "fp32"}, 2, 3, True),
        ({"compute": "bf16", "params": "bf16", "gather": "fp32"}, 2, 3, True),
    ],
)
def test_who_casts(precision: dict[str, str], dp: int, zero: int, cast: bool) -> None:
    assert bool(copies(graph_of(precision, dp, zero))) is cast


def test_casts_stand_in_front_of_forward_and_behind_weight_gradients() -> None:
    node = {(n.kind, n.part): n for n in graph_of(MIXED).nodes}
    forward, back = (node[kind, "l0.mlp"].work for kind in (Pass.F, Pass.W))
    assert forward[0] == back[-1] and forward[0].label == WEIGHTS_CAST
    assert forward[0].count == 3 and forward[0].bytes * 3 == MLP * (4 + 2)
    assert [k.label for k in node[Pass.I, "l0.mlp"].work].count(WEIGHTS_CAST) == 0
    plain = {(n.kind, n.part): n for n in graph_of({"compute": "bf16", "params": "bf16"}).nodes}
    assert forward[1:] == plain[Pass.F, "l0.mlp"].work and back[:-1] == plain[Pass.W, "l0.mlp"].work


def test_what_runs_again_casts_again() -> None:
    nodes = graph_of(MIXED, recompute="full").nodes
    cast = {(n.kind, n.part) for n in nodes if any(k.label == WEIGHTS_CAST for k in n.work)}
    assert {kind for kind, part in cast if part == "l1.attn"} == {Pass.F, Pass.R, Pass.W}
    assert {kind for kind, part in cast if part == "head.head"} == {Pass.F, Pass.W}


def test_what_is_cast_one_by_one_takes_room_for_one() -> None:
    """A forward that keeps nothing has one copy at a time; of a gradient both formats are there."""
    largest = H * FFN
    for recompute, copy in (("none", 0), ("full", 2 * largest)):
        mixed, plain = (
            {(n.kind, n.part): n.workspace for n in graph_of(p, recompute=recompute).nodes}
            for p in (MIXED, {"compute": "bf16", "params": "bf16"})
        )
        more = {kind: mixed[kind, "l1.mlp"] - plain[kind, "l1.mlp"] for kind in (Pass.F, Pass.I, Pass.W)}
        assert more == {Pass.F: copy, Pass.I: 0, Pass.W: 4 * largest}


def test_layers_that_are_gathered_cast_nothing_beside_others() -> None:
    job = {"model": MODEL | SIZES, "parallel": {"pp": 1, "dp": 2, "zero": 1}, "precision": MIXED}
    prepared = prepare(job_from(job | {"schedule": {"microbatches": 2}}))
    gathers = ReplicateDirective(parse_filter({"L": 1}), zero=3)
    graph = with_casts(apply(prepared.base, (*prepared.strategy, gathers)))
    assert {part.split(".")[0] for part in copies(graph)} == {"l0", "head"}
