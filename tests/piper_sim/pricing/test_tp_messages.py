"""Messages beside the kernels around them: of tp under the products of their linear, of cp around attention's ring."""

import pytest

from cost_models.compute.roofline import kernel_seconds
from cost_models.hardware import load_hardware
from ir.core.ops import Pass
from ir.core.work import DType, Kernel, KernelKind, Message, MessageKind
from ir.job.load import job_from
from piper_sim.pricing.cp_ring import around_ring
from piper_sim.pricing.tp_messages import beside_products, runs_beside
from piper_sim.study.predict import predict

HARDWARE = load_hardware("h100-sxm").in_training()
PRODUCT = Kernel(KernelKind.GEMM, 2 * 8192**3, 6 * 8192**2, DType.BF16, (8192, 8192, 8192))
ALONE = kernel_seconds(PRODUCT, HARDWARE)
LONG = 131072


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


def attention(keys: int) -> Kernel:
    flops = 2 * 32 * 4096 * keys * 256
    return Kernel(KernelKind.ATTENTION, flops, 2 * 32 * 128 * (4096 + keys), DType.BF16, (1, 32, 4096, keys, 128, 128))


def ring_step(software: str, keys: int = LONG, **parallel: object) -> dict[str, float]:
    table = {
        "model": {"config": "llama2-7b", "seq_len": keys, "max_position_embeddings": keys, "num_hidden_layers": 2},
        "cluster": {"gpu": "h100-sxm", "nodes": 4},
        "parallel": {"cp": 32, **parallel},
        "costs": {"software": software},
    }
    found: dict[str, float] = predict(job_from(table)).to_dict()["time_breakdown"]["0"]
    return found


def test_a_message_shorter_than_the_pieces_is_hidden_and_takes_its_multiprocessors() -> None:
    quiet, _ = around_ring((attention(LONG),), 0.0, 8, HARDWARE)
    whole = kernel_seconds(attention(LONG), HARDWARE)
    slowed, exposed = around_ring((attention(LONG),), 0.5 * whole, 8, HARDWARE)
    assert exposed == 0 and 0 < slowed - quiet < 0.03 * whole


def test_what_lasts_longer_than_all_pieces_but_the_last_is_exposed() -> None:
    whole = kernel_seconds(attention(LONG), HARDWARE)
    slowed, exposed = around_ring((attention(LONG),), 3 * whole, 8, HARDWARE)
    # (1 - 1/8) of the pieces lie beside the messages, on fewer SMs.
    assert exposed == pytest.approx(3 * whole - 7 / 8 * (whole + slowed), rel=0.01)


def test_short_pieces_cost_more_than_long_ones() -> None:
    shares = []
    for keys in (8192, LONG):
        slowed, _ = around_ring((attention(keys),), 0.0, 8, HARDWARE)
        shares.append(slowed / kernel_seconds(attention(keys), HARDWARE))
    assert shares[0] > 0.2 > 0.05 > shares[1] > 0


def test_long_sequences_hide_their_ring_where_the_framework_has_one() -> None:
    ring, gathered = ring_step("nemo"), ring_step("generic")
    assert ring["exposed_cp"] < 0.01 * gathered["exposed_cp"]
    assert 1 < ring["compute"] / gathered["compute"] < 1.15
    # Negative control: heads that are exchanged do not go around it.
    assert (
        ring_step("nemo", cp_comm="all_to_all")["exposed_cp"]
        == ring_step("generic", cp_comm="all_to_all")["exposed_cp"]
        > 0
    )
