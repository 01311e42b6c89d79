"""Timing one rank's ops: every class it computes, nothing else, whatever the schedule, ZeRO level and recomputation."""

from pathlib import Path

import msgspec
import pytest
import torch

from executor.device.device import HostDevice
from executor.measure.kernels import KernelSample, piece_samples, recipes, runner
from executor.measure.links import MessageSample, ladder, link_samples, wanted
from executor.measure.ops import host_seconds, names_of, op_samples
from ir.core.work import DType, Kernel, KernelKind, MessageKind
from ir.graph.classes import node_classes
from ir.graph.graph import PerStepOp
from ir.job.build import PreparedJob
from ir.plan.plan import Plan
from tests.executor.runs import judged

SMALL = ("model.num_hidden_layers=4", "schedule.microbatches=4", "precision.compute=fp32")
JOBS = {
    "1f1b": (),
    "two stages on a rank": ("schedule.name=zbv",),
    "both directions": ("schedule.name=dualpipe",),
    "recomputed": ("schedule.recompute=full",),
    "parts recomputed": ("schedule.recompute=['mlp']",),
    "zero 1": ("parallel.dp=2", "parallel.zero=1"),
    "zero 2": ("parallel.dp=2", "parallel.zero=2", "precision.reduce=bf16"),
    "zero 3": ("parallel.dp=2", "parallel.zero=3"),
    "experts": ("model.config=tiny-moe",),
    "half precision, no clipping": ("precision.compute=bf16", "optimizer.clip_norm=0"),
    "half precision, stream in fp32": ("precision.compute=bf16", "precision.residual=fp32"),
}


def computed(plan: Plan, program: int) -> set[str]:
    """The classes of what a program computes."""
    named = zip(plan.graph.nodes, node_classes(plan.graph), strict=True)
    return {c for n, c in named if n.message is None and program in n.groups}


@pytest.mark.parametrize("name", JOBS)
def test_every_class_that_a_rank_computes_is_timed(name: str, tmp_path: Path) -> None:
    prepared, plan = judged(tmp_path, *SMALL, *JOBS[name])
    torch.manual_seed(0)
    notes: list[str] = []
    for program, rank in ((0, 0), (1, prepared.ranks - 1)):
        found = op_samples(prepared, plan, names_of(plan), rank, HostDevice(), host_seconds, 2, notes.append)
        assert set(found) == computed(plan, program)
        assert all(s > 0 for samples in found.values() for s in samples)
        assert all(len(x) == 2 for k, x in found.items() if k.startswith(str(PerStepOp.UPDATE)))
    assert len(notes) == 2 * (3 + 2), "warm-ups are run, and not counted"


def whole(prepared: PreparedJob, plan: Plan) -> tuple[list[KernelSample], dict[str, list[float]]]:
    pieces = recipes(plan)[0]
    return pieces, piece_samples(
        prepared, list(enumerate(pieces)), torch.device("cpu"), host_seconds, 2, lambda _: None
    )


@pytest.mark.parametrize("more", [("parallel.tp=2",), ("model.config=tiny-moe", "parallel.ep=2", "parallel.dp=2")])
def test_layouts_that_no_rank_here_runs_are_timed_kernel_by_kernel(more: tuple[str, ...], tmp_path: Path) -> None:
    prepared, plan = judged(tmp_path, *SMALL, *more)
    _, which = recipes(plan)
    assert set(which) == computed(plan, 0) | computed(plan, 1)
    pieces, found = whole(prepared, plan)
    assert set(found) == {str(i) for i in range(len(pieces))} and all(len(x) == 2 for x in found.values())
    told = msgspec.json.encode(pieces)
    assert msgspec.json.decode(told, type=list[KernelSample]) == pieces, "ranks are told in JSON"
    used = {i for recipe in which.values() for i, _ in recipe}
    assert used == set(range(len(pieces))) and len(set(pieces)) == len(pieces)


def test_the_kernels_of_a_node_are_counted_as_often_as_it_has_them(tmp_path: Path) -> None:
    _, plan = judged(tmp_path, *SMALL)
    _, which = recipes(plan)
    named = zip(plan.graph.nodes, node_classes(plan.graph), strict=True)
    for n, c in named:
        if n.message is None and not n.once:
            assert sum(times for _, times in which[c]) == sum(k.count for k in n.work)


def test_a_format_that_torch_has_no_products_for_is_not_timed(tmp_path: Path) -> None:
    prepared, _ = judged(tmp_path, *SMALL)
    fp8 = KernelSample(Kernel(KernelKind.GEMM, 2 * 8**3, 0, DType.FP8, (8, 8, 8)))
    assert runner(fp8, prepared, torch.device("cpu")) is None
    assert piece_samples(prepared, [(0, fp8)], torch.device("cpu"), host_seconds, 2, lambda _: None) == {}


# -- messages ---------------------------------------------------------------------------------------------------------


def test_every_message_of_a_plan_is_asked_for_over_a_group_that_it_has(tmp_path: Path) -> None:
    prepared, plan = judged(tmp_path, *SMALL, "parallel.dp=2", "parallel.zero=1")
    wants = {(w.kind, len(w.members)): w for w in wanted(prepared, plan, 4)}
    assert wants[MessageKind.P2P, 2].members == (0, 2), "dp varies before pp"
    assert wants[MessageKind.REDUCE_SCATTER, 2].members == (0, 1) and wants[MessageKind.ALL_REDUCE, 4].members == (
        0,
        1,
        2,
        3,
    )
    sizes = {n.message.bytes for n in plan.graph.nodes if n.message and n.message.kind is MessageKind.REDUCE_SCATTER}
    assert sizes <= set(wants[MessageKind.REDUCE_SCATTER, 2].sizes)
    few = {(w.kind, len(w.members)): w.members for w in wanted(prepared, plan, 2)}
    assert few[MessageKind.P2P, 2] == (0, 1) and (MessageKind.ALL_REDUCE, 4) not in few
    assert wanted(prepared, plan, 1) == []


def test_sizes_beside_the_plans_own() -> None:
    assert set(ladder({8, 10**7})) >= {8, 2**10, 2**22, 10**7} and max(ladder({8})) == 2**22


def test_a_collective_lasts_from_the_last_to_come_to_the_last_to_see_its_end() -> None:
    want = MessageSample(MessageKind.ALL_REDUCE, (0, 2), (64,), DType.FP32)
    rows = [[(0, 64, 0, 1.0, 5.0), (0, 64, 1, 7.0, 9.0)], [], [(0, 64, 0, 2.0, 4.5), (0, 64, 1, 7.5, 9.5)]]
    assert link_samples([want], rows) == {"all_reduce 2@1 64": [3.0, 2.0]}  # type: ignore[list-item]
