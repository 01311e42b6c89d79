"""Modules whose tp ranks share tokens between the linears that they divide: equal to the whole, or refused."""

import re
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from executor.modules.user.divided import sequence
from executor.modules.user.divided.linears import ModelShard
from executor.modules.user.model import UserModel
from executor.modules.user.purity import outputs
from executor.parallel.inline import MessageAxis, RankRegion
from ir.core.errors import PiperError
from ir.core.work import MessageKind
from ir.job import load_job
from ir.job.build import prepare
from tests.executor.frontend import class_runs as hub
from tests.executor.frontend.divided.lockstep import Grid, far_apart
from tests.executor.frontend.divided.token_ops import ACROSS, ALONE, HIDDEN, Layer, Op, few
from tests.executor.frontend.models import more_classes

IDS = torch.arange(32).view(2, 16) * 7 % 16
WORDS = 16
PLAN = {"layers.*.divided.0": "colwise", "layers.*.divided.1": "rowwise"}
HEAD = {"head": "colwise_gather_output"}
EMBED = {"embed": "embedding_rowwise"}
ATTENDS = (
    "causal",
    "mask of x's dtype",
    "bias of keys alone",
    "keys of positions",
    "scaled by length",
    "all keys",
    "window",
    "bias",
    "bias of keys",
    "latents",
    "scaled",
    "narrow values",
    "repeated heads written",
)
EACH = [n for n in ALONE if n not in ATTENDS]
REFUSED = {f"{n} of tokens" for n in ("filled in place", "written")}  # what others read
OPS = {**ALONE, **{f"{n} of tokens": op for n, op in ACROSS.items()}}
# What is divided has all tokens, and looks at them as it likes.
Inner = Callable[[Tensor], Tensor]
INSIDE: Mapping[str, Inner] = {
    "each": torch.tanh,
    "softmax": lambda x: x.softmax(1),
    "running sum": lambda x: x.cumsum(1),
    "rolled": lambda x: x.roll(1, 1) * torch.arange(x.shape[1])[:, None],
    "shifted": lambda x: torch.cat([x[:, :1], x[:, :-1]], 1),
    "last": lambda x: x * x[:, -1:],
    "mixed by a table": lambda x: torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril() @ x,
    "causal": lambda x: _attended(x),
    "plain attention": lambda x: _attended(x, plain=True),
    "flat": lambda x: x.reshape(-1, x.shape[-1]).cumsum(0).view(x.shape),
}


def _attended(x: Tensor, plain: bool = False) -> Tensor:
    h = x.view(*x.shape[:2], -1, 4).transpose(1, 2)
    y = (h @ h.mT).softmax(-1) @ h if plain else F.scaled_dot_product_attention(h, h, h, is_causal=True)
    return y.transpose(1, 2).flatten(2)


class Divided(Layer):
    """x + op(x) by ranks' tokens, and an MLP that tp divides, on (sequences, tokens, features) or flat."""

    def __init__(self, op: Op, inside: Inner, flat: bool) -> None:
        super().__init__(op)
        self.divided = nn.ModuleList([nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)])
        self.inside, self.flat = inside, flat

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """Residuals around both."""
        x = super().forward(x, ids)
        y = self.norm(x)
        y = y.view(-1, HIDDEN) if self.flat else y
        wide, back = self.divided
        z: Tensor = wide(y)
        z = back(self.inside(z.view(*x.shape[:2], -1)).view(z.shape))
        return x + z.view(x.shape)


class Net(nn.Module):
    """A layer for each pair of ops, and a head."""

    def __init__(self, *ops: tuple[Op, Inner], flat: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, HIDDEN), nn.Linear(HIDDEN, WORDS)
        self.layers = nn.ModuleList(Divided(*pair, flat) for pair in ops)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits, cut off softly."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, ids)
        return torch.tanh(self.head(x) / 4) * 4


def _grid(tp: int = 2, cp: int = 1, *more: Mapping[str, str]) -> Grid:
    plan = dict(PLAN)
    for one in more:
        plan |= one
    return Grid(tp, cp, plan, sequence=True)


@pytest.mark.parametrize("name", few(n for n in OPS if n not in REFUSED))
def test_what_ranks_do_between_is_the_same(name: str) -> None:
    assert far_apart(lambda: Net((OPS[name], torch.tanh)), IDS, _grid()) <= 1e-12


WHY = "is written where ranks have other tokens"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_ranks_could_not_do_is_refused(name: str) -> None:
    with pytest.raises(PiperError, match=WHY) as refused:
        far_apart(lambda: Net((OPS[name], torch.tanh)), IDS, _grid())
    assert refused.value.key == "parallel.sequence_parallel"
    assert refused.value.suggestion == "sequence_parallel = false"


def _forward(op: Op) -> list[MessageKind]:
    """What a rank sends in the forward of a layer, and of the head, which is not divided."""
    axis = MessageAxis(2, "tp")
    shard = ModelShard(RankRegion(axis, sequence=True), PLAN)
    model = UserModel(lambda: Net((op, torch.tanh)), tags={"PP": "layers.*"}, batch=(2, 16), shard=shard)
    axis.take()
    model._try(2, 16, lambda _, chunk, x: outputs(chunk(*x)))
    return [m.kind for m in axis.take()]


GATHER, SCATTER = MessageKind.ALL_GATHER, MessageKind.REDUCE_SCATTER


@pytest.mark.parametrize("name", few(EACH))
def test_what_treats_tokens_by_themselves_is_done_once(name: str) -> None:
    assert _forward(ALONE[name]) == [GATHER, SCATTER, GATHER]


def test_what_looks_at_other_tokens_is_done_by_every_rank_of_all() -> None:
    assert _forward(ACROSS["softmax"]) == [GATHER, GATHER, SCATTER, GATHER]
    assert _forward(ALONE["causal"]) == [*[GATHER] * 4, SCATTER, GATHER]  # of queries, keys and values


@pytest.mark.parametrize(("name", "flat"), [(n, k % 2 == 1) for k, n in enumerate(INSIDE)])
def test_what_is_divided_sees_all_tokens(name: str, flat: bool) -> None:
    assert far_apart(lambda: Net((ALONE["positions"], INSIDE[name]), flat=flat), IDS, _grid()) <= 1e-12


@pytest.mark.parametrize("more", [(), (HEAD,), (EMBED,), (HEAD, EMBED)], ids=str)
@pytest.mark.parametrize("tp", [2, 4])
def test_words_may_be_divided_too(more: tuple[dict[str, str], ...], tp: int) -> None:
    assert far_apart(lambda: Net((ALONE["ids"], INSIDE["causal"])), IDS, _grid(tp, 1, *more)) <= 1e-12


@pytest.mark.parametrize("inside", ["each", "causal"])
def test_cp_shares_out_the_sequences_first(inside: str) -> None:
    net = [(ALONE["a table"], INSIDE[inside]), (ALONE["positions"], torch.tanh)]
    assert far_apart(lambda: Net(*net), IDS, _grid(2, 2, HEAD, EMBED)) <= 1e-12


PAIRS = st.tuples(st.sampled_from([*OPS]), st.sampled_from([*INSIDE]))
SHAPES = st.tuples(st.sampled_from([1, 2, 3, 8]), st.sampled_from([4, 8, 16]))
ENDS = st.sampled_from([(), (HEAD,), (EMBED,), (HEAD, EMBED)])


@settings(max_examples=12, deadline=None)
@given(st.lists(PAIRS, min_size=1, max_size=2), SHAPES, st.sampled_from([2, 4]), ENDS, st.booleans())
def test_drawn_layers_are_the_same_or_those_refused(
    names: list[tuple[str, str]], shape: tuple[int, int], tp: int, ends: tuple[dict[str, str], ...], flat: bool
) -> None:
    ids = torch.arange(shape[0] * shape[1]).view(shape) * 7 % WORDS
    pairs = [(OPS[a], INSIDE[b]) for a, b in names]
    try:
        far = far_apart(lambda: Net(*pairs, flat=flat), ids, _grid(tp, 1, *ends))
    except PiperError as refused:
        alone = shape[1] == tp  # of one token, many ops are others, or none
        assert re.search(f"{WHY}|of 1 tokens" if alone else WHY, str(refused)), refused
        assert alone or REFUSED.intersection(a for a, _ in names), refused
        return
    assert far <= 1e-10 and not REFUSED.intersection(a for a, _ in names)


def _sets(*more: str, schedule: str = "1f1b", pp: int = 1, mbs: int = hub.MBS) -> list[str]:
    sets = ["parallel.tp=2", "parallel.sequence_parallel=true", f"parallel.pp={pp}", f"schedule.name={schedule}"]
    return [*sets, f"schedule.microbatches={mbs}", *more]


RUNS = [
    ("llama", _sets("parallel.zero=3", "parallel.dp=2", "schedule.recompute=full", "parallel.layers=[0,1,1,1]",
                    schedule="zbv", pp=2, mbs=hub.MBS // 2)),
    ("qwen3", _sets("parallel.cp=2")),
    ("qwen3", _sets("parallel.cp=2", "parallel.cp_comm=all_to_all", schedule="dualpipe", pp=2)),
    ("mixtral", _sets("parallel.ep=2", "parallel.zero=2", "parallel.dp=2", pp=2, mbs=hub.MBS // 2)),
    ("qwen3_moe", _sets("parallel.ep=4", "parallel.dp=2", "schedule.recompute=full", mbs=hub.MBS // 2)),
]  # fmt: skip


def test_a_class_whose_ranks_share_tokens_trains_as_by_plain_torch() -> None:
    assert 0.0 < hub.far("qwen3", *_sets(schedule="zb1p", pp=2)) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sets"), RUNS, ids=str)
def test_classes_whose_ranks_share_tokens_train_as_by_plain_torch(name: str, sets: list[str]) -> None:
    assert 0.0 < hub.far(name, *sets) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(("name", "more"), [("gemma3", []), ("deepseek_v3", ["parallel.ep=2"])], ids=str)
def test_what_adds_up_tokens_in_float32_does_so_in_another_order(name: str, more: list[str]) -> None:
    assert 0.0 < hub.far(name, *_sets(*more)) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", more_classes.FAMILIES)
def test_a_family_whose_ranks_share_tokens_trains_as_by_plain_torch(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some add up tokens in float32, in another order."""
    monkeypatch.setattr(hub, "hub_classes", more_classes)
    assert 0.0 < hub.far(family, *_sets(pp=2)) <= 1e-6


def test_gradients_that_every_rank_has_whole_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "of_every_rank", lambda x, region: x)
    assert far_apart(lambda: Net((ACROSS["convolution"], torch.tanh)), IDS, _grid()) > 1e-2


def test_another_rank_s_constants_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "_own_tokens", lambda region, dim: lambda x: x.chunk(region.tp.size, dim)[0])
    assert far_apart(lambda: Net((ALONE["positions"], torch.tanh)), IDS, _grid()) > 1e-2


def test_tokens_that_do_not_divide_are_named() -> None:
    with pytest.raises(PiperError, match="tp = 2 ranks share the 15 tokens of a sequence") as refused:
        far_apart(lambda: Net((ALONE["linear"], torch.tanh)), IDS[:, :15], _grid())
    assert (refused.value.key, refused.value.suggestion) == ("parallel.tp", "sequence_parallel = false")


@pytest.mark.parametrize("sequence", [False, True])
def test_a_job_of_another_division_is_refused(sequence: bool) -> None:
    graph = hub._graph("llama", 2, sequence=sequence)
    table = {"model": {"graph": graph, "seq_len": hub.LENGTH}, "precision": {"compute": "fp64"}}
    other, here = str(not sequence).lower(), str(sequence).lower()
    sets = ["cluster.gpu=h100-sxm", "parallel.tp=2", f"parallel.sequence_parallel={other}"]
    with pytest.raises(PiperError, match=f"{other}, but the module was captured with {here}") as refused:
        prepare(load_job(table, sets))
    assert refused.value.key == "parallel.sequence_parallel"


def test_a_module_s_ranks_share_tokens_where_the_job_says_so_alone() -> None:
    module, graph = {"module": "m.py:build"}, {"graph": "m.json"}
    assert [load_job({"model": m}).parallel.sequence_parallel for m in (module, graph)] == [False, False]
    told = {"parallel": {"tp": 2, "sequence_parallel": True}}
    assert load_job({"model": module, **told}).parallel.sequence_parallel
    assert load_job({"model": {"config": "tiny-llama"}}).parallel.sequence_parallel


def test_where_nothing_is_divided_it_says_nothing() -> None:
    """As in a job of a config, of which one rank has everything, too."""
    sets = hub.sets_of((2, 1, 0, "1f1b"), "none")
    assert 0.0 < hub.far("llama", *sets, "parallel.sequence_parallel=true") <= 1e-10


def test_a_plan_has_the_messages_that_a_rank_sends() -> None:
    """Of one layer: what attention and MLP read is gathered, what they make scattered; gradients the other way. What
    was gathered is not kept, but gathered again for the weights' gradients.
    """
    graph = hub._graph("llama", 2, sequence=True)
    table = {"model": {"graph": graph, "seq_len": hub.LENGTH}, "precision": {"compute": "fp64"}}
    sets = ["cluster.gpu=h100-sxm", "parallel.tp=2", "parallel.sequence_parallel=true"]
    nodes = prepare(load_job(table, sets)).plan().graph.nodes
    found = {n.text(): [(str(m.kind), m.bytes, m.axes) for m in n.inline] for n in nodes if "l1" in n.part}
    tokens = hub.LENGTH * 16 * 8  # of one sequence, 16 features each, in float64
    gather, scatter = ("all_gather", tokens, ("tp",)), ("reduce_scatter", tokens, ("tp",))
    both = [gather, scatter] * 2
    assert found == {"0F/l1.block": both, "0I/l1.block": both, "0W/l1.block": [gather] * 2}
