"""Keys and values that go around a ring: what attention's pieces hide, and what the ring costs."""

import pytest

from cost_models.compute.roofline import kernel_seconds
from cost_models.hardware import load_hardware
from ir.core.work import DType, Kernel, KernelKind
from ir.job.load import job_from
from piper_sim.pricing.cp_ring import around_ring
from piper_sim.study.predict import predict

HARDWARE = load_hardware("h100-sxm").in_training()
LONG = 131072


def attention(keys: int) -> Kernel:
    flops = 2 * 32 * 4096 * keys * 256
    return Kernel(KernelKind.ATTENTION, flops, 2 * 32 * 128 * (4096 + keys), DType.BF16, (1, 32, 4096, keys, 128, 128))


def step(software: str, keys: int = LONG, **parallel: object) -> dict[str, float]:
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
    ring, gathered = step("nemo"), step("generic")
    assert ring["exposed_cp"] < 0.01 * gathered["exposed_cp"]
    assert 1 < ring["compute"] / gathered["compute"] < 1.15
    # Negative control: heads that are exchanged do not go around it.
    assert step("nemo", cp_comm="all_to_all")["exposed_cp"] == step("generic", cp_comm="all_to_all")["exposed_cp"] > 0
