"""The host of a GPU waits where the simulator's host model says: for counts of rows, and for results behind all ops."""

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from executor.device.device import upload
from executor.device.host_syncs import shaped_by_values
from executor.device.race import RaceDevice
from executor.modules.attention.attention import AttentionPart
from executor.optim.optimizer import Optimizer
from executor.parallel.expert_all_to_all import ExpertRowCounts
from executor.runtime.batch import PendingMicrobatch
from executor.runtime.interpreter import RESULTS
from ir.plan.host import host_reads
from ir.plan.places import RankPlacement
from tests.executor.device.races import PLANS, raced
from tests.executor.runs import far, judged

EXPERTS = ("model.config=tiny-moe", "precision.compute=bf16")
SPREAD = (*EXPERTS, "parallel.dp=2", "parallel.ep=2")
LATENT = (
    "model.config=deepseek-v3", "model.hidden_size=32", "model.intermediate_size=32", "model.num_attention_heads=2",
    "model.n_routed_experts=8", "model.n_group=2", "model.topk_group=1", "model.num_experts_per_tok=2",
    "model.moe_intermediate_size=16", "model.vocab_size=64", "model.num_nextn_predict_layers=0",
)  # fmt: skip
SMALL = (*SPREAD, "parallel.pp=1", "schedule.microbatches=2", "model.num_hidden_layers=2")  # what defects show in
COMPOSITIONS = {
    **PLANS,
    "small": SMALL,
    "no clipping, SGD": ("optimizer.name=sgd", "optimizer.clip_norm=0.0", "optimizer.lr=0.1"),
    "learning rate": ("optimizer.schedule=cosine", "optimizer.warmup_steps=1", "optimizer.decay_steps=3"),
    "mixed precision": ("precision.compute=bf16", "precision.grads=fp32", "precision.optimizer=fp32"),
    "window": ("model.config=mistral-7b", "model.hidden_size=32", "model.intermediate_size=32", "model.vocab_size=64",
               "model.num_attention_heads=4", "model.num_key_value_heads=2", "model.sliding_window=3"),
    "latent": (*LATENT, "precision.compute=bf16"),
    "experts of one rank": EXPERTS,
    "experts of one rank, recompute": (*EXPERTS, "schedule.recompute=full"),
    "experts, recompute": (*SPREAD, "schedule.recompute=full", "schedule.name=zb1p"),
    "experts, evened out": (*SPREAD, "model.router_aux_loss_coef=0.01"),
    "experts, forced": (*SPREAD, "routing.forced=true", "routing.kind=zipf"),
    "evaluation": ("run.eval_source=synthetic", "run.eval_every=1"),
}  # fmt: skip


def _census(folder: Path, *sets: str, note: bool = False) -> tuple[list[Counter[str]], list[Counter[str]]]:
    """For each rank, how often its host waited at an op in a step, and how often the model says. Ends with results."""
    device = RaceDevice()
    assert raced(folder, *sets, device=device, note=note) == []
    prepared, plan = judged(folder, *sets)
    places, (ops, _) = RankPlacement.of(plan), host_reads(plan)
    steps = 3 if prepared.job.run.eval_every else 2
    found, wanted = [], []
    for rank in range(prepared.ranks):
        mine = Counter[str]()
        for (thread, op, what), count in device.syncs.found.items():
            if thread == f"rank-{rank}" and op not in ("", RESULTS):
                mine[op] += count
            if thread == f"rank-{rank}" and op == RESULTS and what != "a mark":
                assert count <= 2 * steps, f"{what}, {count} times in {steps} steps"  # losses; norm or squares
        assert all(count % steps == 0 for count in mine.values()), mine
        found.append(Counter({op: count // steps for op, count in mine.items()}))
        wanted.append(Counter(plan.text(i) for i in ops.tolist() if plan.program[i] == places.program(rank)))
    return found, wanted


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_nothing_races_and_the_host_waits_where_the_model_says(name: str, tmp_path: Path) -> None:
    found, wanted = _census(tmp_path, *COMPOSITIONS[name])
    assert found == wanted
    assert any(wanted) == ("parallel.ep=2" in COMPOSITIONS[name])


@pytest.mark.parametrize("format", ["fp64", "fp32"])
@pytest.mark.parametrize("clip", ["0.0", "0.05", "1e9"])  # never, always, never but asked for
def test_a_host_that_reads_less_trains_the_same(format: str, clip: str) -> None:
    sets = ("model.config=tiny-moe", "parallel.dp=2", "parallel.ep=2", "parallel.zero=1", f"precision.compute={format}")
    clipped = (
        *sets,
        f"optimizer.clip_norm={clip}",
        "optimizer.name=sgd",
        "optimizer.lr=0.1",
        "schedule.microbatches=2",
    )
    assert far(*clipped, steps=3, backend="local", racecheck=True) < {"fp64": 1e-12, "fp32": 1e-4}[format]


def test_counts_that_a_run_keeps_are_read_behind_the_step(tmp_path: Path) -> None:
    found, wanted = _census(tmp_path, *EXPERTS, note=True)
    assert found == wanted


def test_in_wider_formats_experts_of_one_rank_are_read(tmp_path: Path) -> None:
    """Which the model does not have: torch multiplies groups of unread sizes in bfloat16 alone."""
    found, _ = _census(tmp_path, "model.config=tiny-moe", "precision.compute=fp32")
    assert found == [{f"{rank}F{mb}": 2 for mb in range(4)} for rank in range(2)]  # two layers each


# Each reads, as it is given a tensor, what a host cannot know: one wait each.
READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "if": lambda x: bool((x > 0).any()),
    "tolist": lambda x: x.flatten()[:2].tolist(),
    "numpy": lambda x: x.float().numpy(),
    "cpu": lambda x: x.cpu().tolist(),
    "to": lambda x: x.to("cpu"),
    "to, as a copy": lambda x: x.to("cpu", copy=True),
    "to a device": lambda x: x.to(torch.device("cpu")),
    "to a device by name": lambda x: x.to(device=torch.device("cpu")),
    "a mask": lambda x: x[x > 0],
    "a mask written": lambda x: x.clone().__setitem__(x > 0, 0.0),
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.unique(),
    "repeats": lambda x: x.flatten()[:2].repeat_interleave(torch.ones(2, dtype=torch.int64)),
    "a list": lambda x: x * torch.tensor([2.0]),
    "an index": lambda x: x[..., [0, 1]],
    "a copy of a list": lambda x: torch.tensor([2.0]).to(x.device, copy=True),
}
AWAY: dict[str, Callable[[Tensor], object]] = {
    "uploaded": lambda x: x * upload(torch.tensor([2.0]), x.device).sum(),
    "repeats, how many": lambda x: x.flatten()[:2].repeat_interleave(torch.ones(2).long(), output_size=2),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "to the host, behind": lambda x: x.to("cpu", non_blocking=True),
    "to the host, behind, in another format": lambda x: x.to(torch.device("cpu"), torch.float64, True),
    "to where it is": lambda x: x.to(x.device).to(device=x.device).to(torch.float64).to(x),
    "to where it is, as a copy": lambda x: x.to(x.device, copy=True),
    "a number": lambda x: x * 2.0 + x.new_zeros(()),
}


def _waits(call: Callable[[Tensor], object]) -> list[str]:
    """What a host waits in, in a lane of a watched thread."""
    device = RaceDevice()

    def life() -> None:
        device.bind()
        with device.lane("compute")():
            call(torch.tensor([[1.0, -1.0], [2.0, 3.0]]).clone())

    thread = threading.Thread(target=life)
    thread.start()
    thread.join()
    list_of_x, *found = [what for *_, what in device.syncs.found.elements()]
    assert "clone" in list_of_x
    return found


@pytest.mark.parametrize("name", READS)
def test_what_makes_a_host_wait_is_found(name: str) -> None:
    assert len(_waits(READS[name])) == 1


@pytest.mark.parametrize("name", AWAY)
def test_what_makes_no_host_wait_is_not(name: str) -> None:
    assert _waits(AWAY[name]) == []


def test_torch_tells_which_ops_have_shapes_of_values() -> None:
    x, mask = torch.ones(2), torch.ones(2, dtype=torch.bool)
    aten = torch.ops.aten
    read = [(aten._local_scalar_dense.default, (x,)), (aten.equal.default, (x, x)), (aten.index.Tensor, (x, [mask]))]
    unread = [(aten.add.Tensor, (x, x)), (aten.index.Tensor, (x, [x.long()])), (aten.zeros_like.default, (x,))]
    assert all(shaped_by_values(*call, {}) for call in read) and not any(shaped_by_values(*call, {}) for call in unread)


def _wrong(name: str) -> tuple[Any, str, Any]:
    """What production did before, or could do. (owner, attribute, defect)"""
    match name:
        case "batches are copied as they lie":
            return PendingMicrobatch, "ids", property(lambda self: self.batch.ids.to(self.device, copy=True))
        case "counts are read on the compute lane":
            return ExpertRowCounts, "fetch", lambda self, device: None
        case "the norm is read before the update":
            real = Optimizer.step
            return Optimizer, "step", lambda self, grads, scale: real(self, grads, float(scale))
        case _:
            unit = AttentionPart.forward
            return AttentionPart, "forward", lambda self, x: unit(self, x * x.detach().square().mean().item())


DEFECTS = (
    "batches are copied as they lie", "counts are read on the compute lane", "the norm is read before the update",
    "a unit reads a number",
)  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_a_host_that_waits_elsewhere_is_seen(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*_wrong(name))
    found, wanted = _census(tmp_path, *SMALL)
    assert found != wanted
