"""transformers' own classes divided over tensor-parallel ranks train as by plain torch; what cannot be is refused."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from executor.frontend.capture import capture, text
from executor.modules import choose
from executor.modules.choose import model_of
from executor.modules.user.divided.linears import ModelShard
from executor.modules.user.model import UserModel
from executor.parallel.inline import MessageAxis, RankRegion
from executor.runtime import rank_model
from ir.core.errors import PiperError
from ir.core.work import DType, MessageKind
from ir.job import load_job
from ir.job.build import prepare
from piper_sim.study.predict import predict
from tests.executor.frontend import class_runs as hub
from tests.executor.frontend.models import more_classes

PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
MODELS = ("llama", "qwen3", "mixtral", "deepseek_v3")
SHAPES = [(1, 1, 0, "1f1b"), (2, 1, 0, "dualpipe"), (2, 2, 3, "1f1b"), (2, 1, 0, "zbv"), (1, 2, 2, "1f1b"),
          (2, 2, 1, "gpipe"), (2, 1, 0, "dualpipev"), (3, 1, 0, "zb1p"), (2, 1, 0, "interleaved-1f1b")]  # fmt: skip


def _sets(shape: tuple[int, int, int, str], recompute: str = "none") -> list[str]:
    pp, dp, zero, schedule = shape
    layers = "[0,1,1,1]" if schedule in ("zbv", "dualpipev", "interleaved-1f1b") else "balanced"
    return [
        f"parallel.pp={pp}", f"parallel.dp={dp}", f"parallel.zero={zero}", f"parallel.layers={layers}",
        f"schedule.name={schedule}", f"schedule.microbatches={hub.MBS // dp}", f"schedule.recompute={recompute}",
    ]  # fmt: skip


def _drawn(count: int) -> list[tuple[str, tuple[int, int, int, str], str]]:
    rng, shapes = random.Random(5), SHAPES * (count // len(SHAPES) + 1)
    return [(MODELS[k % len(MODELS)], shapes[k], rng.choice(["none", "full"])) for k in range(count)]


def test_a_divided_class_trains_as_by_plain_torch() -> None:
    assert 0.0 < hub.far("qwen3", "parallel.tp=2", *_sets((1, 1, 0, "1f1b"), "full")) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape", "recompute"), _drawn(27), ids=str)
def test_divided_classes_train_as_by_plain_torch(name: str, shape: tuple[int, int, int, str], recompute: str) -> None:
    assert 0.0 < hub.far(name, "parallel.tp=2", *_sets(shape, recompute)) <= 1e-10


FEW = ("Phi3", "Olmo2")  # q, k and v in one; norms over all heads


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in FEW else pytest.mark.slow) for f in more_classes.FAMILIES]
)
def test_a_family_divided_as_it_says_itself_trains_as_by_plain_torch(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "hub_classes", more_classes)
    assert 0.0 < hub.far(family, "parallel.tp=2", *_sets((2, 1, 0, "1f1b"))) <= 1e-10


@pytest.mark.slow
def test_gradients_of_head_norms_that_nobody_sums_would_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt = tmp_path / "model.json"
    spoilt.write_text(json.dumps({**json.loads(Path(hub._graph("qwen3", 2)).read_text()), "partly": []}))
    monkeypatch.setattr(hub, "_graph", lambda *_: str(spoilt))
    with pytest.raises(PiperError, match=r"q_norm\.weight: \(4,\), its gradient a sum over tp, but"):
        hub.run_class("qwen3", "parallel.tp=2", *_sets(SHAPES[0]))
    monkeypatch.setattr(choose, "_refuse_another", lambda *_: None)
    with pytest.raises(AssertionError, match=r"copies of param/.*\.q_norm\.weight differ"):
        hub.far("qwen3", "parallel.tp=2", *_sets(SHAPES[0]))


@pytest.mark.slow
def test_whole_parameters_counted_by_every_rank_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_model, "repeated", lambda graph: frozenset())
    assert hub.far("llama", "parallel.tp=2", *_sets(SHAPES[0])) > 1e-4


class Net(nn.Module):
    """Two layers of an MLP, with biases."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Mlp(width) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


class Mlp(nn.Module):
    """x + down(scale · relu(up(x)))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(4, width), nn.Linear(width, 4), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Of the same shape."""
        found: Tensor = self.down(self.scale * torch.relu(self.up(x)))
        return x + found


def _model(plan: dict[str, str], tp: int = 2, width: int = 8) -> UserModel:
    shard = ModelShard(RankRegion(MessageAxis(tp, "tp")), plan)
    return UserModel(lambda: Net(width), tags={"PP": "layers.*"}, batch=(1, 2), shard=shard)


def test_what_a_plan_leaves_open_is_read_off_the_graph() -> None:
    model = _model(PLAN)
    assert model.dims["layers.0.up.bias"] == 0 and "layers.0.down.bias" not in model.dims
    assert model.partly == ("layers.0.scale", "layers.1.scale") and model.shapes["layers.1.up.weight"] == (8, 4)


def test_vectors_that_a_model_divides_by_its_own_plan_are_divided() -> None:
    """transformers' sinks of heads: the plan says so of the vector, and of its module that it reads it as it is."""

    def build() -> Net:
        net = Net()
        for layer in net.layers:
            layer.register_parameter("scale", nn.Parameter(torch.ones(8)))
        net.tp_plan = {**PLAN, "layers.*.scale": "colwise", "layers.*": "local_params"}  # type: ignore[assignment]
        return net

    shard = ModelShard(RankRegion(MessageAxis(2, "tp")))
    model = UserModel(build, tags={"PP": "layers.*"}, batch=(1, 2), shard=shard)
    assert model.dims["layers.1.scale"] == 0 and model.partly == ()


@pytest.mark.parametrize(
    ("plan", "width", "said"),
    [
        ({"layers.*.up": "rowwise", "layers.*.down": "rowwise"}, 8, "cannot be exported"),
        ({"layers.*.up": "colwise"}, 8, "cannot be exported"),
        ({"layers.*.up": "colwise", "layers.*.down": "colwise_gather_output"}, 8, "cannot be exported"),
        (PLAN, 7, "tp = 2 does not divide size 0 of layers.0.up.weight = 7"),
        ({"layers.*.above": "colwise"}, 8, "no module is called 'layers.*.above'"),
        ({"layers.*.up": "columns"}, 8, "no such style, 'columns'"),
        ({"layers.*": "colwise"}, 8, "layers.0 is a Mlp, which colwise does not divide"),
        ({"embed": "embedding_rowwise", "layers.1.up": "colwise_gather_output"}, 8, ""),
        ({}, 8, "nothing says how Net is divided over tp"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan: dict[str, str], width: int, said: str) -> None:
    if not said:
        assert _model(plan, width=width).dims == {"embed.weight": 0, "layers.1.up.weight": 0, "layers.1.up.bias": 0}
        return
    with pytest.raises(PiperError) as info:
        _model(plan, width=width)
    assert said in info.value.message and info.value.kind.exit_code == 2
    assert (info.value.key or "").startswith(("model.tp_plan", "parallel.tp"))


@pytest.mark.parametrize("plan", [PLAN, {"layers.*.up": "colwise_gather_output"}], ids=["PLAN", "gathered"])
def test_what_is_called_without_gradients_is_not_divided(plan: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mlp, "forward", torch.no_grad()(Mlp.forward))
    with pytest.raises(PiperError, match=r"in layers\.0, is code under no_grad or autocast that reads") as info:
        _model(plan)
    assert info.value.suggestion == "leave out what it calls" and _model({"embed": "embedding_rowwise"}).dims


def test_a_layer_that_ends_inside_of_what_is_divided_is_refused_by_its_tag() -> None:
    shard = ModelShard(RankRegion(MessageAxis(2, "tp")), PLAN)
    with pytest.raises(PiperError, match="crosses a seam, and is divided over tp") as info:
        UserModel(Net, tags={"PP": "layers.*.up"}, batch=(1, 2), shard=shard)
    assert info.value.key == "model.tags.PP"


@pytest.mark.filterwarnings("ignore")  # torch would have the old one no more
@pytest.mark.parametrize("old", [False, True])
def test_a_linear_whose_weight_is_made_of_others_is_not_divided(old: bool) -> None:
    """What the plan would cut is made again in each forward."""
    norm = nn.utils.weight_norm if old else nn.utils.parametrizations.weight_norm

    def build() -> Net:
        net = Net()
        norm(net.layers[1].get_submodule("up"))
        return net

    shard = ModelShard(RankRegion(MessageAxis(2, "tp")), PLAN)
    with pytest.raises(PiperError, match="whose weight is made of others, which colwise does not divide") as info:
        UserModel(build, tags={"PP": "layers.*"}, batch=(1, 2), shard=shard)
    assert info.value.key == "model.tp_plan"


def test_a_table_that_counts_its_words_is_not_divided() -> None:
    """Words that other ranks hold would be counted as one of this rank's."""

    def build() -> Net:
        net = Net()
        net.embed.scale_grad_by_freq = True
        return net

    shard = ModelShard(RankRegion(MessageAxis(2, "tp")), {"embed": "embedding_rowwise"})
    with pytest.raises(PiperError, match=r"embed is a Embedding that counts words \(scale_grad_by_freq\), which"):
        UserModel(build, tags={"PP": "layers.*"}, batch=(1, 2), shard=shard)


def heads(x: Tensor) -> Tensor:
    """Features as heads of four."""
    return x.view(*x.shape[:2], -1, 4)


ALONG: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax of heads": lambda x: F.log_softmax(heads(x), 2).flatten(2),
    "slice": lambda x: F.pad(x[..., 1:], (0, 1)),
    "every second": lambda x: x[..., ::2].repeat_interleave(2, -1),
    "cat": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    "halves": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms norm": lambda x: x * x.pow(2).mean(-1, keepdim=True).rsqrt(),
    "gated halves": lambda x: F.glu(x, -1).repeat(1, 1, 2),
    "unit length": lambda x: F.normalize(x, dim=-1),
    "logsumexp": lambda x: x - x.logsumexp(-1, keepdim=True),
    "best": lambda x: x * x.max(-1, keepdim=True).values,
    "rolled": lambda x: x.roll(1, -1),
    "largest": lambda x: x - x.amax(-1, keepdim=True),
    "scores of all features": lambda x: (x @ x.transpose(1, 2)).softmax(-1) @ x,
    "attention of one head": lambda x: F.scaled_dot_product_attention(x, x, x),
    "its length": lambda x: x * x.norm(dim=-1, keepdim=True),
    "products that it adds up": lambda x: torch.einsum("bto,btp->bto", x, x),
    "groups of features": lambda x: F.group_norm(x.transpose(1, 2), 4).transpose(1, 2),
    "heads turned": lambda x: heads(x).transpose(1, 2).cumsum(1).transpose(1, 2).flatten(2),
}
BESIDE: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax of tokens": lambda x: x.softmax(1),
    "norm of each head": lambda x: F.layer_norm(h := heads(x), h.shape[-1:]).flatten(2),
    "features of heads turned": lambda x: torch.cat((-(h := heads(x))[..., 1:], h[..., :1]), -1).flatten(2),
    "tokens shifted": lambda x: F.pad(x[:, 1:], (0, 0, 0, 1)),
    "all of it": lambda x: x[..., :],
    "products of features": lambda x: torch.einsum("bto,bto->bto", x, x),
    "ones": lambda x: x * torch.ones(x.shape[-1]) + x.new_zeros(x.shape),
    "attention": lambda x: F.scaled_dot_product_attention(*[heads(x).transpose(1, 2)] * 3).transpose(1, 2).flatten(2),
    "scores of heads": lambda x: (
        (((h := heads(x).transpose(1, 2)) @ h.transpose(2, 3)).softmax(-1) @ h).transpose(1, 2).flatten(2)
    ),
    "heads counted off the tensor": lambda x: x.view(*x.shape[:2], x.shape[-1] // 4, -1).flatten(2),
    "tokens and sequences as one": lambda x: x.reshape(-1, x.shape[-1]).view_as(x),
    "heads as sequences": lambda x: (
        heads(x)
        .transpose(1, 2)
        .reshape(-1, x.shape[1], 4)
        .view(x.shape[0], -1, x.shape[1], 4)
        .transpose(1, 2)
        .flatten(2)
    ),
    "features as batch": lambda x: x.reshape(-1, 8).view_as(x),
    "heads and tokens as one": lambda x: x.view(*x.shape[:2], -1, 8).flatten(1, 2).view(x.shape),
    "the largest feature of each head": lambda x: (h := heads(x)).mul(h.max(-1, keepdim=True).values).flatten(2),
    "mean of tokens": lambda x: x * x.mean(1, keepdim=True).sigmoid(),
}


class Between(Mlp):
    """Something between up and down."""

    def __init__(self, width: int, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__(width)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        """Of the same shape."""
        found: Tensor = self.down(self.scale * self.between(self.up(x)))
        return x + found


def _between(what: Callable[[Tensor], Tensor], tp: int) -> UserModel:
    def build() -> Net:
        net = Net(16)
        net.layers = nn.ModuleList(Between(16, what) for _ in range(2))
        return net

    shard = ModelShard(RankRegion(MessageAxis(tp, "tp")), PLAN if tp > 1 else {})
    return UserModel(build, tags={"PP": "layers.*"}, batch=(2, 3), shard=shard)


@pytest.mark.parametrize("name", ALONG)
def test_what_reads_along_what_is_divided_is_refused(name: str) -> None:
    """Each rank would take its part for the whole, and train something else without a sign of it."""
    assert _between(ALONG[name], 1).chunks == ("embed", "l0", "l1"), "whole, it is fine"
    with pytest.raises(PiperError, match="reads along what tp divides") as info:
        _between(ALONG[name], 2)
    assert info.value.kind.exit_code == 2


COUNTED: dict[str, Callable[[Tensor], Tensor]] = {
    "positions": lambda x: x + torch.arange(x.shape[-1]),
    "root of the width": lambda x: x / x.shape[-1] ** 0.5,
    "whole width": lambda x: x / x.shape[-1],
    "elements": lambda x: x.div_(x.numel()) if x.numel() else x,
    "features reversed": lambda x: x[..., torch.arange(x.shape[-1] - 1, -1, -1)],
    "a stretch of a table": lambda x: x * torch.ones(16).cumsum(0)[: x.shape[-1]],
    "tokens rolled by it": lambda x: x.roll(x.shape[-1] // 8, 1),
    "the token of that number": lambda x: x * x[:, x.shape[-1] // 8].unsqueeze(1),
}


@pytest.mark.parametrize("name", COUNTED)
def test_what_is_made_of_the_size_that_is_divided_is_refused(name: str) -> None:
    assert _between(COUNTED[name], 1).chunks == ("embed", "l0", "l1"), "whole, it is fine"
    with pytest.raises(PiperError, match="is made of a size that tp divides") as info:
        _between(COUNTED[name], 2)
    assert info.value.kind.exit_code == 2 and "layers.0" in info.value.message


CUT: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(*x.shape[:2], 4, -1).softmax(-1).flatten(2),
    "unflatten": lambda x: x.unflatten(-1, (4, -1)).transpose(1, 2).transpose(1, 2).flatten(2),
    "outer product": lambda x: (x[..., None] * x[..., None, :]).mean(-1),
}


@pytest.mark.parametrize("name", CUT)
def test_what_cuts_heads_instead_of_dealing_them_out_is_refused(name: str) -> None:
    assert _between(CUT[name], 1).chunks == ("embed", "l0", "l1"), "whole, it is fine"
    with pytest.raises(PiperError, match=r"cuts what tp deals out|reads along") as info:
        _between(CUT[name], 2)
    assert info.value.kind.exit_code == 2 and "layers.0" in info.value.message


@pytest.mark.parametrize("name", BESIDE)
def test_what_reads_other_dims_is_not(name: str) -> None:
    assert _between(BESIDE[name], 2).chunks == ("embed", "l0", "l1")


def test_a_file_of_another_division_is_refused(tmp_path: Path) -> None:
    """Shapes and values are the same, and losses: norms were not, as a plan counts what each rank has once."""
    (tmp_path / "net.py").write_text(f"from {__name__} import Net\n")
    given = dict(batch=(1, 2), dtype=DType.FP32, tags={"PP": "layers.*"}, tp=2)
    first = {"layers.0.up": "colwise", "layers.0.down": "rowwise"}
    for name, plan in {"all": PLAN, "first": first}.items():
        (tmp_path / f"{name}.json").write_text(text(capture(Net(), **given, tp_plan=plan)))  # type: ignore[arg-type]
    model = {"module": f"{tmp_path}/net.py:Net", "tags": {"PP": "layers.*"}, "seq_len": 2, "tp_plan": first}
    job = {"model": model, "precision": {"compute": "fp32"}, "parallel": {"tp": 2}}
    model_of(prepare(load_job(job, [f"model.graph={tmp_path}/first.json"])))
    with pytest.raises(PiperError, match=r"layers\.1\.scale: \(\), but .*all\.json has \(\), its gradient a sum"):
        model_of(prepare(load_job(job, [f"model.graph={tmp_path}/all.json"])))


def test_its_messages_are_predicted(tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    given = dict(batch=(1, 2), dtype=DType.FP32, tags={"PP": "layers.*"}, tp=2, tp_plan=PLAN)
    file.write_text(text(capture(Net(), **given)))  # type: ignore[arg-type]
    assert json.loads(file.read_text())["parts"]["block"]["model_flops"] == 2 * 2 * 2 * 4 * 8
    job = {"model": {"graph": str(file), "seq_len": 2}, "precision": {"compute": "fp32"}, "parallel": {"tp": 2}}
    graph = prepare(load_job(job)).graph()
    messages = {n.text().rstrip("2"): [(m.kind, m.bytes) for m in n.inline] for n in graph.nodes if n.inline}
    size = 1 * 2 * 4 * 4
    assert messages == {f"0{k}/l{i}.block": [(MessageKind.ALL_REDUCE, size)] for i in range(2) for k in "FI"}
    assert predict(load_job(job)).breakdown["exposed_tp"].sum() > 0
    with pytest.raises(PiperError, match="4, but the module was captured with 2"):
        prepare(load_job(job, ["parallel.tp=4"]))
