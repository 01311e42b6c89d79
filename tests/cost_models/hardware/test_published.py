"""Modelled against published times. The tolerance of each table is what the first version honestly reaches."""

import json
from pathlib import Path
from typing import Any

import pytest

from cost_models import LinkFabric, kernel_seconds, load_hardware, message_seconds, work_seconds
from cost_models.links.fabric import distinct
from ir.core.work import DType, Message, MessageKind
from tests.cost_models.compute import reference_kernels as ref

TABLES: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data" / "published_costs.json").read_text())
FREE_SMS = 112  # of 132: DeepSeek's communication kernels held 20 while these were measured


def rows(table: str) -> Any:
    return TABLES[table]["rows"]


def error(modelled: float, published: float) -> float:
    return modelled / published - 1


@pytest.mark.parametrize("phase", rows("deepseek_phases_ms"))
def test_deepseek_phases_within_a_quarter(phase: str) -> None:
    work = getattr(ref, f"deepseek_{phase}")()
    modelled = work_seconds(work, load_hardware("h800-sxm").in_training(), FREE_SMS) * 1e3
    # All come out fast (2 to 24 %): in the profile, communication also takes HBM bandwidth, which is for the
    # interference model to say.
    assert -0.25 < error(modelled, rows("deepseek_phases_ms")[phase]) < 0.05


def test_deepseek_layer_within_fifteen_percent() -> None:
    table, hw = rows("deepseek_phases_ms"), load_hardware("h800-sxm").in_training()
    modelled = sum(work_seconds(getattr(ref, f"deepseek_{p}")(), hw, FREE_SMS) for p in table) * 1e3
    assert abs(error(modelled, sum(table.values()))) < 0.15


@pytest.mark.parametrize("m, n, k, us", rows("deepseek_gemms_us"))
def test_fp8_gemms_within_a_sixth(m: int, n: int, k: int, us: float) -> None:
    modelled = kernel_seconds(ref.gemm(m, n, k, DType.FP8), load_hardware("h800-sxm").in_training(), FREE_SMS) * 1e6
    assert abs(error(modelled, us)) < 0.17


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_deepseek_attention_within_fifteen_percent(which: str) -> None:
    kernel = ref.flash(1, ref.HEADS, ref.T, ref.QK, ref.V, backward=which == "backward")
    modelled = kernel_seconds(kernel, load_hardware("h800-sxm").in_training(), FREE_SMS) * 1e6
    assert abs(error(modelled, rows("deepseek_attention_us")[which])) < 0.15


@pytest.mark.parametrize("tokens, hidden, layers, ms", rows("zero_bubble_weight_grad_ms"))
def test_a100_weight_gradients_within_five_percent(tokens: int, hidden: int, layers: int, ms: float) -> None:
    modelled = (
        work_seconds(ref.gpt_weight_grads(tokens, hidden, layers), load_hardware("a100-sxm-80gb").in_training()) * 1e3
    )
    assert abs(error(modelled, ms)) < 0.05


@pytest.mark.parametrize("row", rows("korthikanti_layer_ms"))
def test_a100_layer_with_tensor_parallelism_within_ten_percent(row: dict[str, Any]) -> None:
    hw = load_hardware("a100-sxm-80gb").in_training()
    tensor = Message(MessageKind.ALL_REDUCE, 2 * 4 * 2048 * 6144, ("tp",))
    # Two all-reduces per pass; with sequence parallelism a reduce-scatter and an all-gather each, of equal bytes.
    messages = 2 * message_seconds(tensor, 8, 8, LinkFabric.of(hw))
    shape = (4, 2048, 6144, 64, 8, row["sp"])
    assert abs(error(1e3 * (work_seconds(ref.gpt_layer_forward(*shape), hw) + messages), row["forward"])) < 0.10
    assert abs(error(1e3 * (work_seconds(ref.gpt_layer_backward(*shape), hw) + messages), row["backward"])) < 0.10


@pytest.mark.parametrize("preset, kind, ranks, per_node, busbw", rows("busbw_GBps"))
def test_bus_bandwidth_within_eight_percent(preset: str, kind: str, ranks: int, per_node: int, busbw: float) -> None:
    message = Message(MessageKind(kind), 2**30, ("dp",))
    seconds = message_seconds(message, ranks, per_node, LinkFabric.of(load_hardware(preset)))
    factor = (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks
    assert (
        abs(error(message.bytes * factor / seconds / 1e9, busbw)) < 0.08
    )  # the hardware files are fitted to another table, up to 10 % below


@pytest.mark.parametrize("ranks, operation, link, gbps", rows("deepep_GBps"))
def test_token_dispatch_within_ten_percent(ranks: int, operation: str, link: str, gbps: float) -> None:
    token_bytes = 7168 * (1 + 4 / 128 if operation == "dispatch" else 2)  # fp8 with scales, or bf16
    nodes = ranks // 8
    message = Message(MessageKind.ALL_TO_ALL, int(4096 * 8 * token_bytes), ("ep",), fanout=8, nodes_limit=4)
    seconds = message_seconds(message, ranks, 8, LinkFabric.of(load_hardware("h800-sxm")))
    counted = 4096 * token_bytes * (distinct(8, 8) if link == "nvlink" else distinct(8, nodes, 4))
    assert abs(error(counted / seconds / 1e9, gbps)) < 0.10
