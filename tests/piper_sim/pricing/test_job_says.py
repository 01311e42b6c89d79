"""What `[costs]` says of a framework's kernels goes before its software file."""

import pytest

from cost_models import kernel_seconds
from cost_models.compute.host import HostCosts
from cost_models.hardware import DeviceHardware
from ir.core.work import DType, Kernel, KernelKind
from ir.job.load import job_from
from ir.workload.part import PartWork
from piper_sim.pricing.prepare import hardware_of, prepare_priced
from piper_sim.study.predict import predict
from tests.refusals import refusal

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


@pytest.mark.parametrize(("software", "us"), [(None, 5.0), ("transformers", 42.0)])
def test_a_grace_launches_more_slowly_whoever_launches(software: str | None, us: float) -> None:
    """transformers' are timed on x86; TransformerEngine#2053: torch's Linear takes 37.1 us there, on x86 13.5."""
    found = [HostCosts.of(hardware(gpu, software=software)) for gpu in ("b200-sxm", "gb200-nvl72", "gb300-nvl72")]
    x86, grace, other = (1e6 * x.launch for x in found)
    assert x86 == pytest.approx(us) and grace == other == pytest.approx(us * 37.1 / 13.5, rel=0.02)
    small = {
        "model": {"config": "gpt2", "seq_len": 64},
        "schedule": {"microbatches": 8},
        "costs": {"software": software},
    }
    steps = {}
    for gpu in ("b200-sxm", "gb200-nvl72"):
        cluster = {"gpu": gpu, "nodes": 1, "gpus_per_node": 1}
        steps[gpu] = predict(job_from({**small, "cluster": cluster})).iteration_s
    assert 1.8 < steps["gb200-nvl72"] / steps["b200-sxm"] < 2.8


def test_a_host_that_a_job_describes_goes_before_the_framework_s() -> None:
    for software in (None, "transformers", "megatron-core"):
        table = {"model": {"config": "tiny-llama"}, "costs": {"software": software}}
        own = job_from({**table, "cluster": {"gpu": "h100-sxm", "host_launch_us": 17}})
        assert 1e6 * HostCosts.of(hardware_of(own)).launch == pytest.approx(17)
    assert 1e6 * HostCosts.of(hardware(software="megatron-core")).launch == pytest.approx(90)


EXPERTS = {
    "model": {"config": "qwen3-30b-a3b", "seq_len": 4096, "num_hidden_layers": 2},
    "cluster": {"gpu": "gb300-nvl72", "nodes": 2},
    "parallel": {"ep": 8},
    "precision": {"compute": "fp8"},
}


def test_fused_experts_make_their_activation_in_forward() -> None:
    def work(fused: bool) -> tuple[DeviceHardware, PartWork]:
        job = job_from({**EXPERTS, "costs": {"fused_experts": fused}})
        hw = hardware_of(job)
        graph = prepare_priced(job, hw).plan().graph
        return hw, graph.source.work(next(e for e in graph.entries if e.part.name == "experts"))

    (plain, apart), (hw, fused) = work(False), work(True)
    assert [k.label for k in apart.forward if k not in fused.forward] == ["swiglu"]
    assert (fused.input_grad, fused.weight_grad, fused.saved) == (apart.input_grad, apart.weight_grad, apart.saved)
    for k in (*fused.forward, *fused.input_grad, *fused.weight_grad):
        own, other = kernel_seconds(k, hw), kernel_seconds(k, plain)
        assert own < other if k.kind is KernelKind.GROUPED_GEMM else own == other
    steps = [predict(job_from({**EXPERTS, "costs": {"fused_experts": x}})).iteration_s for x in (False, True)]
    assert 0.95 < steps[1] / steps[0] < 0.998


@pytest.mark.parametrize(
    ("sets", "of"),
    [
        (("precision.compute=bf16",), "products in bf16"),
        (("cluster.gpu=h100-sxm",), "the fp8 recipe blocks"),
        (("cluster.gpu=h100-sxm", "cluster.fp8_recipe=mxfp8"), "h100-sxm"),
        (("costs.grouped_gemm=false",), "experts one after the other"),
    ],
)
def test_no_experts_are_fused_where_no_such_kernel_is_known(sets: tuple[str, ...], of: str) -> None:
    job = job_from(EXPERTS, ["costs.fused_experts=true", *sets])
    assert refusal(predict, job, match=of).suggestion == "leave costs.fused_experts out"


def test_a_model_without_experts_fuses_none() -> None:
    table = {**EXPERTS, "model": {"config": "llama3-8b"}, "parallel": {}}
    job = job_from(table, ["costs.fused_experts=true"])
    assert refusal(predict, job, match="without experts").key == "costs.fused_experts"


def test_sms_that_a_job_gives_an_all_to_all_are_the_dispatcher_s() -> None:
    table = {**EXPERTS, "costs": {"dispatcher": "hybridep"}}
    own, more = (hardware_of(job_from(table, x)).comm_sms for x in ((), ("cluster.comm_sms.all_to_all=32",)))
    assert (own["all_to_all"], more["all_to_all"]) == (16, 32) and own["collective"] == more["collective"]
