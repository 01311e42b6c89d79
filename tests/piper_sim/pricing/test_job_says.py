"""What `[costs]` says of a framework's kernels goes before its software file."""

import pytest

from cost_models import kernel_seconds
from cost_models.hardware import DeviceHardware
from ir.core.work import DType, Kernel, KernelKind
from ir.job.load import job_from
from piper_sim.pricing.prepare import hardware_of
from piper_sim.study.predict import predict

NORM = Kernel(KernelKind.MEMORY, 0, 2**20, DType.BF16, count=4)
FLASH = Kernel(KernelKind.ATTENTION, 2 * 32 * 8192**2 * 128, 2**28, DType.BF16, (1, 32, 8192, 8192, 128, 128))


def hardware(gpu: str = "h100-sxm", **costs: object) -> DeviceHardware:
    return hardware_of(job_from({"model": {"config": "tiny-llama"}, "cluster": {"gpu": gpu}, "costs": costs}))


@pytest.mark.parametrize("software", ["torchtitan", "megatron-core"])
def test_attention_s_kernels_are_the_job_s_choice(software: str) -> None:
    own, portable = (hardware(software=software, portable_attention=x) for x in (False, True))
    ratio = kernel_seconds(FLASH, portable) / kernel_seconds(FLASH, own)
    assert ratio == pytest.approx(1 / own.attention.portable, rel=0.02)
    # Left out, the framework's: FlashAttention 2 of torchtitan's runs, Transformer Engine's of Megatron-Core's.
    assert hardware(software=software) == (portable if software == "torchtitan" else own)


@pytest.mark.parametrize(("software", "divided"), [("torchtitan", True), ("transformers", False)])
def test_whole_logits_are_the_job_s_choice(software: str, divided: bool) -> None:
    def said(**costs: object) -> tuple[float, int]:
        table = {"model": {"config": "llama3-8b", "num_hidden_layers": 2, "seq_len": 4096}, "parallel": {"tp": 2}}
        table |= {"cluster": {"gpu": "h100-sxm"}, "costs": {"software": software, **costs}}
        found = predict(job_from(table)).to_dict()
        return found["iteration_s"], found["memory"]["device_peak_bytes"]["0"]

    own, other = said(loss_parallel=True), said(loss_parallel=False)
    assert other[0] > own[0] and other[1] > own[1]
    assert said() == (own if divided else other)


def test_where_flash_attention_2_is_the_gpu_s_own_nothing_changes() -> None:
    seconds = {kernel_seconds(FLASH, hardware("a100-sxm-80gb", portable_attention=x)) for x in (False, True)}
    assert len(seconds) == 1


def test_a_launch_that_waits_adds_the_host_s_time() -> None:
    ahead, blocking = (hardware(software="megatron-deepspeed", blocking_launches=x) for x in (False, True))
    host = 1e-6 * ahead.software.dispatch_us
    short, long = kernel_seconds(NORM, ahead), kernel_seconds(FLASH, ahead)
    assert short == pytest.approx(4 * host)  # the host is what such a kernel waits for
    assert 4 * host < kernel_seconds(NORM, blocking) < 1.1 * 4 * host
    assert kernel_seconds(FLASH, blocking) == pytest.approx(long + host)
    # A framework that says nothing of its host: the hardware file's launch.
    own = hardware(blocking_launches=True)
    assert kernel_seconds(FLASH, own) == pytest.approx(kernel_seconds(FLASH, hardware()) + 1e-6 * own.host_launch_us)


def test_a_step_of_blocking_launches_is_longer_by_them() -> None:
    table = {
        "model": {"config": "gpt3-175b", "n_layer": 2, "attention": "unfused", "seq_len": 2048},
        "parallel": {"tp": 8},
    }
    table |= {"cluster": {"gpu": "a100-sxm-80gb", "nodes": 1}, "schedule": {"microbatches": 4}}
    costs = {"software": "megatron-deepspeed"}
    steps = [predict(job_from({**table, "costs": {**costs, "blocking_launches": x}})) for x in (False, True)]
    more = [p.to_dict()["time_breakdown"]["0"] for p in steps]
    assert 1.02 < more[1]["compute"] / more[0]["compute"] < 1.3
    assert more[1]["exposed_tp"] > more[0]["exposed_tp"]
