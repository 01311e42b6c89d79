"""Reference modules of every family: graph names, cuts that change nothing, routing and functions against oracles."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from executor.modules import functions as f
from executor.modules.attention.attend import AttentionMask, attend
from executor.modules.attention.rope import TokenAngles, rotary, rotate
from executor.modules.base import BuiltChunks, evaluate
from executor.modules.decoder import DecoderModel, NextTokenLoss
from executor.modules.layers import Params
from executor.modules.moe import ExpertDispatch, ExpertRouter, LocalExperts
from executor.modules.norms import layer_norm, rms_norm
from executor.parallel.router_guide import ExpertRouterGuide
from executor.runtime.batch import MicrobatchLoader
from ir.workload.chunks import chunks
from ir.workload.config.load import load_config
from tests.executor.families import TINY, tiny
from tests.executor.reference import ReferenceSteps, train

torch.set_num_threads(1)
MOE = [n for n in TINY if tiny(n).moe is not None]
SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 64}
KINDS = {
    "plain": {},
    "grouped": {"num_key_value_heads": 2},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True, "mlp_bias": True},
}
CONFIGS = {n: tiny(n) for n in TINY} | {k: load_config("tiny-llama", {**SMALL, **more}) for k, more in KINDS.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_names_shapes_order_and_parts_are_the_model_graphs(name: str) -> None:
    config = CONFIGS[name]
    graph = {p.name: p.shape for c in chunks(config) for part in c.parts for p in part.params}
    model = DecoderModel(config, parts=True)
    assert model.shapes == graph and list(model.shapes) == list(graph)
    assert list(model.build(model.chunks).units) == [f"{c.name}.{p.name}" for c in chunks(config) for p in c.parts]
    for c in chunks(config):
        built = model.build([c.name])
        for part in c.parts:
            assert _names(built, f"{c.name}.{part.name}") == {p.name for p in part.params}, (c.name, part.name)


def _names(built: BuiltChunks, unit: str) -> set[str]:
    held = {id(p) for p in built.units[unit].parameters()}
    return {n for n, p in built.params.items() if id(p) in held}


@pytest.mark.parametrize("family", TINY)
def test_parts_read_what_the_graphs_parts_read(family: str) -> None:
    config = tiny(family)
    model = DecoderModel(config, parts=True)
    reads = model.build(model.chunks).reads
    before, last = "", {}
    for chunk in chunks(config):
        outer = last.get(chunk.reads, "") if chunk.reads else before
        for part in chunk.parts:
            wanted = tuple(f"{chunk.name}.{n}" if n else outer for n in part.inputs)
            assert reads[f"{chunk.name}.{part.name}"] == wanted or part.name == "embed"
        before = last[chunk.name] = f"{chunk.name}.{chunk.parts[-1].name}"


F64, ROUNDED = torch.float64, ["gpt2 untied", "qwen3_moe", "kimi"]
TRAINED = [(n, F64, attention) for n in TINY for attention in ("flash", "unfused")]
TRAINED += [(k, dtype, "flash") for k in ("plain", "grouped", "biased") for dtype in (F64, torch.float32)]
TRAINED += [(n, torch.bfloat16, "flash") for n in ("plain", "grouped", "biased", *ROUNDED)]
WIDE = ["plain", "biased", "gpt2 untied", "qwen3_moe", "kimi"]  # with a residual stream in float32
TRAINED += [(n, torch.bfloat16, "wide") for n in WIDE]


@pytest.mark.parametrize(("name", "dtype", "attention"), TRAINED, ids=str)
def test_cut_and_split_training_equals_plain_autograd(name: str, dtype: torch.dtype, attention: str) -> None:
    config, wide = CONFIGS[name], torch.promote_types(dtype, torch.float32)
    data = MicrobatchLoader("synthetic", vocab=64, length=8, microbatches=3, size=2)

    def trained(*, parts: bool, split: bool) -> ReferenceSteps:
        how, stream = ("flash", torch.float32) if attention == "wide" else (attention, None)
        model = DecoderModel(config, dtype=dtype, parts=parts, attention=how, stream=stream)
        return train(model, data, 2, split=split, grads=wide, moments=wide)

    whole = trained(parts=False, split=False)
    for run in (trained(parts=False, split=True), trained(parts=True, split=True)):
        assert run.losses[0] == whole.losses[0]
        # A weight used twice in the model is summed use by use where it is cut, and all uses at once where it is not.
        if config.tied or config.mtp:
            for n, g in whole.grads.items():
                torch.testing.assert_close(run.grads[n], g, rtol=1e-9, atol=1e-13)
        else:
            assert (run.losses, run.grad_norms) == (whole.losses, whole.grad_norms)
            assert all(torch.equal(run.grads[n], g) for n, g in whole.grads.items())
            assert all(torch.equal(run.params[n], p) for n, p in whole.params.items())


@pytest.mark.parametrize("family", TINY)
def test_every_parameter_gets_a_gradient_that_is_the_losses_slope(family: str) -> None:
    """A step against the gradient lowers the loss by its square: no term is missing and none counts twice."""
    config = tiny(family)
    model = DecoderModel(config, dtype=torch.float64)
    data = MicrobatchLoader("synthetic", vocab=64, length=8, size=4)
    run = train(model, data, 1, moments=torch.float64)
    assert all(bool(g.abs().sum() > 0) for g in run.grads.values())
    torch.manual_seed(0)
    way = {n: torch.randn_like(g) for n, g in run.grads.items()}
    slope = sum(float((way[n] * g).sum()) for n, g in run.grads.items())
    losses = [_loss_at(model, data, way, step) for step in (1e-6, -1e-6)]
    assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(slope, rel=1e-5)


def _loss_at(model: DecoderModel, data: MicrobatchLoader, way: dict[str, Tensor], step: float) -> float:
    built, batch = model.build(model.chunks), data.batch(0, 0, 0)
    with torch.no_grad():
        for n, p in built.params.items():
            p += step * way[n]
        return float(evaluate(built, batch.ids, {u: batch.extras(w) for u, w in built.extras.items()}))


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "rms_norm": lambda x, w, b, u: rms_norm(x, w, 1e-5),
    "layer_norm": lambda x, w, b, u: layer_norm(x, w, b, 1e-5),
    "layer_norm 1p": lambda x, w, b, u: layer_norm(x, w, None, 1e-5, 1.0),
    "swiglu": lambda x, w, b, u: f.swiglu(x, u),
    "swiglu weighted": lambda x, w, b, u: f.swiglu(x, u, u[:, :1]),
    "relu2": lambda x, w, b, u: f.relu2(x),
    "token_loss": lambda x, w, b, u: f.token_loss(x * 5, LABELS, 0.25, -100),
    "permute": lambda x, w, b, u: f.permute(x, ORDER, 2) * torch.cat((u, u)),
    "unpermute": lambda x, w, b, u: f.unpermute(torch.cat((x, u)), ORDER, 2),
}
LABELS = torch.tensor([3, -100, 0, 5])
ORDER = torch.tensor([7, 2, 0, 4, 5, 1, 3, 6], dtype=torch.int32)
ORACLES: dict[str, Callable[..., Tensor]] = {
    "rms_norm": lambda x, w, b, u: F.rms_norm(x, (6,), w, 1e-5),
    "layer_norm": lambda x, w, b, u: F.layer_norm(x, (6,), w, b, 1e-5),
    "layer_norm 1p": lambda x, w, b, u: F.layer_norm(x, (6,), w + 1, None, 1e-5),
    "swiglu": lambda x, w, b, u: F.silu(x) * u,
    "swiglu weighted": lambda x, w, b, u: F.silu(x) * u * u[:, :1],
    "relu2": lambda x, w, b, u: torch.where(x > 0, x * x, 0 * x),
    "token_loss": lambda x, w, b, u: F.cross_entropy(x * 5, LABELS, reduction="sum") / 4,
    "permute": lambda x, w, b, u: x[ORDER.long() // 2] * torch.cat((u, u)),
    "unpermute": lambda x, w, b, u: torch.zeros_like(x).index_add(0, ORDER.long() // 2, torch.cat((x, u))),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_and_their_gradients_are_torchs(name: str) -> None:
    torch.manual_seed(0)
    given = [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((4, 6), (6,), (6,), (4, 6))]
    mine, theirs = FUNCTIONS[name](*given), ORACLES[name](*given)
    torch.testing.assert_close(mine, theirs)
    dy = torch.randn_like(theirs)
    a, b = (torch.autograd.grad(y, given, dy, allow_unused=True) for y in (mine, theirs))
    for x, y in zip(a, b, strict=True):
        assert (x is None) == (y is None)
        if x is not None and y is not None:
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("heads", "kv", "v", "window"), [(4, 4, 6, 0), (4, 2, 6, 0), (4, 4, 4, 0), (4, 2, 6, 3)])
def test_attention_is_softmax_of_products(fused: bool, heads: int, kv: int, v: int, window: int) -> None:
    torch.manual_seed(0)
    shapes = ((2, heads, 7, 6), (2, kv, 7, 6), (2, kv, 7, v))
    given = [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in shapes]
    mine = attend(*given, fused=fused, sight=AttentionMask(window))
    wide = [given[0], *(t.repeat_interleave(heads // kv, 1) for t in given[1:])]
    gap = torch.arange(7)[:, None] - torch.arange(7)[None]
    scores = (wide[0] @ wide[1].transpose(-1, -2)) / 6**0.5
    hidden = (gap < 0) | ((gap >= window) if window else torch.zeros_like(gap, dtype=torch.bool))
    theirs = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ wide[2]
    torch.testing.assert_close(mine, theirs)
    dy = torch.randn_like(theirs)
    for a, b in zip(torch.autograd.grad(mine, given, dy), torch.autograd.grad(theirs, given, dy), strict=True):
        torch.testing.assert_close(a, b)


def _router(family: str) -> ExpertRouter:
    config = tiny(family)
    return ExpertRouter(config, Params(0, 0.5, torch.float64), "model.layers.1.")


@pytest.mark.parametrize("family", MOE)
def test_experts_are_a_weighted_sum_over_each_tokens_choice(family: str) -> None:
    config = tiny(family)
    moe = config.moe
    assert moe is not None
    make = Params(0, 0.5, torch.float64)
    router, experts = ExpertRouter(config, make, "model.layers.1."), LocalExperts(config, make, "model.layers.1.")
    x = torch.randn(2, 5, config.hidden, dtype=torch.float64)
    tokens, weights, indices = router(x)
    if moe.normalised:
        torch.testing.assert_close(weights.sum(-1), torch.full((10,), moe.scale, dtype=torch.float64))
    want = torch.zeros_like(tokens)
    up, down = (make.made[f"model.layers.1.mlp.experts.{n}_proj"] for n in ("gate_up", "down"))
    for t in range(10):
        for w, e in zip(weights[t], indices[t].tolist(), strict=True):
            gate, value = (up[e] @ tokens[t]).chunk(2)
            want[t] += w * (down[e] @ (F.silu(gate) * value))
    torch.testing.assert_close(experts(tokens, weights, indices), want)


def test_experts_without_a_token_get_a_zero_gradient() -> None:
    config = tiny("mixtral")
    make = Params(0, 0.5, torch.float64)
    guide = ExpertRouterGuide(forced=lambda layer, number: torch.tensor([[1, 3]] * 6))
    router = ExpertRouter(config, make, "model.layers.1.", 1, guide)
    experts = LocalExperts(config, make, "model.layers.1.")
    experts(*router(torch.randn(1, 6, config.hidden, dtype=torch.float64))).sum().backward()
    used = [bool(g.abs().sum() > 0) for g in make.made["model.layers.1.mlp.experts.down_proj"].grad]
    assert used == [False, True, False, True]


@pytest.mark.parametrize(("dtype", "counted"), [(torch.bfloat16, 1), (torch.float32, 2), (torch.float64, 2)])
def test_experts_whose_rows_the_host_does_not_count_give_the_same_bits(
    dtype: torch.dtype, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the host in the one format that torch multiplies so on a GPU; one of them is sent nothing."""
    config, read, real = tiny("mixtral"), list[Tensor](), ExpertDispatch.read
    monkeypatch.setattr(ExpertDispatch, "read", lambda self, indices: read.append(indices) or real(self, indices))
    torch.manual_seed(0)
    x, dy = (torch.randn(6, config.hidden, dtype=dtype) for _ in range(2))
    weights, indices = torch.rand(6, 2, dtype=dtype), torch.tensor([[1, 3], [3, 2], [1, 2], [1, 3], [3, 2], [2, 1]])
    found = []
    for ahead in (False, True):
        make = Params(0, 0.5, dtype)
        y = LocalExperts(config, make, "model.layers.1.", ahead=ahead)(x, weights, indices)
        y.backward(dy)
        found.append([y.detach(), *(p.grad for p in make.made.values())])
    assert len(read) == counted
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_dispatch_sorts_stably_and_counts() -> None:
    config = tiny("mixtral")
    assert config.moe is not None
    tokens = torch.arange(4.0).unsqueeze(-1)
    indices = torch.tensor([[2, 0], [0, 1], [2, 3], [0, 2]])
    weights = torch.arange(8.0).view(4, 2)
    dispatch = ExpertDispatch(config.moe.top_k, config.moe.experts)
    rows, row_weights, order = dispatch.rows(tokens, weights, indices)
    counts = dispatch.read(indices)
    assert counts == [3, 1, 3, 1] and order.tolist() == [1, 2, 7 - 1, 3, 0, 4, 7, 5]
    assert rows.flatten().tolist() == [0, 1, 3, 1, 0, 2, 3, 2]
    assert row_weights.flatten().tolist() == [1, 2, 6, 3, 0, 4, 7, 5]


def test_limited_routing_stays_in_its_best_groups() -> None:
    router = _router("deepseek_v3")  # 8 experts in 4 groups of 2; top 2 out of the 2 best groups
    scores = torch.tensor([[0.9, 0.1, 0.55, 0.56, 0.6, 0.0, 0.5, 0.58]], dtype=torch.float64)
    # By the sum of two: groups 1 (1.11) and 3 (1.08), without expert 0, which scores best of all.
    assert sorted(router.choose(scores)[0].tolist()) == [3, 7]
    router.by_two = False  # by the best of each: groups 0 and 2
    assert sorted(router.choose(scores)[0].tolist()) == [0, 4]


def test_the_correction_bias_chooses_but_does_not_weigh() -> None:
    router = _router("kimi")
    x = torch.randn(1, 4, 32, dtype=torch.float64)
    assert router.bias is not None and not any(p is router.bias for p in router.parameters())
    router.bias[5] = 10.0
    _, weights, indices = router(x)
    assert bool((indices == 5).any(-1).all()) and float(weights.detach().max()) < router.moe.scale


def test_the_second_loss_looks_one_token_further() -> None:
    logits = torch.randn(1, 4, 8)
    labels = torch.tensor([[5, -100, 3, 2]])
    got = NextTokenLoss(torch.nn.Identity())(logits, labels, 0.5)
    want = F.cross_entropy(logits[0, 1:3], torch.tensor([3, 2]), reduction="sum") * 0.5 * 0.3
    torch.testing.assert_close(got, want)  # position 0's target is masked, 3 has none


def test_learned_positions_and_partial_rotary_act() -> None:
    embed = DecoderModel(tiny("gpt2")).build(["embed"]).units["embed"]
    a, b = embed(torch.tensor([[3, 3]]))[0]
    assert not torch.equal(a, b)
    cos, sin = rotary(4, TokenAngles(4, 1e4), torch.zeros(()))
    x = torch.randn(1, 4, 1, 8)
    turned = rotate(x, cos, sin)
    assert torch.equal(turned[..., 4:], x[..., 4:]) and not torch.equal(turned[..., :4], x[..., :4])
