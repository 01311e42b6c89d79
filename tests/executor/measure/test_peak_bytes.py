"""Ranks that run by themselves need what real runs are measured to need, to the byte."""

from itertools import product
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor, nn

from executor.autograd.split import SplitPass
from executor.measure import peak_bytes as module
from executor.measure.peak_bytes import FakeRank, peak_bytes, peaks, values
from executor.modules.attention.attention import AttentionPart
from executor.optim.flat import FlatBucket
from executor.runtime.interpreter import PlanInterpreter
from ir.plan.places import RankPlacement
from tests.executor.measure.peak_runs import measured, planned

SMALL_DEEPSEEK = (
    "model.config=deepseek-v3 model.hidden_size=64 model.first_k_dense_replace=1 model.num_nextn_predict_layers=1 "
    "model.num_attention_heads=4 model.num_key_value_heads=4 model.vocab_size=256 model.n_routed_experts=8 "
    "model.num_experts_per_tok=2 model.moe_intermediate_size=32 model.intermediate_size=64 model.n_group=2 "
    "model.topk_group=1 model.q_lora_rank=32 model.kv_lora_rank=32 model.qk_nope_head_dim=16 model.qk_rope_head_dim=8 "
    "model.v_head_dim=16"
)

# Every schedule, P = 1…4, odd M and M < P, each choice of the job beside another one.
CASES = {
    "one rank": "schedule.name=1f1b parallel.pp=1 schedule.microbatches=3",
    "1f1b": "schedule.name=1f1b schedule.microbatches=5",
    "gpipe, M < P": "schedule.name=gpipe schedule.microbatches=3 parallel.pp=4",
    "zb1p": "schedule.name=zb1p schedule.microbatches=7 parallel.pp=3",
    "zb2p": "schedule.name=zb2p schedule.microbatches=5 precision.compute=bf16",
    "interleaved": "schedule.name=interleaved-1f1b schedule.microbatches=3",
    "looped-bfs": "schedule.name=looped-bfs schedule.microbatches=3 precision.compute=fp32",
    "zbv": "schedule.name=zbv schedule.microbatches=5",
    "v-min": "schedule.name=v-min schedule.microbatches=5 model.attention=unfused",
    "dualpipe, ZeRO-1": "schedule.name=dualpipe schedule.microbatches=7",
    "dualpipe, ZeRO-0, M < P": "schedule.name=dualpipe schedule.microbatches=3 parallel.pp=4 parallel.zero=0",
    "dualpipev": "schedule.name=dualpipev schedule.microbatches=5 parallel.pp=2",
    "recompute": "schedule.name=zbv schedule.recompute=full schedule.microbatches=5",
    "recompute of every second layer": "schedule.name=zb1p schedule.recompute=full schedule.recompute_layers=1::2",
    "recompute, two copies": "schedule.name=dualpipe schedule.recompute=full optimizer.name=sgd",
    "recompute of attention": "schedule.name=zb1p schedule.recompute=attention precision.compute=bf16",
    "tied": "schedule.name=zb1p precision.compute=bf16 model.tie_word_embeddings=true optimizer.name=sgd",
    "tied, one rank": "parallel.pp=1 model.tie_word_embeddings=true",
    "tied, two copies": "schedule.name=dualpipe model.tie_word_embeddings=true precision.reduce=fp32",
    "uneven": "schedule.name=1f1b parallel.layers=[1,3] schedule.microbatches=7",
    "peak in the update": "model.seq_len=16 model.vocab_size=4099 optimizer.clip_norm=100",
    "peak in the update of shards": "schedule.name=dualpipe model.seq_len=16 model.vocab_size=4099 "
    "precision.compute=bf16",
    "peak in the norm": "schedule.name=dualpipe model.seq_len=16 model.vocab_size=4099 optimizer.clip_norm=0 "
    "optimizer.name=sgd precision.compute=bf16 precision.grads=bf16 precision.reduce=bf16",
    "experts": "schedule.name=dualpipev schedule.microbatches=5 model.config=tiny-moe precision.compute=bf16",
    "experts, recompute": "schedule.name=zb1p model.config=tiny-moe schedule.recompute=full",
    "latent attention, MTP": f"schedule.name=zb1p precision.compute=bf16 {SMALL_DEEPSEEK}",
    "stream in fp32": "schedule.name=zb1p precision.compute=bf16 precision.params=fp32 precision.residual=fp32",
    "stream in fp32, two copies": "schedule.name=dualpipe schedule.recompute=full precision.compute=bf16 "
    "precision.residual=fp32",
}

# Replicas: each level of ZeRO with each choice that touches it. What is left of the square is slow.
CASES |= {
    "two replicas, sums in another format": "parallel.pp=1 parallel.dp=2 parallel.zero=0 precision.reduce=fp32",
    "ZeRO-1, shares that end inside parameters": "parallel.pp=1 parallel.dp=3 parallel.zero=1 model.vocab_size=131 "
    "schedule.microbatches=2 optimizer.clip_norm=0",
    "ZeRO-1, four owners": "schedule.name=dualpipe parallel.dp=2 parallel.zero=1 schedule.microbatches=5",
    "ZeRO-2": "schedule.name=zb1p parallel.dp=2 parallel.zero=2 parallel.bucket_MiB=0.1 precision.compute=bf16",
    "ZeRO-2, tied copies": "schedule.name=dualpipe parallel.dp=2 parallel.zero=2 model.tie_word_embeddings=true "
    "precision.reduce=fp32",
    "ZeRO-3": "schedule.name=1f1b parallel.dp=2 parallel.zero=3 precision.compute=bf16 precision.params=fp32",
    "ZeRO-3, no prefetch, recompute": "schedule.name=zbv parallel.dp=2 parallel.zero=3 parallel.prefetch=0 "
    "schedule.recompute=full schedule.microbatches=3",
    "ZeRO-3, far ahead, experts": "parallel.pp=1 parallel.dp=2 parallel.zero=3 parallel.prefetch=3 "
    "model.config=tiny-moe schedule.microbatches=2 optimizer.name=sgd",
    "ZeRO-3, weights that weigh": "parallel.pp=1 parallel.dp=4 parallel.zero=3 model.seq_len=8 "
    "model.hidden_size=96 model.vocab_size=523 schedule.microbatches=3 optimizer.clip_norm=0",
}
CASES |= {
    "copies of shards, sums in another format": "parallel.pp=1 parallel.dp=4 parallel.zero=1 parallel.dp_replicate=2 "
    "precision.reduce=fp32 model.vocab_size=131 schedule.microbatches=2",
    "copies of shards, ZeRO-2": "schedule.name=zb1p parallel.dp=4 parallel.zero=2 parallel.dp_replicate=2 "
    "precision.compute=bf16 precision.grads=fp32",
    "copies of shards, ZeRO-3": "schedule.name=dualpipe parallel.dp=4 parallel.zero=3 parallel.dp_replicate=2",
}
SHAPES = ((1, 2), (2, 2), (1, 4), (2, 1), (4, 1))
SCHEDULES = (("1f1b", 3), ("zb1p", 5), ("interleaved-1f1b", 3), ("dualpipe", 5), ("dualpipev", 3))
WEIGH = {  # what the most bytes are
    "activations": "model.seq_len=160",
    "weights": "model.seq_len=8 model.hidden_size=96 model.vocab_size=523",
}
SQUARE = [
    f"parallel.pp={pp} parallel.dp={dp} parallel.zero={zero} schedule.name={name} schedule.microbatches={mbs} {most}"
    + (" model.num_hidden_layers=8" if pp == 4 else "")
    for (pp, dp), zero, (name, mbs), most in product(SHAPES, range(4), SCHEDULES, WEIGH.values())
    if name != "dualpipe" or pp > 1
]
# Each mechanism once where it is the cheapest; the others, which combine them anew, are slow. MTP: test_peak_spread.
QUICK = (
    "one rank", "gpipe, M < P", "zb1p", "v-min", "recompute, two copies", "recompute of attention", "tied, two copies",
    "tied, one rank", "uneven", "peak in the update of shards", "peak in the norm", "experts", "ZeRO-2", "ZeRO-3",
    "ZeRO-1, shares that end inside parameters", "ZeRO-3, no prefetch, recompute", "looped-bfs",
    "stream in fp32",
    "copies of shards, ZeRO-2",
)  # fmt: skip
FAKE = ("zb2p", "tied, two copies", "peak in the norm", "ZeRO-2", "ZeRO-3", "experts", "latent attention, MTP")
ONE = ("parallel.pp=1", "schedule.microbatches=1", "model.num_hidden_layers=2")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_the_peak_found_alone_is_the_measured_peak_to_the_byte(name: str) -> None:
    sets = CASES[name].split()
    assert peak_bytes(*planned(*sets)) == measured(*sets)


@pytest.mark.slow
@pytest.mark.parametrize("sets", SQUARE)
def test_every_shape_and_level_of_zero_to_the_byte(sets: str) -> None:
    assert peak_bytes(*planned(*sets.split())) == measured(*sets.split())


# Without values, and which ranks are run.


@pytest.mark.parametrize("compute", ["fp64", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_fake_tensors_live_as_long_as_real_ones(compute: str, recompute: str) -> None:
    prepared, plan = planned(f"precision.compute={compute}", f"schedule.recompute={recompute}", *ONE)
    assert peaks(prepared, plan, real=False) == peaks(prepared, plan, real=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAKE)
def test_without_values_to_the_byte(name: str) -> None:
    prepared, plan = planned(*CASES[name].split())
    assert peaks(prepared, plan, real=False) == measured(*CASES[name].split())


def test_arithmetic_is_done_where_it_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(module, "peaks", lambda prepared, plan, *, real: asked.append(real))
    peak_bytes(*planned())
    peak_bytes(*planned("model.config=llama3-8b", "model.seq_len=4096"))
    assert asked == [True, False]


def test_nothing_fake_is_left_behind() -> None:
    prepared, plan = planned(*ONE)
    peaks(prepared, plan, real=False)
    with values(True):
        rank = FakeRank(prepared, plan, 0)
        ids = torch.zeros(2, prepared.job.model.seq_len, dtype=torch.int64)
        unit = next(iter(rank.local.stages[0].units.values()))
        assert isinstance(unit, nn.Module) and isinstance(unit(ids).sum().item(), float)


def test_equal_ranks_are_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, plan = planned("parallel.pp=1", "parallel.dp=4", "parallel.zero=0", "schedule.microbatches=1")
    ran: list[int] = []
    found = FakeRank.peak
    monkeypatch.setattr(FakeRank, "peak", lambda self: ran.append(self.program.rank) or found(self))
    assert len(peaks(prepared, plan, real=True)) == RankPlacement.of(plan).ranks == 4
    assert ran == [0, 1], "the first of the copies is the one that squares their gradients"


# -- negative controls ------------------------------------------------------------------------------------------------

CONTROL = ["schedule.name=1f1b", "schedule.microbatches=5"]


def test_what_the_plan_frees_and_nobody_lets_go_of_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlanInterpreter, "_frees", lambda self, i, cover: ())
    assert all(a > b for a, b in zip(peak_bytes(*planned(*CONTROL)) or (), measured(*CONTROL), strict=True))


def test_512_bytes_more_are_seen_as_often_as_they_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers a rank; 2 microbatches in flight on rank 0, 1 on rank 1: beside what attention keeps of each."""
    forward, extra = SplitPass.forward, WeakKeyDictionary[SplitPass, Tensor]()

    def more(self: SplitPass, module: nn.Module, *inputs: Tensor, **given: Any) -> tuple[Tensor, ...]:
        out = forward(self, module, *inputs, **given)
        if isinstance(module, AttentionPart):
            extra[self] = torch.zeros(512, dtype=torch.uint8)
        return out

    monkeypatch.setattr(SplitPass, "forward", more)
    found = peak_bytes(*planned(*CONTROL)) or ()
    assert [a - b for a, b in zip(found, measured(*CONTROL), strict=True)] == [2 * 2 * 512, 2 * 512]


@pytest.mark.parametrize("name", ["ZeRO-2", "ZeRO-3, weights that weigh"])
def test_what_a_microbatch_gathers_and_reduces_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flat tensor of more bytes, once it is there, is seen."""
    resize, opened = FlatBucket._resize, FlatBucket.open

    def larger(self: FlatBucket, numel: int) -> None:
        resize(self, numel and numel + 1)

    def longer(self: FlatBucket, mb: int) -> None:
        opened(self, mb)
        self.kept = torch.zeros(1, dtype=torch.float64)

    monkeypatch.setattr(FlatBucket, "_resize", larger)
    monkeypatch.setattr(FlatBucket, "open", longer)
    sets = CASES[name].split()
    assert all(a > b for a, b in zip(peak_bytes(*planned(*sets)) or (), measured(*sets), strict=True))
