"""Kernels against published per-op times that the hardware files are fitted to."""

import csv
from pathlib import Path
from statistics import median

import pytest

from cost_models import LinkFabric, kernel_seconds, load_hardware, message_seconds
from ir.core.work import DType, Kernel, KernelKind, Message, MessageKind

OPS = Path(__file__).parents[3] / "experiments" / "published" / "data" / "b200_ops.csv"
B200 = load_hardware("b200-sxm").in_training()


def errors(op):
    out = []
    for row in csv.DictReader(x for x in OPS.read_text().splitlines() if not x.startswith("#")):
        groups, m, n, k = (int(row[c]) for c in ("groups", "m", "n", "k"))
        if row["op"] != op:
            continue
        result = 8 if op == "weight_grad" else 2  # fp32, read and written; or bf16
        moved = groups * (2 * (m * k + n * k) + result * m * n)
        kind, shape = (KernelKind.GEMM, (m, n, k)) if groups == 1 else (KernelKind.GROUPED_GEMM, (groups, m, n, k))
        kernel = Kernel(kind, 2 * groups * m * n * k, moved, DType.BF16, shape)
        out.append(kernel_seconds(kernel, B200) * float(row["share"]) * 2250e12 / kernel.flops - 1)
    return out


@pytest.mark.parametrize("op", ["forward", "input_grad", "weight_grad"])
def test_products_on_b200(op):
    found = errors(op)
    assert len(found) == 25
    assert abs(median(found)) < 0.05, "no bias"
    assert median(abs(e) for e in found) < 0.07
    assert max(abs(e) for e in found) < 0.55  # a few ran at a clock that the others did not reach


@pytest.mark.parametrize("heads, seq, forward, backward", [(64, 4096, 0.8351, 0.7252), (16, 32768, 1.1654, 0.8717)])
def test_attention_on_b200(heads, seq, forward, backward):
    for share, products, label in ((forward, 1.0, "attention"), (backward, 2.5, "attention_backward")):
        flops = int(products * heads * seq * seq * 256)  # the causal half; the share counts the whole square
        kernel = Kernel(KernelKind.ATTENTION, flops, 0, DType.BF16, (1, heads, seq, seq, 128, 128), label)
        assert abs(kernel_seconds(kernel, B200) * share * 2250e12 / (2 * flops) - 1) < 0.08


def test_selective_recompute_costs_what_korthikanti_measured():
    """Table 4: 13.2 - 11.9 ms, each rounded to a tenth, for scores, softmax and dropout of 8 heads of 96."""
    a100 = load_hardware("a100-sxm-80gb").in_training()
    n = 4 * 8 * 2048 * 2048
    scores = Kernel(KernelKind.GROUPED_GEMM, 2 * n * 96, 2 * (32 * 2 * 2048 * 96 + n), DType.FP16, (32, 2048, 2048, 96))
    rest = [Kernel(KernelKind.MEMORY, 0, b * n, DType.FP16) for b in (4, 5)]
    assert 1e3 * sum(kernel_seconds(k, a100) for k in (scores, *rest)) == pytest.approx(1.3, abs=0.25)


def test_rings_slow_down_over_many_nodes_and_trees_do_not():
    """The playbook's network: all-gathers at 185, 119, 69 and 55 GB/s on 2, 4, 8 and 16 nodes."""
    hw = load_hardware("h100-sxm", {"nic_efficiency": 0.46, "nic_congestion": 0.58})
    fabric = LinkFabric.of(hw)
    for nodes, gbps in ((2, 184.6), (4, 119.0), (8, 69.0), (16, 55.0)):
        ranks = 8 * nodes
        seconds = message_seconds(Message(MessageKind.ALL_GATHER, 2**32, ("dp",)), ranks, 8, fabric)
        assert 2**32 * (ranks - 1) / ranks / seconds / 1e9 == pytest.approx(gbps, rel=0.25)
    reduce = Message(MessageKind.ALL_REDUCE, 2**32, ("dp",))
    flat = LinkFabric.of(load_hardware("h100-sxm", {"nic_efficiency": 0.46}))
    assert message_seconds(reduce, 16, 8, fabric) == message_seconds(reduce, 16, 8, flat)
