"""Reference modules: Hugging Face's names, values that depend on name and seed alone, cuts that change nothing."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from executor.autograd.stage import Stage
from executor.modules import base
from executor.modules.attention.rope import TokenAngles, rotary, rotate
from executor.modules.base import initial
from executor.modules.decoder import DecoderModel
from executor.modules.user.annotate import annotate, cut
from executor.modules.user.model import UserModel
from executor.modules.user.reference import load_callable
from executor.parallel.shares import ParamShard, ShardCut
from executor.runtime.batch import MicrobatchLoader
from ir.core.errors import PiperError
from ir.core.ops import Pass
from ir.workload.config.load import load_config
from tests.executor.families import tiny
from tests.executor.reference import train

torch.set_num_threads(1)
SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 64}


def test_a_parameter_is_the_same_whoever_builds_it() -> None:
    model = DecoderModel(load_config("tiny-llama", SMALL), seed=3)
    whole = model.build(model.chunks).params
    for stretch in (["embed"], ["l1", "head"], ["l0"], ["head"]):
        for name, p in model.build(stretch).params.items():
            assert torch.equal(p, whole[name])
    other = DecoderModel(load_config("tiny-llama", SMALL), seed=4).build(["l0"]).params
    changed = [n for n, p in other.items() if not torch.equal(p, whole[n])]
    assert changed == [n for n in other if "norm" not in n]
    weights = [p for n, p in whole.items() if "norm" not in n]
    assert len({float(p.detach().flatten()[0]) for p in weights}) == len(weights)


@given(st.data())
def test_a_share_is_drawn_as_it_is_cut_from_the_whole(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    cuts = []
    for dim in sorted(data.draw(st.sets(st.integers(0, len(shape) - 1)))):
        first = data.draw(st.integers(0, shape[dim]))
        count = data.draw(st.integers(1, 3))
        cuts.append(ShardCut(dim, data.draw(st.integers(0, count - 1)), count, (first, shape[dim] - first)))
    share = ParamShard(shape, tuple(cuts))
    whole = initial("w", ParamShard(shape), 3, 1.0, torch.float64)
    assume(0 not in share.local)
    assert torch.equal(initial("w", share, 3, 1.0, torch.float64), share.take(whole))


def test_first_values_are_normal_and_of_their_name_and_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the normal distribution's own function: Kolmogorov's distance of a million values is below 2 / 1,000."""
    share = ParamShard((1000, 1000))
    found = initial("w", share, 0, 0.5, torch.float64).view(-1)
    monkeypatch.setattr(base, "_DRAWN", 999)
    assert torch.equal(initial("w", share, 0, 0.5, torch.float64).view(-1), found)
    wanted = 0.5 * (1 + torch.erf(found.sort().values / 0.5 / 2**0.5))
    assert (wanted - torch.linspace(0, 1, len(found), dtype=torch.float64)).abs().max() < 2e-3
    for other in (initial("v", share, 0, 0.5, torch.float64), initial("w", share, 1, 0.5, torch.float64)):
        both = torch.stack((found, other.view(-1)))
        assert torch.corrcoef(both)[0, 1].abs() < 5e-3
    assert torch.corrcoef(torch.stack((found[1:], found[:-1])))[0, 1].abs() < 5e-3


def test_precisions_start_from_the_same_numbers() -> None:
    config = load_config("tiny-llama", SMALL)
    wide = DecoderModel(config, dtype=torch.float64).build(["l0"]).params
    for dtype in (torch.float32, torch.bfloat16):
        assert all(
            torch.equal(p, wide[n].to(dtype)) for n, p in DecoderModel(config, dtype=dtype).build(["l0"]).params.items()
        )


def test_rotary_turns_pairs_by_position() -> None:
    cos, sin = rotary(5, TokenAngles(8, 10000.0), torch.zeros((), dtype=torch.float64))
    q, k = torch.randn(2, 8, dtype=torch.float64)

    def score(i: int, j: int) -> float:
        return float(
            rotate(q.view(1, 1, 1, 8), cos[i], sin[i]).flatten() @ rotate(k.view(1, 1, 1, 8), cos[j], sin[j]).flatten()
        )

    assert score(0, 0) == pytest.approx(float(q @ k))
    assert score(4, 3) == pytest.approx(score(2, 1)) != pytest.approx(score(2, 0))


def test_a_window_hides_what_lies_behind_it() -> None:
    layer = DecoderModel(tiny("mistral")).build(["l0"]).units["l0"]
    x = torch.randn(1, 8, 32)
    y = x.clone()
    y[0, 2] += 1.0
    gap = (layer(x) - layer(y)).abs().amax(-1)[0] > 0
    assert gap.tolist() == [False, False, True, True, True, False, False, False]


def test_a_tie_sums_its_two_uses() -> None:
    config = load_config("tiny-llama", {**SMALL, "tie_word_embeddings": True})
    data = MicrobatchLoader("synthetic", vocab=64, length=8, microbatches=2)
    a, b = (
        train(DecoderModel(config, dtype=torch.float64), data, 1, split=s, moments=torch.float64) for s in (False, True)
    )
    for n, g in a.grads.items():
        torch.testing.assert_close(b.grads[n], g, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("recompute", [False, True])
def test_two_stages_and_late_w_equal_one_process(recompute: bool) -> None:
    """1F1B's order on two stages, by hand, with W last, over uneven stretches: as the interpreter will do it."""
    model = DecoderModel(load_config("tiny-llama", SMALL), dtype=torch.float64, parts=True)
    data = MicrobatchLoader("synthetic", vocab=64, length=8, microbatches=3)
    want = train(model, data, 1, moments=torch.float64)
    built = [model.build(["embed", "l0"]), model.build(["l1", "head"])]
    drop = ["l0.attn", "l1.mlp"] if recompute else []
    first, last = (Stage(b.units, b.params, recompute=[u for u in drop if u in b.units]) for b in built)
    loss = 0.0
    for mb in range(3):
        batch = data.batch(0, 0, mb)
        first.feed(mb, batch.ids)
        first.run(Pass.F, mb, ["embed.embed", "l0.attn"])
        first.run(Pass.F, mb, ["l0.mlp"])
        last.feed(mb, *first.take_output(mb))
        for unit, wants in built[1].extras.items():
            last.feed_extra(mb, unit, *batch.extras(wants))
        last.run(Pass.F, mb)
        loss += last.take_output(mb)[0].item()
    for mb in range(3):
        last.run(Pass.R, mb)
        last.run(Pass.I, mb, ["head.head", "head.norm", "l1.mlp"])
        last.run(Pass.W, mb, ["head.norm"])
        last.run(Pass.I, mb, ["l1.attn"])
        last.run(Pass.W, mb, ["l1.attn"])
        first.feed_grad(mb, *last.take_input_grad(mb))
        first.run(Pass.I, mb)
        assert first.take_input_grad(mb) == (None,)
    for mb in range(3):
        last.run(Pass.W, mb, ["head.head", "l1.mlp"])
        first.run(Pass.W, mb)
    assert first.in_flight == last.in_flight == 0 and loss == want.losses[0]
    got = {**first.grads.sums, **last.grads.sums}
    assert got.keys() == want.grads.keys() and all(torch.equal(got[n], g) for n, g in want.grads.items())


def test_models_without_a_reference_module_are_refused() -> None:
    with pytest.raises(PiperError, match="ALiBi"):
        DecoderModel(load_config("mpt-1b", {"learned_pos_emb": False}))
    with pytest.raises(PiperError, match=r"dropout \(attention\)(.|\n)*attention_dropout = 0"):
        DecoderModel(load_config("tiny-llama", {"attention_dropout": 0.1}))
    with pytest.raises(PiperError, match="attn_pdrop = resid_pdrop = embd_pdrop = 0"):
        DecoderModel(load_config("gpt2"))
    with pytest.raises(PiperError, match=r"2 prediction modules(.|\n)*num_nextn_predict_layers = 1"):
        DecoderModel(load_config("deepseek-v3", {"num_nextn_predict_layers": 2}))


class Block(nn.Module):
    """Its Python depends on values: it must stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        if float(x.detach().sum()) > 1e9:
            raise ValueError("impossible")
        return x + self.up(x).tanh() + at


class Net(nn.Module):
    """Embedding, positions made from the ids' shape, three blocks in a nested module, a tied head."""

    def __init__(self, leak: bool = False) -> None:
        super().__init__()
        self.leak = leak
        self.body = nn.Module()
        self.embed, self.blocks, self.norm = (
            nn.Embedding(64, 8),
            nn.ModuleList(Block() for _ in range(3)),
            nn.LayerNorm(8),
        )
        self.head = nn.Linear(8, 64, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = first = self.embed(ids) * 2
        at = torch.arange(ids.shape[1]).unsqueeze(-1) / 10
        for block in self.blocks:
            with annotate("PP"):
                x = block(x, at)
        if self.leak:
            x = x + first
        return self.head(self.norm(x))


def test_a_users_module_is_cut_at_its_annotations() -> None:
    net = Net()
    pieces = cut(net)
    assert list(pieces.chunks) == ["embed", "l0", "l1", "l2", "head"]
    assert pieces.wants_ids == {"l0", "l1", "l2"}
    x = ids = torch.tensor([[3, 1, 4, 1]])
    for name, chunk in pieces.chunks.items():
        x = chunk(x, ids) if name in pieces.wants_ids else chunk(x)
    assert torch.equal(x, net(ids))


def test_a_users_module_trains_the_same_cut_or_whole() -> None:
    data = MicrobatchLoader("synthetic", vocab=64, length=6, microbatches=2)
    a, b = (train(UserModel(Net, seed=1), data, 2, split=split) for split in (False, True))
    assert a.losses == b.losses and all(torch.equal(b.params[n], p) for n, p in a.params.items())
    assert list(a.params)[:2] == ["embed.weight", "blocks.0.up.weight"]


def test_seams_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(PiperError, match="2 values cross the seam between l0 and l1: mul, blocks_0"):
        cut(Net(leak=True))
    with pytest.raises(PiperError, match="no annotated scope"):
        cut(nn.Sequential(nn.Linear(2, 2)))


def test_a_builder_is_loaded_from_the_file_the_user_names(tmp_path: Path) -> None:
    file = tmp_path / "my_model.py"
    file.write_text("def build():\n    return 1\n")
    assert callable(load_callable(f"{file}:build"))
    with pytest.raises(PiperError, match="no callable 'biuld'"):
        load_callable(f"{file}:biuld")
    with pytest.raises(PiperError, match="returned int"):
        UserModel(load_callable(f"{file}:build"))


def test_ranks_that_are_threads_import_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers takes its own place while it is imported: who waits for that is given what it was before."""
    lazy = "import sys, threading, types\nthreading.Event().wait(0.1)\n"
    lazy += "sys.modules[__name__] = types.SimpleNamespace(Thing=int, __spec__=__spec__)\n"
    (tmp_path / "takes_its_place.py").write_text(lazy)
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "my_model.py"
    file.write_text("from takes_its_place import Thing\nbuild = Thing\n")
    with ThreadPoolExecutor(4) as ranks:
        assert list(ranks.map(load_callable, [f"{file}:build"] * 4)) == [int] * 4
