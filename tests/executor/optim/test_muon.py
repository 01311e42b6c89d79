"""Muon is torch's: its arithmetic to the bit, and its training on one process under every plan that it runs under."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from executor.checkpoint.manifest import read_manifest
from executor.checkpoint.reader import CheckpointReader, digests
from executor.optim import muon
from executor.optim.flat import places_whole
from executor.optim.optimizer import Optimizer
from executor.parallel.inline import RankAxis
from ir.core.errors import ErrorKind, PiperError
from ir.graph.matrices import MatrixShard, MuonOptimizer, orthogonalised
from ir.job.run_options import CheckpointOptions
from ir.job.schema import JobOptimizer
from piper_sim.memory.timeline import state
from piper_sim.pricing.costs import CostModel
from piper_sim.pricing.prepare import hardware_of
from piper_sim.study.planned import PlannedJob
from tests.executor.runs import alone, distance, error, judged, merged, run

ROUNDING, VISIBLE = 1e-10, 1e-3
MUON = ("optimizer.name=muon", "optimizer.lr=0.02")
TWO = ("parallel.pp=1", "parallel.dp=2")
MOE = ("model.config=tiny-moe", "model.num_hidden_layers=2", "parallel.dp=2", "parallel.ep=2", "parallel.pp=1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_updates_are_torchs_bit_for_bit(dtype: torch.dtype, nesterov: bool, adjust: str) -> None:
    torch.manual_seed(0)
    mine = {"tall": torch.randn(7, 3, dtype=dtype), "experts": torch.randn(3, 4, 9, dtype=dtype)}
    theirs = [p.clone().requires_grad_() for p in (mine["tall"], *mine["experts"])]
    oracle = torch.optim.Muon(theirs, lr=0.1, nesterov=nesterov, adjust_lr_fn=adjust, momentum=0.9, ns_steps=4)
    config = JobOptimizer("muon", 0.1, 0, momentum=0.9, nesterov=nesterov, ns_steps=4, adjust_lr=adjust)
    opt = Optimizer(config, mine, dtype, matrices=dict.fromkeys(mine))
    for _ in range(3):
        for p in theirs:
            p.grad = torch.randn_like(p)
        tall, *experts = (p.grad for p in theirs)
        opt.step({"tall": tall, "experts": torch.stack(experts)})
        oracle.step()
        assert torch.equal(mine["tall"], theirs[0])
        assert all(torch.equal(a, b) for a, b in zip(mine["experts"], theirs[1:], strict=True))


RUNS = [
    ("schedule.name=1f1b",),
    ("schedule.name=zbv", "schedule.recompute=full"),
    ("schedule.name=interleaved-1f1b", "optimizer.adjust_lr=match_rms_adamw", "optimizer.nesterov=false"),
    ("schedule.name=dualpipe", "parallel.zero=0"),
    ("schedule.name=dualpipe", "parallel.zero=1"),
    ("schedule.name=1f1b", "model.tie_word_embeddings=true", "parallel.dp=2"),
    (*TWO, "parallel.zero=0"),
    (*TWO, "parallel.zero=1"),
    ("parallel.dp=3", "schedule.microbatches=2", "parallel.bucket_MiB=0.01"),
    (*MOE, "parallel.zero=0"),
    (*MOE, "parallel.zero=1", "parallel.dp=4"),
    ("parallel.pp=1", "parallel.dp=4", "parallel.zero=1", "parallel.dp_replicate=2"),
    (*MOE, "parallel.zero=1", "parallel.dp=8", "parallel.dp_replicate=2"),
]


@pytest.mark.parametrize("sets", RUNS, ids=lambda x: " ".join(s.split("=")[1] for s in x))
def test_a_run_trains_as_torch_does_on_one_process(sets: tuple[str, ...]) -> None:
    assert error(run(*sets, *MUON, steps=3, backend="local"), alone(*sets, *MUON, steps=3)) <= ROUNDING


FAULTS = {
    "a step too few": {"ns_steps": "4"},
    "another momentum": {"momentum": "0.9"},
    "no look ahead": {"nesterov": "false"},
    "another rate": {"adjust_lr": "match_rms_adamw"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_another_muon_is_seen(fault: str) -> None:
    sets = tuple(f"optimizer.{k}={v}" for k, v in FAULTS[fault].items())
    assert error(run(*TWO, *MUON, *sets, steps=2, backend="local"), alone(*TWO, *MUON, steps=2)) > VISIBLE


def test_a_matrix_has_to_be_whole() -> None:
    """Newton-Schulz of halves, which ZeRO-2 would leave a rank, is another update."""
    torch.manual_seed(0)
    matrix = torch.randn(8, 16, dtype=torch.float64)
    whole, halves = muon.orthogonalised(matrix, 5), torch.cat([muon.orthogonalised(x, 5) for x in matrix.chunk(2)])
    assert float((whole - halves).norm() / whole.norm()) > 0.1


TP = [
    ("parallel.tp=2", "parallel.pp=1"),
    ("parallel.tp=2", "parallel.pp=1", "parallel.dp=2", "parallel.zero=1", "parallel.sequence_parallel=true"),
    ("parallel.tp=2", "schedule.name=dualpipe", "optimizer.adjust_lr=match_rms_adamw"),
    (*MOE, "parallel.tp=2", "parallel.etp=2", "parallel.dp=2", "parallel.zero=1", "optimizer.nesterov=false"),
    (*MOE, "parallel.tp=1", "parallel.etp=2", "parallel.zero=0", "parallel.dp=4"),
]


@pytest.mark.parametrize(
    "sets", [(*TWO, "parallel.zero=0"), (*TWO, "parallel.zero=1"), (*MOE, "parallel.zero=1"), TP[1]]
)
def test_a_rank_holds_what_is_predicted(sets: tuple[str, ...], tmp_path: Path) -> None:
    held = run(*sets, *MUON, steps=1, memory=True, backend="local").object["memory"]["persistent_bytes"]
    prepared, plan = judged(tmp_path, *sets, *MUON)
    (promised,) = state(plan, CostModel(prepared, hardware_of(prepared.job)).recipe)
    for kind in ("parameters", "gradients", "optimizer"):
        most = max(mine[kind] for mine in held.values())
        assert 0 <= most - getattr(promised, kind) <= 64 * len(plan.graph.entries)
    (adamw,) = state(plan, CostModel(*_adamw(tmp_path, *sets)).recipe)
    assert promised.optimizer < 0.8 * adamw.optimizer


def _adamw(folder: Path, *sets: str):  # type: ignore[no-untyped-def]
    prepared, _ = judged(folder, *sets)
    return prepared, hardware_of(prepared.job)


@pytest.mark.parametrize("zero", [0, 1])
def test_an_update_s_peak_is_what_is_predicted(zero: int, tmp_path: Path) -> None:
    """Of a step so short that nothing but the update takes room: the largest matrix, on its way."""
    sets = (*TWO, *MUON, f"parallel.zero={zero}", "model.seq_len=4", "schedule.microbatches=1")
    # Small: where a CPU has no bf16 products, torch's take a second for a billion.
    sets = (*sets, "model.hidden_size=128", "model.intermediate_size=512", "precision.compute=fp32")
    peaks = run(*sets, steps=2, memory=True, backend="local").object["memory"]["peak_allocated_bytes"]
    prepared, _ = judged(tmp_path, *sets)
    found = PlannedJob.of(prepared, hardware_of(prepared.job)).memory
    assert max(peaks.values()) == pytest.approx(int(found.peak[0]), rel=2e-3)
    assert found.dynamic[0].sum() == 12 * 128 * 512 + 4 * 128**2


@pytest.mark.parametrize("shape", ((64, 16), (16, 64), (32, 32), (8, 24)))
@pytest.mark.parametrize("steps", [1, 5])
def test_flops_are_those_that_torch_counts_of_its_own_muon(shape: tuple[int, int], steps: int) -> None:
    weight = torch.randn(shape, requires_grad=True)
    weight.grad = torch.randn(shape)
    with FlopCounterMode(display=False) as counter:
        torch.optim.Muon([weight], ns_steps=steps).step()
    m, n = sorted(shape)
    wanted = steps * (4 * m * m * n + 2 * m**3)
    one, three = (orthogonalised(MatrixShard(n, *shape), MuonOptimizer(steps))[0] for n in (1, 3))
    assert sum(k.flops * k.count for k in one if k.shape) == counter.get_total_flops() == wanted
    assert sum(k.flops * k.count for k in three if k.shape) == 3 * wanted, "each expert's by itself"


def test_shares_have_matrices_whole() -> None:
    places, size = places_whole({"a": 10, "b": 6, "c": 5}, 8, (0, 1, 1))
    assert all(p.start // size == (p.stop - 1) // size for p in places.values()) and size == 13


def test_a_checkpoint_has_one_moment_of_a_matrix_and_goes_on_under_another_plan(tmp_path: Path) -> None:
    save = CheckpointOptions(save=str(tmp_path / "save"))
    first = run(*TWO, *MUON, steps=2, saving=save)
    folder = next((tmp_path / "save").glob("step-*2"))
    names = digests(folder, manifest := read_manifest(folder))
    reader = CheckpointReader(folder, manifest)
    assert reader.slots("lm_head.weight") == ("weight", "exp_avg", "exp_avg_sq")
    matrix = next(n for n in manifest.training.shapes if n.endswith("q_proj.weight"))
    assert reader.slots(matrix) == ("weight", "momentum_buffer") and f"exp_avg/{matrix}" not in names
    sets = ("parallel.pp=2", "parallel.dp=1", "schedule.microbatches=8")
    went_on = run(*sets, *MUON, steps=3, saving=CheckpointOptions(resume=str(folder)))
    whole = run(*TWO, *MUON, steps=3)
    assert math.isclose(went_on.object["losses"][-1], whole.object["losses"][-1], rel_tol=1e-12)
    assert first.object["losses"] == whole.object["losses"][:2]
    with pytest.raises(PiperError, match="adamw here, muon there"):
        run(*TWO, steps=3, saving=CheckpointOptions(resume=str(folder)))


@pytest.mark.parametrize(
    ("sets", "key", "allowed"),
    [
        (("parallel.zero=2",), "parallel.zero", "0, 1"),
        (("optimizer.offload=0.5",), "optimizer.offload", "0"),
        (("optimizer.name=adamw", "optimizer.ns_steps=4"), "optimizer.ns_steps", "with muon alone"),
    ],
)
def test_what_muon_is_not_said_for_is_refused(tmp_path: Path, sets: tuple[str, ...], key: str, allowed: str) -> None:
    with pytest.raises(PiperError) as e:
        judged(tmp_path, *MUON, *sets)
    assert (e.value.kind, e.value.key, e.value.allowed) == (ErrorKind.JOB, key, allowed)


@pytest.mark.parametrize("sets", TP, ids=lambda x: " ".join(s.split("=")[1] for s in x))
def test_matrices_that_ranks_share_are_updated_as_whole_ones(sets: tuple[str, ...]) -> None:
    one = alone(*sets, *MUON, steps=3)
    whole = run(*sets, *MUON, "optimizer.tp_mode=duplicated", steps=3, backend="local")
    assert error(whole, one) <= ROUNDING


def test_ranks_that_share_matrices_save_what_one_process_would_and_race_for_nothing(tmp_path: Path) -> None:
    sets = (*TP[1], *MUON, "optimizer.tp_mode=distributed")
    whole = run(*sets, steps=3)
    first = run(*sets, steps=2, saving=CheckpointOptions(save=str(tmp_path)))
    again = run(*sets, steps=3, saving=CheckpointOptions(resume=first.object["saved"]))
    assert again.object["losses"] == whole.object["losses"][2:]
    assert distance(merged(again.params), merged(whole.params)) == 0.0
    watched = run(*sets, steps=2, backend="local", racecheck=True).object
    assert watched["races"] == [] and watched["losses"] == pytest.approx(first.object["losses"], rel=1e-12)


class Pair(RankAxis):
    """Two ranks of an axis, in two threads."""

    def __init__(self) -> None:
        super().__init__(2)
        self.barrier, self.given = threading.Barrier(2), dict[int, torch.Tensor]()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        self.given[threading.get_ident()] = x.clone()
        self.barrier.wait()
        total = sum(self.given.values(), torch.zeros_like(x))
        self.barrier.wait()
        return total


@pytest.mark.parametrize("shape", [(64, 64), (32, 128), (128, 32)])
@pytest.mark.parametrize("apart", [False, True])
def test_together_ranks_come_as_near_to_the_exact_step_as_one(shape: tuple[int, int], apart: bool) -> None:
    """Newton-Schulz in float64 is the measure. apart: the control, ranks that do not sum."""
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=torch.float64)
    exact, (a, b, c) = matrix / matrix.norm(), muon.COEFFICIENTS
    for _ in range(5):
        gram = exact @ exact.T
        exact = a * exact + (b * gram + c * gram @ gram) @ exact
    axis = RankAxis(2) if apart else Pair()
    with ThreadPoolExecutor(2) as pool:
        parts = [pool.submit(muon.orthogonalised, part, 5, axis) for part in matrix.chunk(2, 1)]
    together, alone_ = torch.cat([p.result() for p in parts], 1), muon.orthogonalised(matrix, 5)
    far = [float((x.double() - exact).norm() / exact.norm()) for x in (together, alone_)]
    assert far[1] < 0.02 and (far[0] < 0.03) is not apart


def _large(step: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """A step along a gradient's large singular directions: what bf16 rounds decides the small ones."""
    u, sizes, v = torch.linalg.svd(grad)
    k = int((sizes > 0.1 * sizes[0]).sum())
    return u[:, :k].T @ step @ v[:k].T


@pytest.mark.parametrize("mode", ["blockwise", "duplicated", "distributed"])
def test_a_step_is_that_of_what_its_mode_says(mode: str) -> None:
    """torch's Muon of each rank's block, or of the whole; together within what bf16 rounds."""
    sets = ("parallel.tp=2", "parallel.pp=1", *MUON, "optimizer.clip_norm=0", f"optimizer.tp_mode={mode}")
    start = run(*sets, "optimizer.lr=1e-30", steps=1, backend="local").params
    ran, off = run(*sets, steps=1, backend="local"), dict[str, list[float]]()
    both = [start, ran.first, ran.params]
    for named in zip(*both, strict=True) if mode == "blockwise" else [[merged(x) for x in both]]:
        for name in (n for n in named[0] if "_proj" in n):
            before, grad, after = (torch.from_numpy(x[name]) for x in named)
            here = ~before.isnan()  # a rank has rows of it, or columns
            shape = int(here.any(1).sum()), int(here.any(0).sum())
            before, grad, after = (x[here].view(shape) for x in (before, grad, after))
            p = torch.nn.Parameter(before.clone())
            p.grad = grad.clone()
            torch.optim.Muon([p], lr=0.02, weight_decay=0.1).step()
            want, got = (_large(x.detach() - before, grad) for x in (p, after))
            off.setdefault(name.split(".")[-2], []).append(float((want - got).norm() / want.norm()))
    assert len(off) == 7
    assert np.max([*off.values()]) <= (0.05 if mode == "distributed" else 1e-12), off
