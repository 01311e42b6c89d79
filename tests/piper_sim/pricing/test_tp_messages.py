"""Tensor-parallel messages of backward beside the products of their linear: what is hidden, and what that costs."""

import pytest

from cost_models.compute.roofline import kernel_seconds
from cost_models.hardware import load_hardware
from ir.core.ops import Pass
from ir.core.work import DType, Kernel, KernelKind, Message, MessageKind
from ir.job.load import job_from
from piper_sim.pricing.tp_messages import beside_products, runs_beside
from piper_sim.study.predict import predict

HARDWARE = load_hardware("h100-sxm").in_training()
PRODUCT = Kernel(KernelKind.GEMM, 2 * 8192**3, 6 * 8192**2, DType.BF16, (8192, 8192, 8192))
ALONE = kernel_seconds(PRODUCT, HARDWARE)


def step(software: str, tp: int = 4) -> dict[str, float]:
    table = {
        "model": {"config": "llama3-8b", "seq_len": 8192, "num_hidden_layers": 8},
        "cluster": {"gpu": "h100-sxm", "nodes": 1, "gpus_per_node": tp},
        "parallel": {"tp": tp, "sequence_parallel": tp > 1},
        "schedule": {"microbatches": 4},
        "costs": {"software": software},
    }
    found: dict[str, float] = predict(job_from(table)).to_dict()["time_breakdown"]["0"]
    return found


def test_which_messages_no_product_waits_for() -> None:
    kinds = (MessageKind.ALL_GATHER, MessageKind.REDUCE_SCATTER, MessageKind.ALL_REDUCE)
    found = {(p, k) for p in Pass for k in kinds if runs_beside(p, Message(k, 1, ("tp",)))}
    assert found == {(Pass.I, kinds[1]), (Pass.I, kinds[2]), (Pass.W, kinds[0])}
    assert not any(runs_beside(p, Message(k, 1, ("cp",))) for p in Pass for k in kinds)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_short_message_is_hidden_and_takes_its_multiprocessors(share: float) -> None:
    slowed, exposed = beside_products((PRODUCT,), share * ALONE, HARDWARE)
    assert exposed == 0 and 0 < slowed < 0.2 * share * ALONE
    twice, _ = beside_products((PRODUCT, PRODUCT), 2 * share * ALONE, HARDWARE)
    assert twice == pytest.approx(2 * slowed)


def test_what_lasts_longer_than_the_products_is_exposed() -> None:
    slowed, exposed = beside_products((PRODUCT,), 3 * ALONE, HARDWARE)
    assert exposed + slowed == pytest.approx(2 * ALONE)
    assert beside_products((), ALONE, HARDWARE) == (0.0, ALONE)


def test_six_of_ten_messages_of_a_layer_stay_exposed() -> None:
    """Forward's four, and the gathers of gradients behind the two row-parallel linears; the control exposes all ten."""
    beside, serial = step("megatron-core"), step("megatron-core-serial")
    # The embedding's and the head's messages are among both.
    assert beside["exposed_tp"] == pytest.approx(0.6 * serial["exposed_tp"], rel=0.05)
    assert 0 < beside["compute"] - serial["compute"] < 0.1 * serial["compute"]
    one, other = step("megatron-core", 1), step("megatron-core-serial", 1)
    assert one == other
