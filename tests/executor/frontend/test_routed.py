"""Experts of transformers' own classes spread over ranks train as by plain torch; what is no experts is refused."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from executor.frontend.capture import capture, text
from executor.modules.user import routed
from executor.modules.user.divided.linears import ModelShard
from executor.modules.user.model import UserModel
from executor.parallel.inline import RankAxis, RankRegion
from ir.core.errors import PiperError
from ir.core.work import DType
from ir.job import load_job
from ir.job.build import directives_json, prepare
from piper_sim.study.predict import predict
from tests.executor.frontend import class_runs as hub
from tests.executor.frontend.models.hub_classes import EXPERTS_OF

# tp, pp, dp, ep, zero, schedule
PLANS = [
    (1, 2, 2, 2, 1, "dualpipe"), (1, 1, 2, 2, 3, "1f1b"), (2, 1, 1, 2, 0, "1f1b"), (1, 2, 2, 2, 3, "zbv"),
    (2, 2, 1, 2, 0, "dualpipe"), (1, 2, 4, 2, 2, "1f1b"), (2, 1, 2, 4, 1, "gpipe"), (1, 1, 4, 4, 2, "1f1b"),
    (1, 2, 2, 2, 0, "dualpipev"), (2, 2, 2, 2, 3, "1f1b"), (1, 3, 2, 2, 1, "zb1p"), (1, 2, 2, 1, 1, "interleaved-1f1b"),
]  # fmt: skip
ALIKE = ("mixtral", "qwen3_moe")  # whose layers do not differ, so that they are recomputed


def _sets(plan: tuple[int, int, int, int, int, str], recompute: str) -> list[str]:
    tp, pp, dp, ep, zero, schedule = plan
    layers = "[0,1,1,1]" if schedule in ("zbv", "dualpipev", "interleaved-1f1b") else "balanced"
    return [
        f"parallel.tp={tp}", f"parallel.pp={pp}", f"parallel.dp={dp}", f"parallel.ep={ep}", f"parallel.zero={zero}",
        f"parallel.layers={layers}", f"schedule.name={schedule}", f"schedule.microbatches={hub.MBS // dp}",
        f"schedule.recompute={recompute}",
    ]  # fmt: skip


def _drawn(count: int) -> list[tuple[str, tuple[int, int, int, int, int, str], str]]:
    rng, out = random.Random(2), []
    for k in range(count):
        plan = PLANS[(k + k // len(PLANS)) % len(PLANS)]
        name = rng.choice(ALIKE) if plan[0] > 1 else EXPERTS_OF[k % len(EXPERTS_OF)]  # gpt-oss has no plan for tp
        out.append((name, plan, rng.choice(["none", "full"]) if name in ALIKE else "none"))
    return out


@pytest.mark.parametrize(("name", "recompute"), [("qwen3_moe", "full"), ("deepseek_v3", "none")])
def test_a_class_with_experts_over_ranks_trains_as_by_plain_torch(name: str, recompute: str) -> None:
    """DeepSeek's keys are written in place, half and half, before its experts: as views, which no edge tells."""
    assert 0.0 < hub.far(name, *_sets((1, 1, 2, 2, 1, "1f1b"), recompute)) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plan", "recompute"), _drawn(24), ids=str)
def test_classes_with_experts_over_ranks_train_as_by_plain_torch(name: str, plan: Any, recompute: str) -> None:
    still = 'optimizer.no_decay=["*.indexer.*"]'  # no loss reaches what picks keys, and torch leaves it as it is
    assert 0.0 < hub.far(name, *_sets(plan, recompute), still) <= 1e-10


@pytest.mark.slow
def test_a_dropped_gradient_of_the_router_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = routed.UserExperts.forward
    monkeypatch.setattr(routed.UserExperts, "forward", lambda self, x, w, n: kept(self, x, w.detach() + 0 * w, n))
    assert hub.far("mixtral", *_sets((1, 1, 2, 2, 1, "1f1b"), "none")) > 1e-4


class Experts(nn.Module):
    """One product each."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, 4, 4))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """By all of them, most of it for nothing."""
        every = torch.einsum("th,eoh->teo", x, self.weight)
        chosen = every.gather(1, index.unsqueeze(-1).expand(*index.shape, x.shape[-1]))
        return (chosen * weights.unsqueeze(-1)).sum(1)

    def grouped(self, rows: Tensor, counts: list[int]) -> Tensor:
        """What piper-sim asks."""
        return torch.cat([r @ w.t() for r, w in zip(rows.split(counts), self.weight, strict=True)])


class Layer(nn.Module):
    """x + experts(x) + x read behind them."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 4, bias=False), experts

    def forward(self, x: Tensor) -> Tensor:
        """Of the same shape. The mask is written in place, and its result not read."""
        tokens = x.flatten(0, 1)
        scores = self.gate(tokens).softmax(-1)
        mask = torch.zeros_like(scores)
        mask.scatter_(1, scores.topk(3).indices, 1)
        weights, index = (scores * mask).topk(2)
        made: Tensor = self.experts(tokens, index, weights / weights.sum(-1, keepdim=True))
        return x + made.view_as(x) + tokens.view_as(x)


class Net(nn.Module):
    """Two of these."""

    def __init__(self, experts: type[nn.Module] = Experts, count: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        made = (experts(count) if experts is Experts else experts(4, 4) for _ in range(2))
        self.layers = nn.ModuleList(Layer(e) for e in made)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


TAGS = {"PP": "layers.*", "EP": "layers.*.experts"}


def test_parts_around_experts_are_the_module() -> None:
    torch.manual_seed(0)
    plain = Net().double()
    model = UserModel(Net, tags=TAGS, dtype=torch.float64, batch=(2, 3))
    model.module.load_state_dict(plain.state_dict())
    built, ids = model.build(model.chunks), torch.arange(6).view(2, 3)
    x = built.units["embed"](ids)
    for k in range(2):
        rows, weights, order, counts, *carried = built.units[f"l{k}.router"](x)
        y = built.units[f"l{k}.experts"](rows, weights, counts)
        rest = (torch.zeros(2, 3, dtype=torch.int64), 1.0) if k else ()
        x = built.units[f"l{k}.add"](y, order, *carried, *rest)
    wanted = nn.functional.cross_entropy(plain(ids).flatten(0, 1), torch.zeros(6, dtype=torch.int64), reduction="sum")
    assert x.item() == pytest.approx(wanted.item(), rel=1e-12)
    assert built.reads["l1.router"] == ("l0.add",) and len(built.params) == len(dict(plain.named_parameters()))


@pytest.mark.parametrize(
    ("net", "ep", "said"),
    [
        (lambda: Net(nn.Linear), 1, "layers.0.experts is a Linear, which does not say what single experts do"),
        (lambda: Net(count=6), 4, "ep = 4 does not divide the 6 experts of layers.0.experts"),
    ],
)
def test_what_is_no_experts_is_refused(net: Any, ep: int, said: str) -> None:
    with pytest.raises(PiperError) as info:
        UserModel(net, tags=TAGS, batch=(2, 3), shard=ModelShard(ep=ep))
    assert said in info.value.message and info.value.kind.exit_code == 2


class Unflattened(Layer):
    """Its experts are given sequences as they come."""

    def forward(self, x: Tensor) -> Tensor:
        """Of the same shape."""
        weights, index = self.gate(x).softmax(-1).topk(2)
        made: Tensor = self.experts(x, index, weights)
        return x + made


def test_tokens_that_are_not_flattened_are_refused_where_nothing_stands_before_the_experts() -> None:
    def build() -> nn.Module:
        made = Net()
        made.layers = nn.ModuleList(Unflattened(Experts()) for _ in range(2))
        return made

    with pytest.raises(PiperError, match=r"l0 has 1 modules of experts, the first of which reads \[\[2, 3, 4\]"):
        UserModel(build, tags=TAGS, batch=(2, 3))


class Numbered(Experts):
    """Told apart by a buffer, which no rank has a part of."""

    sizes: Tensor

    def __init__(self, *_: int) -> None:
        super().__init__()
        self.register_buffer("sizes", torch.arange(1.0, 5.0))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Each is as large as its number."""
        return super().forward(x, index, weights * self.sizes[index])

    def grouped(self, rows: Tensor, counts: list[int]) -> Tensor:
        """The numbers of the first rank's."""
        each = super().grouped(rows, counts).split(counts)
        return torch.cat([y * size for y, size in zip(each, self.sizes, strict=False)])


class Unlike(Experts):
    """Another function for plans than for plain torch."""

    def __init__(self, *_: int) -> None:
        super().__init__()

    def grouped(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Twice."""
        return 2 * super().grouped(rows, counts)


class Crowded(Unlike):
    """At most so many rows have an expert."""

    def grouped(self, rows: Tensor, counts: list[int]) -> Tensor:
        """The others nothing."""
        each = Experts.grouped(self, rows, counts).split(counts)
        return torch.cat([y * (torch.arange(len(y)) < 8).unsqueeze(-1) for y in each])


@pytest.mark.parametrize(("kind", "ep", "said"), [(Numbered, 2, ""), (Unlike, 1, ""), (Crowded, 1, ", of more rows,")])
def test_experts_that_are_others_in_a_plan_are_refused(kind: Any, ep: int, said: str) -> None:
    UserModel(Net, tags=TAGS, batch=(2, 3)).refuse_unlike(8, ep)
    with pytest.raises(PiperError, match=f"grouped of l0's experts{said} makes something else") as info:
        UserModel(lambda: Net(kind), tags=TAGS, batch=(2, 3)).refuse_unlike(8, ep)
    assert info.value.kind.exit_code == 2


def test_large_experts_are_tried_on_few_tokens_and_never_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = UserModel(Net, tags=TAGS, batch=(2, 3)), list[list[int]]()
    plain, weights = Experts.grouped, {p.untyped_storage().data_ptr() for p in model.module.parameters()}

    def grouped(self: Experts, rows_: Tensor, counts: list[int]) -> Tensor:
        rows.append(counts)
        assert {p.untyped_storage().data_ptr() for p in self.parameters()} <= weights
        return plain(self, rows_, counts)

    monkeypatch.setattr(Experts, "grouped", grouped)
    for (name, found), most in zip(model.routed.items(), (10**6, 1), strict=False):
        rows.clear()
        routed.refuse_unlike_experts(name, model._experts[name], found, 2, most)
        assert max(map(sum, rows)) <= (9 if most == 1 else 4 * found.top_k + 9) and [9, 0] in rows
        few = [c for c in rows if sum(c) == found.top_k]
        assert few if most == 1 else not [c for c in rows if len(c) == 4 and sum(c) != 4 * found.top_k]


def test_experts_of_two_layers_stay_one_and_are_called_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def shared() -> Net:
        net = Net()
        first, second = (layer.get_submodule("experts") for layer in net.layers)
        second.register_parameter("weight", first.get_parameter("weight"))
        return net

    found = UserModel(shared, tags=TAGS, batch=(2, 3), shard=ModelShard(ep=2)).module
    assert found.get_parameter("layers.0.experts.weight") is found.get_parameter("layers.1.experts.weight")
    given: list[object] = []
    monkeypatch.setattr(routed, "_experts", lambda *args: given.extend(args))
    x, index, weights = torch.ones(1), torch.ones(2), torch.ones(3)
    found.get_submodule("layers.0.experts")(weights=weights, x=x, index=index)
    assert [*map(id, given[:3])] == [*map(id, (x, index, weights))]


def test_exchanges_stand_in_the_plan_and_are_predicted(tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    file.write_text(text(capture(Net(), batch=(1, 8), dtype=DType.FP32, tags=TAGS, ep=2)))
    found = json.loads(file.read_text())
    assert [p["name"] for p in found["chunks"][1]["pieces"]] == ["router", "experts", "add"]
    job = {
        "model": {"graph": str(file), "seq_len": 8},
        "precision": {"compute": "fp32"},
        "parallel": {"dp": 2, "ep": 2},
    }
    graph = prepare(load_job(job)).graph()
    sent = {n.text(): n.message.bytes for n in graph.nodes if n.message is not None and "l0" in n.part}
    there, back = 8 * 2 * (4 + 1) * 4, 8 * 2 * 4 * 4
    wanted = {"0F/l0.counts": 8 * 4, "0F/l0.dispatch": there, "0F/l0.combine": back}
    assert sent == wanted | {"0I/l0.dispatch": back, "0I/l0.combine": there}
    weights = {p.name: (p.expert, p.sharded) for e in graph.entries for p in e.part.params}
    assert weights["layers.1.experts.weight"] == (True, ("ep",)) and weights["layers.1.gate.weight"] == (False, ())
    assert predict(load_job(job)).breakdown["exposed_ep"].sum() > 0
    for changed, said in (("parallel.ep=1", "1, but the module was captured with 2"), ("routing.kind=zipf", "routers")):
        with pytest.raises(PiperError, match=said):
            predict(load_job(job, [changed]))


@pytest.mark.parametrize(
    ("some", "said"),
    [
        ({"EP": 0}, "ep is 1 of l1.experts in the strategy, and it was captured with 2"),
        ({"L": "*"}, "ep is 2 of l0.router in the strategy, and it was captured with 1"),
        ({"EP": "*"}, ""),
    ],
)
def test_a_strategy_that_spreads_other_parts_than_were_captured_is_refused(
    some: dict[str, Any], said: str, tmp_path: Path
) -> None:
    (tmp_path / "model.json").write_text(text(capture(Net(), batch=(1, 8), dtype=DType.FP32, tags=TAGS, ep=2)))
    job: dict[str, Any] = {
        "model": {"graph": str(tmp_path / "model.json"), "seq_len": 8},
        "precision": {"compute": "fp32"},
        "parallel": {"dp": 2, "ep": 2},
    }
    every = directives_json(prepare(load_job(job)).strategy)
    rows = [{**row, "filter": some} if row["op"] == "shard" else row for row in every]
    (tmp_path / "strategy.json").write_text(json.dumps(rows))
    prepared = prepare(load_job({**job, "schedule": {"directives": str(tmp_path / "strategy.json")}}))
    if not said:
        assert prepared.graph()
        return
    with pytest.raises(PiperError, match=said):
        prepared.graph()


class Beside(nn.Module):
    """Experts behind the layers, none in them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(8, 4), Layer(Experts())
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.last(x)
        return found


def test_experts_that_no_layer_has_are_spread_too(tmp_path: Path) -> None:
    tags = {"PP": "layers.*", "EP": "last.experts"}
    (tmp_path / "model.json").write_text(text(capture(Beside(), batch=(1, 8), dtype=DType.FP32, tags=tags, ep=2)))
    job = {"model": {"graph": str(tmp_path / "model.json"), "seq_len": 8}, "precision": {"compute": "fp32"}}
    graph = prepare(load_job({**job, "parallel": {"dp": 2, "ep": 2}})).graph()
    sent = {n.part for n in graph.nodes if n.message is not None}
    assert {"head.counts", "head.dispatch", "head.combine"} <= sent


def test_tokens_that_ranks_of_tp_do_not_share_out_evenly_are_named() -> None:
    shard = ModelShard(RankRegion(RankAxis(2, 0, "tp")), {"layers.*.gate": "colwise_gather_output"})
    with pytest.raises(PiperError, match=r"tp = 2 does not divide tokens of a microbatch, which l0 .* = 7") as info:
        UserModel(Net, tags=TAGS, batch=(1, 7), shard=shard)
    assert info.value.kind.exit_code == 2 and UserModel(Net, tags=TAGS, batch=(2, 7), shard=shard).routed


class Mixed(nn.Module):
    """Parts of a tuple, and what is written in place before its experts, are read behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.pick = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(sequences, tokens, 4), and the same."""
        flat = x.flatten(0, 1)
        first, second = (flat * 2).split([1, 3], -1)
        table = torch.zeros(4)
        table[0] = flat.sum()
        weights, index = (self.pick(flat) + table).softmax(-1).topk(2)
        made = torch.ops.piper_sim.experts(first.expand(-1, 4) * 1.0, index, weights, 0)
        return x + (made + second.sum() + table[:2].sum()).view_as(x)


def test_what_is_made_before_experts_and_read_behind_them_is_carried() -> None:
    net, x = Mixed(), torch.randn(1, 3, 4)
    root = torch.export.export(net, (x,)).module()
    for node in list(root.graph.nodes):
        if node.op == "output":
            node.args = (torch.utils._pytree.tree_leaves(node.args)[0],)
        elif "_guards" in str(node.target):
            root.graph.erase_node(node)
    cut = routed.cut_at_experts("l0", torch.fx.GraphModule(root, root.graph), RankRegion())
    assert cut is not None
    rows, _, _, *carried = cut.router(x)
    assert len(carried) == cut.carried and all(isinstance(c, torch.Tensor) for c in carried)
    assert torch.equal(cut.add(rows.clone(), *carried), net(x))
