"""The fixed schedules against the PyTorch that is installed."""

from functools import cache
from importlib import import_module
from itertools import product
from typing import Any
from unittest import mock

import pytest

from ir.schedules.registry import build
from ir.schedules.schedule import Schedule


def texts(schedule: Schedule) -> list[list[str]]:
    return [order.cells() for order in schedule.orders]


@pytest.fixture(scope="module")
def torch_schedules() -> Any:
    return import_module("torch.distributed.pipelining.schedules")


@cache  # a mock costs 20 ms
def blank_stage() -> Any:
    from torch.distributed.pipelining.stage import PipelineStage

    return mock.create_autospec(PipelineStage, instance=True)


def mocked_stage(stages: int, ranks: int, index: int = 0) -> Any:
    stage = blank_stage()
    stage.group_rank, stage.group_size, stage.submod = index, ranks, None
    stage.num_stages, stage.stage_index = stages, index
    return stage


def torch_order(module: Any, name: str, ranks: int, mbs: int, chunks: int) -> list[list[str]] | None:
    """The compute order that a multi-stage class of PyTorch makes when built; None where it refuses the shape."""
    stages = [mocked_stage(ranks * chunks, ranks)] * chunks
    # Only the compute order is compared; lowering it to sends and receives takes most of the time.
    with mock.patch.object(module._PipelineScheduleRuntime, "_prepare_schedule_with_comms"):
        try:
            made = module.get_schedule_class(name)(stages, mbs)
        except ValueError:
            return None
    return [[str(a) for a in made.pipeline_order[r] if a is not None] for r in range(ranks)]


MULTI = [
    ("interleaved-1f1b", "Interleaved1F1B", (2, 3, 4), 117),
    ("looped-bfs", "LoopedBFS", (2, 3), 128),
    ("zb1p", "InterleavedZeroBubble", (1, 2, 3, 4), 176),
    ("zbv", "ZBVZeroBubble", (2,), 64),
    ("dualpipev", "DualPipeV", (2,), 30),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("ours", "theirs", "chunks", "least"), MULTI, ids=[row[0] for row in MULTI])
def test_orders_are_pytorch_s_wherever_it_accepts_the_shape(
    torch_schedules: Any, ours: str, theirs: str, chunks: tuple[int, ...], least: int
) -> None:
    compared = 0
    for p, v, m in product(range(1, 9), chunks, (1, 2, 3, 5, 8, 12, 16, 20)):
        expected = torch_order(torch_schedules, theirs, p, m, v)
        if expected is not None:
            assert texts(build(ours, p, m, v)) == expected, (p, m, v)
            compared += 1
    assert compared >= least


def torch_runtime_order(made: Any, rank: int, mbs: int) -> list[str]:
    """What a single-stage class of PyTorch really runs: its step, on a stage that only takes notes."""
    log: list[str] = []
    stage = made._stage
    for ops in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage, ops).return_value = []
    stage.forward_one_chunk.side_effect = lambda mb, *_, **__: log.append(f"{rank}F{mb}")
    stage.backward_one_chunk.side_effect = lambda mb, *_, **__: log.append(f"{rank}B{mb}")
    inputs = [()] * mbs, [{}] * mbs
    made._check_inputs = lambda *_: inputs
    for name in ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
        setattr(made, name, lambda *_, **__: None)
    made._step_microbatches(*inputs)
    return log


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("ours", "theirs"), [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")])
def test_single_stage_orders_are_what_pytorch_s_runtime_runs(torch_schedules: Any, ours: str, theirs: str) -> None:
    for p, m in product(range(1, 9), (1, 2, 3, 5, 8, 12)):
        if ours == "1f1b" and m < p:
            continue  # PyTorch refuses
        for r, expected in enumerate(texts(build(ours, p, m))):
            made = getattr(torch_schedules, theirs)(mocked_stage(p, p, r), m)
            assert torch_runtime_order(made, r, m) == expected, (p, m, r)


@pytest.mark.filterwarnings("ignore")
def test_pytorch_s_printed_1f1b_differs_on_its_last_rank_only(torch_schedules: Any) -> None:
    for p, m in ((2, 4), (4, 8), (5, 7)):
        printed = torch_schedules.Schedule1F1B(mocked_stage(p, p), m)._get_pipeline_order()
        rows = [[str(a) for a in printed[r] if a is not None and "REDUCE" not in str(a)] for r in range(p)]
        ours = texts(build("1f1b", p, m))
        assert rows[:-1] == ours[:-1]
        assert rows[-1] != ours[-1]
