"""Alloc lists taken under fake tensors, spliced in plan order: the peaks of real runs, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from executor.autograd.stage import Stage
from executor.measure import alloc
from executor.measure.alloc_bench import Bench
from executor.parallel.inline import Region
from executor.runtime.batch import Batch, Waiting
from ir.core.alloc import AllocList, Birth, Release
from ir.core.errors import PiperError
from ir.core.ops import Pass
from piper_sim.memory.splice import peaks
from piper_sim.memory.splice_table import Table
from tests.executor.measure.alloc_runs import lists_from_elsewhere, measured, planned

SMALL_DEEPSEEK = (
    "model.config=deepseek-v3 model.hidden_size=64 model.first_k_dense_replace=1 model.num_nextn_predict_layers=1 "
    "model.num_attention_heads=4 model.num_key_value_heads=4 model.vocab_size=256 model.n_routed_experts=8 "
    "model.num_experts_per_tok=2 model.moe_intermediate_size=32 model.intermediate_size=64 model.n_group=2 "
    "model.topk_group=1 model.q_lora_rank=32 model.kv_lora_rank=32"
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


@pytest.mark.parametrize("name", CASES)
def test_the_spliced_peak_is_the_measured_peak_to_the_byte(name: str) -> None:
    sets = CASES[name].split()
    assert peaks(*planned(*sets), lists_from_elsewhere(*sets)) == measured(*sets)


@pytest.mark.slow
@pytest.mark.parametrize("sets", SQUARE)
def test_every_shape_and_level_of_zero_to_the_byte(sets: str) -> None:
    assert peaks(*planned(*sets.split()), lists_from_elsewhere(*sets.split())) == measured(*sets.split())


def test_lists_do_not_depend_on_the_plan_they_were_taken_on() -> None:
    here = alloc.take_lists(*planned("schedule.name=dualpipev", "schedule.microbatches=5"))
    there = alloc.take_lists(*planned("schedule.name=gpipe", "schedule.microbatches=2", "parallel.pp=4"))
    assert here == there


@pytest.mark.parametrize("compute", ["fp64", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_fake_tensors_live_as_long_as_real_ones(compute: str, recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = planned(f"precision.compute={compute}", f"schedule.recompute={recompute}")
    fake = alloc.take_lists(*job)
    monkeypatch.setattr(alloc, "FakeTensorMode", nullcontext)
    assert alloc.take_lists(*job) == fake


def test_nothing_fake_is_left_behind() -> None:
    prepared, plan = planned()
    alloc.take_lists(prepared, plan)
    batch = alloc._batch(prepared)
    stages, _, _ = alloc._stages(prepared, plan, batch, Region())
    assert isinstance(stages[0].forward(0, batch.ids)[0].sum().item(), float)


# -- negative controls ------------------------------------------------------------------------------------------------

CONTROL = ["schedule.name=1f1b", "schedule.microbatches=5"]


def _changed(prefix: str, change: type[Birth] | type[Release], index: int) -> tuple[int, ...]:
    """The peaks with one event of one list changed: a birth 512 bytes larger, a release dropped."""
    lists = dict(lists_from_elsewhere(*CONTROL))
    (key,) = (k for k in lists if k.startswith(prefix))
    events = list(lists[key].events)
    at = [i for i, e in enumerate(events) if isinstance(e, change)][index]
    event = events.pop(at)
    if isinstance(event, Birth):
        events.insert(at, replace(event, bytes=event.bytes + 512))
    lists[key] = replace(lists[key], events=tuple(events))
    return peaks(*planned(*CONTROL), lists)


@pytest.mark.parametrize("index", [0, -1])
def test_a_dropped_release_is_seen(index: int) -> None:
    assert _changed("W/mlp ", Release, index) > measured(*CONTROL)
    assert _changed("F/attn ", Release, index) > measured(*CONTROL)


def test_a_birth_of_512_bytes_more_is_seen_as_often_as_it_is_held() -> None:
    kept = "F/attn "
    more = [b - a for a, b in zip(measured(*CONTROL), _changed(kept, Birth, 1), strict=True)]
    # Two layers a rank; 2 microbatches in flight on rank 0, 1 on rank 1. F1 is what the norm made: gone after F.
    assert all(extra % 512 == 0 for extra in more)
    held = [b - a for a, b in zip(measured(*CONTROL), _changed(kept, Birth, _held(kept)), strict=True)]
    assert held == [2 * 2 * 512, 2 * 512]


def _held(prefix: str) -> int:
    """The ordinal of a storage of F that W lets go of last."""
    lists = lists_from_elsewhere(*CONTROL)
    (found,) = (made for key, made in lists.items() if key.startswith(prefix.replace("F", "W", 1)))
    names = [e.name for e in found.events if isinstance(e, Release) and e.name.startswith("F")]
    return int(next(n for n in names if n != "F0")[1:])


def _without(what: str) -> Callable[..., Table]:
    def of(*given: Any) -> Table:
        return replace(TABLE(*given), **{what: {}})

    return of


TABLE = Table.of


@pytest.mark.parametrize("name", ["ZeRO-2", "ZeRO-3, weights that weigh"])
@pytest.mark.parametrize("what", ["births", "frees"])
def test_what_a_microbatch_gathers_and_reduces_counts(name: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Table, "of", _without(what))
    found = peaks(*planned(*CASES[name].split()), lists_from_elsewhere(*CASES[name].split()))
    pairs = list(zip(found, measured(*CASES[name].split()), strict=True))
    assert all(a < b if what == "births" else a > b for a, b in pairs)


def test_lists_of_another_model_are_refused() -> None:
    lists = lists_from_elsewhere(*CONTROL)
    with pytest.raises(PiperError, match=r"no alloc list for 0F/embed\.embed") as caught:
        peaks(*planned("model.seq_len=32"), lists)
    assert caught.value.suggestion


# -- units that cannot be taken by themselves -------------------------------------------------------------------------


class _Keeps(nn.Module):
    """A unit that forgets to forget."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(x * 2)
        return x * self.weight


class _Slices(_Keeps):
    """One that hands on a part of a larger tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return (torch.cat([x, x]) * self.weight)[:1]


@pytest.mark.parametrize(("unit", "why"), [(_Keeps, "still holds F0, F1"), (_Slices, "a part of a larger storage")])
def test_what_has_no_list_of_its_own_is_refused(unit: type[_Keeps], why: str) -> None:
    module = unit()
    stage = Stage({"l0": module}, {"w": module.weight})
    batch = Waiting(Batch(torch.zeros(0), torch.zeros(0), 1.0), torch.device("cpu"))
    bench = Bench(stage, "l0", [(((1, 4), torch.float32),)], batch, (), [module.weight, stage.grads["w"]])
    with pytest.raises(PiperError, match=why):
        bench.run([Pass.F, Pass.I, Pass.W])
        bench.check()


def test_a_list_is_read_back_from_its_text() -> None:
    for made in lists_from_elsewhere("model.config=tiny-moe", "schedule.recompute=full").values():
        assert AllocList.parse(made.text()) == made
