"""Modules whose sequences are shared out over context-parallel ranks: equal to the whole, or refused."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from executor.launch.refusals import refuse
from executor.modules.user.divided import tokens
from executor.modules.user.divided.linears import ModelShard
from executor.modules.user.model import UserModel
from executor.modules.user.purity import outputs
from executor.parallel import token_reads
from executor.parallel.inline import MessageAxis, RankRegion, stretches
from ir.core.errors import PiperError
from ir.core.work import MessageKind
from ir.job import load_job
from ir.job.build import prepare
from tests.executor.frontend import class_runs as hub
from tests.executor.frontend.divided.lockstep import Grid, far_apart
from tests.executor.frontend.divided.token_ops import ACROSS, ALONE, Net, Op, few
from tests.executor.frontend.models import more_classes

IDS = torch.arange(32).view(2, 16) * 7 % 16
TWO = Grid(cp=2)


def _net(*ops: Op) -> Net:
    return Net(*ops)


REFUSED = ("filled in place", "written")  # what others read
OPS = {**ALONE, **{f"{n} of tokens": op for n, op in ACROSS.items() if n not in REFUSED}}
WHY = "is written where ranks have other tokens"


@pytest.mark.parametrize("name", few(OPS))
def test_what_ranks_do_of_a_sequence_is_the_same(name: str) -> None:
    assert far_apart(lambda: _net(OPS[name]), IDS, TWO) <= 1e-12


@pytest.mark.parametrize("name", REFUSED)
def test_what_ranks_could_not_do_is_refused(name: str) -> None:
    with pytest.raises(PiperError, match=WHY) as refused:
        far_apart(lambda: _net(ACROSS[name]), IDS, TWO)
    assert refused.value.key == "parallel.cp" and "torch's scaled_dot_product_attention" in str(refused.value)


def _equal_or_refused(names: list[str], shape: tuple[int, int], ranks: int, heads: bool) -> float:
    """How far; 0 where it may be refused, and is: heads, or a sequence, that ranks do not divide."""
    ids = torch.arange(shape[0] * shape[1]).view(shape) * 7 % 16
    try:
        return far_apart(lambda: _net(*(OPS[name] for name in names)), ids, Grid(cp=ranks, heads=heads))
    except PiperError as error:
        if not re.search("stretches of each sequence|heads of keys", error.message):
            raise
        return 0.0


SHAPES = st.tuples(st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([4, 8, 16, 32]))  # as long as features, as heads


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from([*OPS]), min_size=1, max_size=3), SHAPES, st.sampled_from([2, 4]), st.booleans())
def test_drawn_layers_are_the_same(names: list[str], shape: tuple[int, int], ranks: int, heads: bool) -> None:
    assert _equal_or_refused(names, shape, ranks, heads) <= 1e-11


def _unstretched(dim: int, region: RankRegion) -> Callable[[Tensor], Tensor]:
    """Equal parts of a sequence, in order: not the two stretches of it that a rank has."""
    return lambda x: x.chunk(region.cp.size, dim)[region.cp.index] if x.is_floating_point() else own(dim, region)(x)


own = tokens._stretched


def test_positions_of_other_tokens_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_stretched", _unstretched)
    assert far_apart(lambda: _net(ALONE["positions"]), IDS, TWO) > 1e-2


def test_an_op_taken_for_one_of_each_token_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(token_reads.CHECKS, torch.ops.aten.conv1d.default, lambda node, dims: False)
    assert far_apart(lambda: _net(ACROSS["convolution"]), IDS, TWO) > 1e-2


@pytest.mark.parametrize(("axis", "plan"), [("cp", {}), ("tp", {"embed": "embedding_rowwise"})])
def test_hooks_of_gradients_that_ranks_have_parts_of_are_refused(axis: str, plan: dict[str, str]) -> None:
    def build() -> Net:
        net = _net(lambda x, layer, _: layer.up(x))
        net.embed.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        return net

    given: dict[str, Any] = {"tags": {"PP": "layers.*"}, "batch": tuple(IDS.shape)}
    UserModel(build, **given).refuse_training()
    shard = ModelShard(RankRegion(**{axis: MessageAxis(2, axis)}), plan)
    with pytest.raises(PiperError, match=f"embed.weight has a hook of its gradient, of which each rank of {axis}"):
        UserModel(build, **given, shard=shard).refuse_training()


def test_heads_that_do_not_divide_are_named() -> None:
    with pytest.raises(PiperError, match="cp = 4 does not divide the 2 heads of keys in layers") as refused:
        far_apart(lambda: _net(ALONE["causal"]), IDS, Grid(cp=4, heads=True))
    assert refused.value.suggestion == 'cp_comm = "all_gather"'


LAYOUTS: dict[str, Op] = {
    "flat, flipped": lambda x, m, _: m.up(
        (m.up(x).view(*x.shape[:2], 2, 4).flip(1) + x.view(*x.shape[:2], 2, 4)).view(-1, 8)
    ).view(x.shape),
    "by fours": lambda x, m, _: (x.view(x.shape[0], -1, 4, 8) + m.places[: x.shape[1] // 4, None]).view(x.shape),
    "another shape": lambda x, m, _: x.view(x.shape[1], x.shape[0], 8).mul(m.places[: x.shape[1], None]).view(x.shape),
    "turned": lambda x, m, _: m.up(x).mT.contiguous().cumsum(2).view(-1, x.shape[1]).view(x.shape[0], 8, -1).mT,
}
STRIDES: dict[str, Op] = {
    "of heads": lambda x, m, _: (
        m.up(x).view(*x.shape[:2], 2, 4).as_strided(tuple(x.shape), (8 * x.shape[1], 8, 1)).cumsum(1)
    ),
    "of turned": lambda x, m, _: m.up(x).transpose(0, 1).as_strided(tuple(x.shape), (8 * x.shape[1], 8, 1)),
}
AXES = {"cp": TWO, "sequence": Grid(tp=2, plan={"embed": "embedding_rowwise"}, sequence=True)}


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_values_of_all_tokens_lie_in_memory_as_they_did(name: str, axis: str) -> None:
    assert far_apart(lambda: _net(LAYOUTS[name]), IDS, AXES[axis]) <= 1e-12


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("name", STRIDES)
def test_what_reads_memory_as_it_lies_is_refused(name: str, axis: str) -> None:
    with pytest.raises(PiperError, match=r"as_strided.* in layers\.0 reads memory as it lies"):
        far_apart(lambda: _net(STRIDES[name]), IDS, AXES[axis])


def _scores(x: Tensor, *_: object) -> Tensor:
    heads = x.view(*x.shape[:2], 2, -1).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1).transpose(1, 2).flatten(2)


def _eager_scores(x: Tensor, *_: object) -> Tensor:
    scores = F.dropout((x @ x.mT).tril().softmax(-1), 0.2)
    return scores @ x


DROPS: dict[str, Callable[..., Tensor]] = {
    "scores": _scores,
    "eager scores": _eager_scores,
    "tokens": lambda x, *_: F.dropout(x, 0.3),
    "rows": lambda x, *_: F.dropout(x.flatten(0, 1), 0.3).view_as(x),
    "tokens outermost": lambda x, *_: F.dropout(x.transpose(0, 1), 0.3).transpose(0, 1),
    "behind a convolution": lambda x, *_: F.dropout(_shifted(F.dropout(x, 0.2)), 0.3),
}


def _shifted(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 1, 0))[:, :-1] + x


@pytest.mark.parametrize("axis", [*AXES, "heads"])
@pytest.mark.parametrize("name", DROPS)
def test_several_sequences_drop_what_one_rank_would(name: str, axis: str) -> None:
    grid = AXES.get(axis, Grid(cp=2, heads=True))
    assert far_apart(lambda: _net(DROPS[name]), IDS, grid, drops=True) <= 1e-12


def test_sequences_that_do_not_divide_are_named() -> None:
    with pytest.raises(PiperError, match="cp = 4 needs 8 equal stretches of each sequence, and seq_len = 12"):
        far_apart(lambda: _net(ALONE["causal"]), IDS[:, :12], Grid(cp=4))


def _sets(*more: str, schedule: str = "1f1b", pp: int = 1, mbs: int = hub.MBS) -> list[str]:
    return ["parallel.cp=2", f"parallel.pp={pp}", f"schedule.name={schedule}", f"schedule.microbatches={mbs}", *more]


SETS = ["cluster.gpu=h100-sxm", "parallel.cp=2"]


def _captured(graph: str) -> dict[str, Any]:
    return {"model": {"graph": graph, "seq_len": hub.LENGTH}, "precision": {"compute": "fp64"}}


HEADS, HALF = "parallel.cp_comm=all_to_all", hub.MBS // 2
RUNS = [
    ("llama", _sets("parallel.zero=3", "parallel.dp=2", "schedule.recompute=full", "parallel.layers=[0,1,1,1]",
                    schedule="zbv", pp=2, mbs=HALF)),
    ("qwen3", _sets("parallel.tp=2")),
    ("qwen3", _sets(HEADS, schedule="dualpipe", pp=2)),
    ("mixtral", _sets("parallel.tp=2", "parallel.ep=2")),
    ("mixtral", _sets(HEADS)),
    ("Both", _sets()),
    ("qwen3_moe", _sets(HEADS, "parallel.ep=4", "parallel.zero=2", "parallel.dp=2", "schedule.recompute=full",
                        pp=2, mbs=HALF)),
    ("llama", [*_sets()[1:], "parallel.cp=4"]),
]  # fmt: skip


def test_a_class_whose_sequences_are_shared_trains_as_by_plain_torch() -> None:
    assert 0.0 < hub.far("gpt2", *_sets(schedule="zb1p", pp=2)) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sets"), RUNS, ids=str)
def test_classes_whose_sequences_are_shared_train_as_by_plain_torch(name: str, sets: list[str]) -> None:
    assert 0.0 < hub.far(name, *sets) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(("name", "more"), [("gemma3", []), ("deepseek_v3", ["parallel.ep=1"])], ids=str)
def test_what_adds_up_tokens_in_float32_does_so_in_another_order(name: str, more: list[str]) -> None:
    assert 0.0 < hub.far(name, *_sets(*more)) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", more_classes.FAMILIES)
def test_a_family_whose_sequences_are_shared_trains_as_by_plain_torch(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "hub_classes", more_classes)
    assert 0.0 < hub.far(family, *_sets(pp=2)) <= 1e-6
    sent = 4 if family == "MiniMax" else 1  # keys with values; its attention is linear: all that this reads
    nodes = prepare(load_job(_captured(hub._graph(family, 1, 0, 2)), SETS)).plan().graph.nodes
    assert next(len(n.inline) for n in nodes if n.text().startswith("0F/l1")) == sent


def test_attention_in_plain_products_is_done_by_every_rank() -> None:
    assert 0.0 < hub.far("gpt_oss", *_sets("parallel.ep=1")) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sets"), [
    ("nemotron_h", _sets(pp=2)),
    ("nemotron_h", _sets("parallel.dp=2", "parallel.zero=3", "schedule.recompute=full", mbs=HALF)),
    ("qwen3_next", _sets(HEADS, schedule="zb1p", pp=2)),
    ("gpt_oss", _sets("parallel.ep=2", "parallel.tp=2", schedule="dualpipe", pp=2)),
], ids=str)  # fmt: skip
def test_states_that_run_through_sequences_are_made_by_every_rank(name: str, sets: list[str]) -> None:
    assert 0.0 < hub.far(name, *sets) <= 1e-10


def test_gradients_of_one_rank_s_tokens_alone_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_summed", lambda cp, dy: stretches(dy, cp.size, cp.index, -2))
    assert far_apart(lambda: _net(ACROSS["convolution"]), IDS, TWO) > 1e-2


def test_what_all_readers_of_a_layer_want_is_sent_once() -> None:
    """Here and back: a convolution reads all tokens of what a norm has made of a rank's own."""
    axis = MessageAxis(2, "cp")
    shard = ModelShard(RankRegion(cp=axis))
    net = UserModel(
        lambda: _net(lambda x, *_: x.cumsum(1) * x.roll(1, 1)), tags={"PP": "layers.*"}, batch=(2, 16), shard=shard
    )
    axis.take()
    net._try(2, 16, lambda _, chunk, x: outputs(chunk(*x)))
    assert [m.kind for m in axis.take()] == [MessageKind.ALL_GATHER]


@pytest.mark.parametrize(
    ("given", "key", "said"),
    [
        ("parallel.cp=1", "parallel.cp", "1, but the module was captured with 2"),
        (HEADS, "parallel.cp_comm", "all_to_all, but the module was captured with all_gather"),
    ],
)
def test_a_job_of_another_division_is_refused(given: str, key: str, said: str) -> None:
    graph = hub._graph("llama", 1, 0, 2)
    table = {"model": {"graph": graph, "seq_len": hub.LENGTH}, "precision": {"compute": "fp64"}}
    sets = ["cluster.gpu=h100-sxm", "parallel.cp=2", given]
    with pytest.raises(PiperError, match=said) as refused:
        prepare(load_job(table, sets))
    assert refused.value.key == key


@pytest.mark.parametrize("region", [RankRegion(), RankRegion(cp=MessageAxis(2, "cp"))], ids=["alone", "cp"])
def test_shapes_that_depend_on_values_are_refused(region: RankRegion) -> None:
    shard = ModelShard(region)
    with pytest.raises(PiperError, match=r"shapes depend on values \(aten.index.Tensor in layers.0\)"):
        UserModel(
            lambda: _net(lambda x, *_: x + x[x[..., 0] > 0].sum()), tags={"PP": "layers.*"}, batch=(2, 16), shard=shard
        )


@pytest.mark.parametrize("comm", ["all_gather", "all_to_all"])
def test_such_a_job_is_not_refused_where_it_starts(comm: str) -> None:
    table = {
        "model": {
            "module": f"{hub.hub_classes.__file__}:llama",
            "graph": hub._graph("llama", 1, 0, 2, comm == "all_to_all"),
            "tags": {"PP": hub.hub_classes.LAYERS["llama"]},
            "seq_len": hub.LENGTH,
        },
        "precision": {"compute": "fp64"},
    }
    prepared = prepare(load_job(table, ["cluster.gpu=h100-sxm", "parallel.cp=2", f"parallel.cp_comm={comm}"]))
    refuse(prepared, real=True)


def test_a_plan_has_the_messages_that_a_rank_sends() -> None:
    """Keys and values of all tokens, side by side; their gradients on the way back."""
    nodes = prepare(load_job(_captured(hub._graph("llama", 1, 0, 2)), SETS)).plan().graph.nodes
    found = {n.text(): [(str(m.kind), m.bytes, m.axes) for m in n.inline] for n in nodes if "l1" in n.part}
    every = 2 * 2 * 4 * hub.LENGTH * 8  # keys and values, of two heads of four features, in float64
    gather, scatter = ("all_gather", every, ("cp",)), ("reduce_scatter", every, ("cp",))
    assert list(found.values()) == [[gather], [gather, scatter], []], found
