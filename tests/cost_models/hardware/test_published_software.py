"""Software files: strict, few constants, each with a source; what each constant does to seconds and bytes."""

import json

import msgspec
import pytest

from cost_models import OptimizerPrecision, kernel_seconds, load_hardware, state_bytes
from cost_models.compute.host import HostCosts
from cost_models.compute.optimizer import accumulate
from cost_models.software import MOST, FrameworkCosts, frameworks, load_software, read
from ir.core.errors import PiperError
from ir.core.work import DType, Kernel, KernelKind
from ir.workload.setting import KernelStyle, TokenLossKind

H100 = load_hardware("h100-sxm")
GEMM = Kernel(KernelKind.GEMM, 2 * 4096**3, 6 * 4096**2, DType.BF16, (4096, 4096, 4096))
NORM = Kernel(KernelKind.MEMORY, 0, 10**9, DType.BF16)
FLASH = Kernel(KernelKind.ATTENTION, 32 * 4096**2 * 256, 10**8, DType.BF16, (1, 32, 4096, 4096, 128, 128), "attention")


def seconds(kernel, **constants):
    return kernel_seconds(kernel, msgspec.structs.replace(H100, software=FrameworkCosts(**constants)))


@pytest.mark.parametrize("name", frameworks())
def test_a_file_has_few_constants_each_with_its_source(name):
    software = load_software(name)
    assert software.name == name
    assert len(software.sources) <= MOST
    assert all(len(text) > 20 for text in software.sources.values())


@pytest.mark.parametrize(
    "raw, key",
    [
        ({"name": "x", "speed": 2, "sources": {"speed": "?"}}, "speed"),
        ({"name": "x", "traffic": 2, "sources": {}}, "sources.traffic"),
        ({"name": "x", "traffic": 9, "sources": {"traffic": "?"}}, "traffic"),
        ({"name": "x", "traffic": float("nan"), "sources": {"traffic": "?"}}, "traffic"),
    ],
)
def test_a_doubtful_file_is_refused(tmp_path, raw, key):
    file = tmp_path / "x.json"
    file.write_text(json.dumps(raw))
    with pytest.raises(PiperError) as e:
        read(file)
    assert e.value.key == key


def test_more_than_eight_constants_are_refused(tmp_path):
    constants = {
        "traffic": 1.1,
        "portable_attention": True,
        "attention": 1.2,
        "launch_us": 9,
        "turn_us": 9,
        "eager": True,
        "grad_copy_bytes": 2,
        "loss": "plain",
        "tp_overlap": True,
    }
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"name": "x", **constants, "sources": dict.fromkeys(constants, "?")}))
    with pytest.raises(PiperError, match="9 constants"):
        read(file)
    smaller = dict(list(constants.items())[:MOST])
    file.write_text(json.dumps({"name": "x", **smaller, "sources": dict.fromkeys(smaller, "?")}))
    assert load_software(str(file)).launch_us == 9
    file.write_text(json.dumps({"name": "x", "lunch_us": 9, "sources": {}}))
    with pytest.raises(PiperError) as unknown:
        load_software(str(file))
    assert unknown.value.key == "lunch_us" and unknown.value.suggestion == "launch_us"


def test_no_framework_changes_nothing():
    assert load_software(None) == load_software("generic") == FrameworkCosts() == H100.software
    assert kernel_seconds(GEMM, H100) == seconds(GEMM)


def test_traffic_is_of_memory_bound_kernels():
    assert seconds(NORM, traffic=1.5) == pytest.approx(1.5 * seconds(NORM), rel=0.01)
    assert seconds(GEMM, traffic=1.5) == seconds(GEMM)


def test_attention_slows_attention():
    portable = seconds(FLASH, portable_attention=True)
    assert portable == pytest.approx(seconds(FLASH) / H100.attention.portable, rel=0.05)
    assert seconds(FLASH, portable_attention=True, attention=2.0) == pytest.approx(2 * portable, rel=0.05)
    assert seconds(GEMM, attention=2.0) == seconds(GEMM)


def test_the_host_takes_the_framework_s_launch():
    hw = msgspec.structs.replace(H100, software=FrameworkCosts(launch_us=100, turn_us=700))
    costs = HostCosts.of(hw)
    assert (round(1e6 * costs.launch), round(1e6 * costs.turn)) == (100, 700)


def test_gradients_kept_twice_are_never_sharded():
    one, two = OptimizerPrecision(), OptimizerPrecision(grad_copy=2)
    assert state_bytes(1000, two, 8, 8, 8).total - state_bytes(1000, one, 8, 8, 8).total == 2000
    assert state_bytes(1000, two, alone=True) == state_bytes(1000, one), "nobody to reduce them with"


def test_accumulating_moves_every_weight_gradient():
    grouped = Kernel(KernelKind.GROUPED_GEMM, 0, 0, DType.BF16, (4, 8, 16, 32))
    moved = [k.bytes for k in accumulate((GEMM, NORM, grouped), OptimizerPrecision(grad_copy=2))]
    assert moved == [12 * 4096**2, 12 * 4 * 8 * 16]
    assert accumulate((GEMM, NORM, grouped), OptimizerPrecision()) == []


def test_gradients_that_are_cast_apart_are_written_and_read_once_more():
    """DeepSpeed's bf16: 2 read and 4 written, then 8 read and 4 written."""
    apart = OptimizerPrecision(grad_copy=2, cast_apart=True)
    assert [k.bytes for k in accumulate((GEMM,), apart)] == [18 * 4096**2]
    fp16 = OptimizerPrecision(grads=DType.FP16, grad_copy=2, cast_apart=True)
    assert [k.bytes for k in accumulate((GEMM,), fp16)] == [6 * 4096**2], "nothing to cast"


def test_gradients_in_the_format_of_their_sums_are_added_where_these_are():
    """Autograd's own sums in fp16: two read, one written, and nothing kept beside them."""
    once = OptimizerPrecision(grads=DType.FP16, grad_copy=2)
    assert [k.bytes for k in accumulate((GEMM,), once)] == [6 * 4096**2]
    assert state_bytes(1000, once, 8) == state_bytes(1000, OptimizerPrecision(grads=DType.FP16), 8)


def test_the_loss_is_listed_as_it_runs():
    loss = msgspec.structs.replace(H100, software=FrameworkCosts(traffic=2.0))
    kernel = Kernel(KernelKind.MEMORY, 0, 10**9, DType.BF16, label="loss.softmax")
    assert kernel_seconds(kernel, loss) == kernel_seconds(kernel, H100)


@pytest.mark.parametrize(
    ("constants", "style"),
    [
        ({}, KernelStyle(TokenLossKind.PARALLEL)),
        ({"eager": True}, KernelStyle(TokenLossKind.PLAIN, eager=True)),
        ({"eager": True, "loss": "fused"}, KernelStyle(TokenLossKind.FUSED, eager=True)),
        ({"loss": "returned", "masked": True}, KernelStyle(TokenLossKind.RETURNED, masked=True)),
        ({"keep_gathered": True}, KernelStyle(TokenLossKind.PARALLEL, keep_gathered=True)),
    ],
)
def test_a_framework_has_a_style(constants, style):
    assert FrameworkCosts(**constants).style == style


def test_an_unknown_loss_is_refused(tmp_path):
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"name": "x", "loss": "fuse", "sources": {"loss": "?"}}))
    with pytest.raises(PiperError, match="loss"):
        read(file)


def test_a_hardware_file_has_no_software(tmp_path):
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps({"base": "h100-sxm", "software": {"name": "x"}}))
    with pytest.raises(PiperError, match="unknown key"):
        load_hardware(str(file))


def test_libraries_keep_a_workspace_for_every_stream():
    core = msgspec.structs.replace(H100, software=load_software("megatron-core"))
    one, experts, overlapped = (core.library_bytes(*x) / 2**20 for x in ((False, False), (True, False), (False, True)))
    assert (one, experts - one, overlapped - one) == (76 + 32, 4 * 32, 3 * 32)
    assert H100.library_bytes(experts=True, overlapped=True) == 0, "no framework, no libraries of its own"
