"""Data and optimizers: the same tokens under every split of a global batch, torch's own arithmetic in the updates."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from executor.autograd.split import SplitPass
from executor.device.device import HostDevice
from executor.optim.flat import FlatBucket
from executor.optim.optimizer import Optimizer, ParamGradients, clip_scale, norm_of, square_sums
from executor.optim.sync import BucketSync
from executor.runtime.batch import MicrobatchLoader
from executor.runtime.rank_model import RankModel
from ir.core.errors import PiperError
from ir.graph.graph import BucketPolicy
from ir.graph.sync import Bucket
from ir.job.schema import JobOptimizer
from tests.executor.runs import judged


def _all(data: MicrobatchLoader, step: int) -> torch.Tensor:
    return torch.cat([data.batch(step, r, m).ids for r in range(data.replicas) for m in range(data.microbatches)])


def test_every_microbatch_is_another_one_and_repeats_exactly() -> None:
    data = MicrobatchLoader("synthetic", vocab=50, length=8, replicas=2, microbatches=3, size=2)
    rows = torch.cat([_all(data, step) for step in range(2)])
    assert len({tuple(r.tolist()) for r in rows}) == 24
    again = MicrobatchLoader("synthetic", vocab=50, length=8, replicas=2, microbatches=3, size=2)
    assert torch.equal(_all(again, 1), rows[12:])
    other = MicrobatchLoader("synthetic", vocab=50, length=8, replicas=2, microbatches=3, size=2, seed=1)
    assert not torch.equal(_all(other, 1), rows[12:])


@pytest.mark.parametrize(("replicas", "microbatches", "size"), [(1, 12, 1), (4, 3, 1), (2, 2, 3)])
def test_the_global_batch_does_not_depend_on_how_it_is_divided(replicas: int, microbatches: int, size: int) -> None:
    one = MicrobatchLoader("synthetic", vocab=50, length=8, microbatches=1, size=12)
    many = MicrobatchLoader("synthetic", vocab=50, length=8, replicas=replicas, microbatches=microbatches, size=size)
    assert torch.equal(_all(one, 3), _all(many, 3)) and one.batch(3, 0, 0).scale == many.batch(3, 0, 0).scale


def test_labels_are_the_next_tokens() -> None:
    batch = MicrobatchLoader("synthetic", vocab=50, length=8).batch(0, 0, 0)
    assert torch.equal(batch.ids[:, 1:], batch.labels[:, :-1]) and batch.scale == 1 / 8


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_updates_are_torchs_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    mine = {"a": torch.randn(7, 3, dtype=dtype), "b": torch.randn(70, 90, dtype=dtype).t()}  # one laid out its own way
    theirs = [p.clone().requires_grad_() for p in mine.values()]
    config = JobOptimizer(name, lr=0.1)
    oracle = (
        torch.optim.AdamW(theirs, lr=0.1, foreach=False)
        if name == "adamw"
        else torch.optim.SGD(theirs, lr=0.1, foreach=False)
    )
    opt = Optimizer(config, mine, dtype)
    for _ in range(3):
        for p in theirs:
            p.grad = torch.randn_like(p)
        opt.step({n: p.grad.clone() for n, p in zip(mine, theirs, strict=True) if p.grad is not None})
        oracle.step()
        assert all(torch.equal(a, b) for a, b in zip(mine.values(), theirs, strict=True))


def flat_bucket(zero: int, copies: int = 1) -> FlatBucket:
    bucket = Bucket("dense", 0, (0,), ("dp",), 6, 2, BucketPolicy(zero), (0,), ("w",), copies=copies)
    params = {"w": torch.ones(6)}
    return FlatBucket(bucket, (0, 1), 1, params, ParamGradients(params), reduce=torch.bfloat16, first=True)


@pytest.mark.parametrize(
    ("zero", "copies", "once"), [(0, 1, True), (1, 1, True), (1, 2, True), (2, 1, False), (2, 2, True), (3, 1, False)]
)
def test_what_is_summed_over_ranks_once_a_step_travels_in_its_own_format(zero: int, copies: int, once: bool) -> None:
    flat = flat_bucket(zero, copies)
    flat.sums.fill_(3.0)
    assert (flat.filled() == 3.0).all()
    assert (flat.filled().dtype is torch.bfloat16) is once and flat.sums.dtype is torch.float32


def test_weights_are_read_where_they_are_and_not_gathered_again() -> None:
    flat = flat_bucket(3)
    holder: Any = SimpleNamespace(flat={flat.name: flat})
    with pytest.raises(PiperError, match="0F0 reads 0/dense, which was not gathered or freed already"):
        BucketSync.reads(holder, [flat.name], "0F0")
    flat.fetch()
    BucketSync.reads(holder, [flat.name], "0F0")
    with pytest.raises(PiperError, match="0/dense is gathered again before it was freed") as e:
        flat.fetch()
    assert e.value.suggestion == "free it behind the last op that reads it" and flat.here


FALLS: dict[str, dict[str, Any]] = {
    "constant": {}, "linear": {"decay_steps": 5, "min_lr": 0.02}, "cosine": {"decay_steps": 5, "min_lr": 0.02},
    "wsd": {"decay_steps": 4, "min_lr": 0.01},
}  # fmt: skip
STEPS, WARM = 12, 3


@pytest.mark.parametrize(
    ("config", "grads", "made"),
    [
        (JobOptimizer("sgd", clip_norm=0), torch.float32, 0),
        (JobOptimizer("sgd", clip_norm=1), torch.float32, 4096),  # a product, of a stretch
        (JobOptimizer("sgd", clip_norm=0, weight_decay=0.1), torch.float32, 4096),  # a sum
        (JobOptimizer("sgd", clip_norm=0), torch.bfloat16, 4096),  # a wider copy
    ],
)
def test_an_update_makes_nothing_on_its_way_or_what_a_stretch_needs(
    config: JobOptimizer, grads: torch.dtype, made: int
) -> None:
    """And, where it makes nothing, in one kernel for the whole. By torch's own profiler."""
    opt, grad = Optimizer(config, {"w": torch.ones(16384)}), torch.ones(16384, dtype=grads)
    with torch.profiler.profile(profile_memory=True) as found:
        opt.step({"w": grad})
    assert max(e.cpu_memory_usage for e in found.events()) == 4 * made
    assert sum(e.name == "aten::add_" for e in found.events()) == (4 if made else 1)


def _torchs(optimizer: torch.optim.Optimizer, o: JobOptimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """The same schedule of torch's own parts."""
    to = torch.optim.lr_scheduler
    warm = to.LinearLR(optimizer, 1 / WARM, total_iters=WARM - 1)
    flat, fall = to.ConstantLR(optimizer, 1.0), to.LinearLR(optimizer, 1.0, o.min_lr / o.lr, o.decay_steps or 1)
    match o.schedule:
        case "constant":
            return to.SequentialLR(optimizer, [warm, flat], [WARM])
        case "linear":
            return to.SequentialLR(optimizer, [warm, fall], [WARM])
        case "wsd":
            return to.SequentialLR(optimizer, [warm, flat, fall], [WARM, STEPS - (o.decay_steps or 0)])
    closed = lambda k: o.min_lr / o.lr + (1 - o.min_lr / o.lr) * (1 + math.cos(math.pi * min(k, 5) / 5)) / 2  # noqa: E731
    return to.SequentialLR(optimizer, [warm, to.LambdaLR(optimizer, closed)], [WARM])


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("schedule", FALLS)
def test_schedules_and_groups_are_torchs(name: str, schedule: str) -> None:
    torch.manual_seed(0)
    mine = {n: torch.randn(7, 3, dtype=torch.float64) for n in ("a.weight", "a.bias", "norm.weight")}
    theirs = [p.clone().requires_grad_() for p in mine.values()]
    config = JobOptimizer(
        name, 0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3, no_decay=("*.bias", "norm*"), schedule=schedule,
        warmup_steps=WARM, **FALLS[schedule],
    )  # fmt: skip
    groups = [{"params": theirs[:1], "weight_decay": 0.3}, {"params": theirs[1:], "weight_decay": 0.0}]
    more = {"betas": (0.8, 0.9), "eps": 1e-6} if name == "adamw" else {}
    oracle = (torch.optim.AdamW if name == "adamw" else torch.optim.SGD)(groups, lr=0.1, foreach=False, **more)
    scheduler, opt = _torchs(oracle, config), Optimizer(config, mine, torch.float64)
    opt.ends = STEPS
    for _ in range(STEPS):
        for p in theirs:
            p.grad = torch.randn_like(p)
        opt.step({n: p.grad.clone() for n, p in zip(mine, theirs, strict=True) if p.grad is not None})
        assert opt.lr == pytest.approx(oracle.param_groups[0]["lr"], rel=1e-12)
        for group in oracle.param_groups:
            group["lr"] = opt.lr  # torch's own is a chain of products: the last bit
        oracle.step()
        scheduler.step()
        assert all(torch.equal(a, b) for a, b in zip(mine.values(), theirs, strict=True))


def test_bf16_parameters_keep_masters_that_small_updates_reach() -> None:
    w = torch.ones(1, dtype=torch.bfloat16)
    opt = Optimizer(JobOptimizer("sgd", lr=1e-3), {"w": w})
    for _ in range(8):
        opt.step({"w": torch.ones(1)})
    assert opt.masters["w"].item() == pytest.approx(0.992) and w.item() == opt.masters["w"].bfloat16().item() < 1
    assert not Optimizer(JobOptimizer(), {"w": w}, torch.bfloat16).masters


def test_the_norm_is_the_same_however_parameters_are_spread() -> None:
    torch.manual_seed(0)
    grads = {n: torch.randn(100) for n in "abcdefg"}
    order = list(grads)
    here, there = ({n: g for i, (n, g) in enumerate(grads.items()) if i % 2 == k} for k in (0, 1))
    whole = norm_of(square_sums(grads, order))
    assert norm_of(square_sums(here, order) + square_sums(there, order)) == whole
    leaves = [torch.zeros(100, requires_grad=True) for _ in grads]
    for p, g in zip(leaves, grads.values(), strict=True):
        p.grad = g.clone()
    assert float(torch.nn.utils.clip_grad_norm_(leaves, 1.0)) == pytest.approx(whole, rel=1e-6)
    assert torch.allclose(leaves[0].grad, grads["a"] * clip_scale(whole, 1.0), rtol=1e-5)
    for norm in (whole, 0.5):  # a norm that is left on the device gives what one that the host knows does
        left, single = (clip_scale(torch.tensor(norm, dtype=torch.float64), 1.0, single=x) for x in (False, True))
        assert float(left) == pytest.approx(clip_scale(norm, 1.0), rel=1e-12)
        assert single.dtype is torch.float32 and float(single) == clip_scale(norm, 1.0, single=True)


def _clipped(folder: Path, noise: float, **formats: str) -> dict[str, Tensor]:
    """Weights behind an update whose norm is off by `noise`."""
    sets = [f"precision.{key}={dtype}" for key, dtype in formats.items()]
    prepared, plan = judged(folder, "parallel.pp=1", "optimizer.clip_norm=0.1", *sets)
    local, draw = RankModel.of(prepared, plan, 0, HostDevice()), torch.Generator().manual_seed(0)
    local.sync.begin()
    for name, total in local.grads.sums.items():
        local.grads.add(name, torch.empty_like(total).normal_(generator=draw))
    local.sync._sums = local.sync.squares() * (1 + noise)
    local.sync.update()
    return {n: slots["weight"] for n, _, slots in local.sync.kept()}


def test_where_sums_are_wider_than_weights_the_last_bit_of_a_norm_is_no_update_s(tmp_path: Path) -> None:
    """Plans add up copies in different orders; with one format for all, the clip factor is torch's to the bit."""
    wide = dict.fromkeys(("grads", "reduce", "optimizer"), "fp64")
    for formats, same in (({**wide, "compute": "fp32"}, True), ({"compute": "fp64"}, False)):
        one, other = (_clipped(tmp_path, noise, **formats) for noise in (0.0, 1e-15))
        assert all(torch.equal(w, other[n]) for n, w in one.items()) is same


@pytest.mark.parametrize("dtype, uses, added", [("float64", 1, 1), ("float64", 2, 2), ("float32", 1, 2)])
def test_a_step_s_first_gradient_takes_the_last_one_s_place_and_what_gets_none_is_zero(
    dtype: str, uses: int, added: int
) -> None:
    """A linear makes it right there, where it is the only one and of that format; else it is copied."""
    w, other = (torch.nn.Parameter(torch.randn(3, 2, dtype=torch.float64)) for _ in range(2))
    x, made = torch.randn(4, 2, dtype=torch.float64), list[str]()
    grads = ParamGradients({"w": w, "other": other}, getattr(torch, dtype))

    def sink(name: str, grad: Tensor) -> None:
        made.append(name)
        grads.add(name, grad)

    def uses_of_w(y: Tensor) -> Tensor:
        return torch.stack([F.linear(y, w) for _ in range(uses)]).sum()

    for _ in range(2):
        grads.begin()
        for _ in range(2):
            run = SplitPass({"w": w}, sink, grads.room)
            run.forward(uses_of_w, x)
            run.input_grad()
            run.weight_grad()
        grads.settle()
        assert torch.allclose(grads["w"], (2 * uses * x.sum(0).expand(3, 2)).to(grads["w"].dtype), rtol=1e-5)
        assert not grads["other"].any()
        grads["other"].fill_(7)
    assert len(made) == 2 * added
