"""What `[costs]` says of a framework's kernels goes before its software file."""

import pytest

from cost_models import kernel_seconds
from cost_models.hardware import DeviceHardware
from ir.core.work import DType, Kernel, KernelKind
from ir.job.load import job_from
from piper_sim.pricing.prepare import hardware_of

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


def test_where_flash_attention_2_is_the_gpu_s_own_nothing_changes() -> None:
    seconds = {kernel_seconds(FLASH, hardware("a100-sxm-80gb", portable_attention=x)) for x in (False, True)}
    assert len(seconds) == 1
