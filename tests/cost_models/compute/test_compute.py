"""Kernels to seconds: limits, monotonicity, and what quantising is for."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from cost_models import kernel_seconds, load_hardware, presets, work_seconds
from cost_models.compute.roofline import aligned, arithmetic_seconds, is_backward
from cost_models.software.dispatcher import dispatchers
from ir.core.errors import ErrorKind, PiperError
from ir.core.grid import quantise
from ir.core.work import DROPOUT, WEIGHT_GRAD, DType, Kernel, KernelKind
from ir.job.build import prepare
from ir.job.load import job_from
from tests.cost_models.compute.reference_kernels import flash, gemm, grouped, moves

H100, A100, CPU = (load_hardware(x).in_training() for x in ("h100-sxm", "a100-sxm-80gb", "cpu"))
few = settings(max_examples=60, deadline=None)
sizes = st.integers(1, 20_000)


def tflops(kernel: Kernel, preset: str = "h100-sxm") -> float:
    return kernel.flops / kernel_seconds(kernel, load_hardware(preset).in_training()) / 1e12


@pytest.mark.parametrize(
    "preset, dtype, low, high",
    [
        ("h100-sxm", DType.BF16, 600, 720),
        ("h100-sxm", DType.FP8, 1180, 1420),
        ("a100-sxm-80gb", DType.BF16, 245, 271),
        ("b200-sxm", DType.BF16, 1000, 1200),  # as in training, not the best of a sweep: see the preset's sources
        ("mi300x", DType.BF16, 600, 700),
    ],
)
def test_a_large_gemm_runs_at_the_sustained_rate(preset: str, dtype: DType, low: float, high: float) -> None:
    assert low < tflops(gemm(8192, 8192, 8192, dtype), preset) < high


@pytest.mark.parametrize("kernel", [gemm(16384, 16384, 16384, DType.BF16), flash(1, 32, 65536, 128, 128)])
def test_a_lower_power_limit_slows_arithmetic_in_training_alone(kernel: Kernel) -> None:
    full, half = (load_hardware("h100-sxm", {"power_W": w, "power_exponent": 0.5}) for w in (700, 350))
    assert kernel_seconds(kernel, full.in_training()) == kernel_seconds(kernel, H100.in_training())
    slower = kernel_seconds(kernel, half.in_training()) / kernel_seconds(kernel, full.in_training())
    assert slower == pytest.approx(2**0.5, rel=0.02)
    assert kernel_seconds(kernel, half) == kernel_seconds(kernel, full), "a burst is over before the limit holds"
    assert kernel_seconds(moves(1e9), half.in_training()) == kernel_seconds(moves(1e9), full.in_training())


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP32, DType.FP64])
def test_a_huge_gemm_nears_the_asymptote(dtype: DType) -> None:
    n = 2**17
    reached = tflops(gemm(n, n, n, dtype)) / H100.peak_TFLOPs[dtype.value]
    share = H100.gemm.efficiency[dtype.value] * H100.gemm.sustained.get(dtype.value, 1.0)
    assert 0.97 * share < reached <= share


@pytest.mark.parametrize("kernel", [gemm(8, 8, 8, DType.BF16), moves(64), flash(1, 1, 16, 64, 64)])
def test_a_tiny_kernel_lasts_as_long_as_its_launch(kernel: Kernel) -> None:
    launch = H100.kernel_launch_us * 1e-6
    assert launch < kernel_seconds(kernel, H100) < launch + 3e-6


def test_a_long_copy_nears_the_memory_rate() -> None:
    assert 1e11 / kernel_seconds(moves(1e11), H100) == pytest.approx(0.82 * 3352e9, rel=1e-3)


@pytest.mark.parametrize("preset", presets())
@pytest.mark.parametrize("training", [False, True])
def test_kernels_take_the_rates_that_the_hardware_file_names(preset: str, training: bool) -> None:
    hw = load_hardware(preset)
    hw = hw.in_training() if training else hw
    g, flops, launch = hw.gemm, 10**13, hw.kernel_launch_us * 1e-6
    for dtype in (DType(d) for d in hw.peak_TFLOPs if d != "tf32"):
        rate = hw.peak_TFLOPs[dtype] * 1e12 * g.efficiency[dtype]
        busy = flops / rate
        if training:
            busy /= g.sustained.get(dtype, 1)
        elif g.burst:
            busy *= 1 + g.burst.throttle.get(dtype, 0) * busy / (busy + g.burst.throttle_us / 1e6)
        assert kernel_seconds(Kernel(KernelKind.GEMM, flops, 0, dtype), hw) == pytest.approx(busy + launch)
    hbm = hw.hbm_GBps * 1e9 * hw.memory_efficiency
    assert kernel_seconds(moves(10**6), hw) == pytest.approx((10**6 + hw.memory_ramp_KiB * 1024) / hbm + launch)
    sorting = structs.replace(hw, dispatcher=structs.replace(dispatchers()["nccl"], permute=3.0))
    for label, of, factor in (("x.fp8", hw, 1 / hw.cast_efficiency), ("permute", sorting, 3), ("norm", sorting, 1)):
        found = kernel_seconds(replace(moves(10**6), label=label), of) - launch
        assert found == pytest.approx((factor * 10**6 + hw.memory_ramp_KiB * 1024) / hbm)


def test_one_scale_per_tensor_has_a_rate_of_its_own_in_bursts_alone() -> None:
    one = gemm(512, 512, 512, DType.FP8)
    for hw, rate in ((load_hardware("h100-sxm"), 1.22), (H100, 1.0)):
        blocks, tensor = (arithmetic_seconds(one, structs.replace(hw, fp8_recipe=r)) for r in ("blocks", "tensor"))
        assert blocks / tensor == pytest.approx(rate)


@pytest.mark.parametrize("k, waves", [(8192, 1), (100_000, 3)])
def test_whole_waves_of_one_tile_take_their_products_and_a_ramp_each(k: int, waves: int) -> None:
    hw = structs.replace(H100, gemm=structs.replace(H100.gemm, tiles=((128, 256, 0.8),)))
    rate = hw.peak_flops(DType.BF16) / hw.sms * hw.gemm.efficiency["bf16"] * hw.gemm.sustained["bf16"] * 0.8
    kernel = replace(gemm(waves * 12 * 128, 11 * 256, k, DType.BF16), bytes=0)
    wanted = waves * 2 * 128 * 256 * (k + hw.gemm.ramp_bytes / 2) / rate + hw.kernel_launch_us * 1e-6
    assert kernel_seconds(kernel, hw) == pytest.approx(wanted)


def test_launches_add_up() -> None:
    once, thrice = gemm(512, 512, 512, DType.BF16), gemm(512, 512, 512, DType.BF16, count=3)
    assert kernel_seconds(thrice, H100) == pytest.approx(3 * kernel_seconds(once, H100))
    assert work_seconds((once, once, once), H100) == pytest.approx(kernel_seconds(thrice, H100))
    assert work_seconds((), H100) == 0.0


def test_one_more_row_than_a_wave_costs_another_wave() -> None:
    full, spill = (gemm(m, 11 * 128, 8192, DType.BF16) for m in (12 * 128, 12 * 128 + 1))
    assert kernel_seconds(spill, H100) > 1.05 * kernel_seconds(full, H100)


def test_splitting_k_helps_a_gemm_with_few_tiles() -> None:
    # A router: 64 tiles on 132 SMs. Without splits it could not pass half the rate of a full wave.
    assert tflops(gemm(4096, 256, 7168, DType.BF16)) > 0.5 * 0.735 * 989.4 * 64 / 132


def test_fewer_sms_are_slower_in_proportion() -> None:
    kernel = gemm(8192, 8192, 8192, DType.BF16)
    assert 1.1 < kernel_seconds(kernel, H100, 112) / kernel_seconds(kernel, H100) < 1.25
    assert kernel_seconds(moves(1e9), H100, 112) == kernel_seconds(moves(1e9), H100)
    for kind in (KernelKind.GEMM, KernelKind.ATTENTION):
        plain = Kernel(kind, 10**15, 0, DType.BF16)  # of which nobody knows the shape
        assert kernel_seconds(plain, H100, 66) == pytest.approx(2 * kernel_seconds(plain, H100), rel=1e-3)
        assert kernel_seconds(plain, H100) > 10**15 / H100.peak_flops(DType.BF16)
    slow = structs.replace(H100.in_training(), attention=structs.replace(H100.attention, sustained=0.5))
    assert kernel_seconds(plain, slow) == pytest.approx(2 * kernel_seconds(plain, H100), rel=1e-3)


def test_a_grouped_gemm_equals_one_of_equal_tiles() -> None:
    whole, parts = gemm(8192, 4096, 4096, DType.BF16), grouped(4, 2048, 4096, 4096, DType.BF16)
    assert kernel_seconds(parts, H100) == pytest.approx(kernel_seconds(whole, H100), rel=0.03)


def test_attention_forward_and_backward_are_told_apart() -> None:
    assert not is_backward(flash(1, 32, 4096, 128, 128))
    assert is_backward(flash(1, 32, 4096, 128, 128, backward=True))
    shape = (1, 2, 64, 64, 32, 32)
    full = Kernel(KernelKind.ATTENTION, 2 * 2 * 64 * 64 * 64, 0, DType.BF16, shape)
    assert not is_backward(full), "a full (not causal) square is still a forward"
    windowed = Kernel(KernelKind.ATTENTION, 100, 0, DType.BF16, shape, "attention_backward")
    assert is_backward(windowed), "the label decides where it says so"


def test_backward_attention_takes_longer_than_its_flops_alone() -> None:
    forward, backward = (flash(1, 32, 4096, 128, 128, b) for b in (False, True))
    assert kernel_seconds(backward, H100) / kernel_seconds(forward, H100) > backward.flops / forward.flops


@pytest.mark.parametrize("backward, left", [(False, 0.8), (True, 0.65)])
def test_dropout_inside_attention_leaves_the_share_of_its_rate_that_is_published(backward: bool, left: float) -> None:
    def seconds(dropout: float) -> float:
        model = {"config": "llama3-8b", "num_hidden_layers": 1, "seq_len": 32768, "attn_pdrop": dropout}
        nodes = prepare(job_from({"model": model})).graph().nodes
        found = {k for n in nodes for k in n.work if k.kind is KernelKind.ATTENTION and is_backward(k) is backward}
        return sum(kernel_seconds(k, H100) for k in found)

    assert seconds(0.0) / seconds(0.1) == pytest.approx(left, rel=0.02)


def test_few_heads_leave_sms_idle() -> None:
    one, eight = flash(1, 1, 2048, 128, 128), flash(1, 8, 2048, 128, 128)
    assert kernel_seconds(eight, H100) < 1.2 * kernel_seconds(one, H100), "16 tiles and 128 tiles both fit 132 SMs"


@given(m=sizes, n=sizes, k=sizes, axis=st.integers(0, 2), more=st.integers(1, 5000))
@few
def test_a_larger_gemm_is_never_faster(m: int, n: int, k: int, axis: int, more: int) -> None:
    """Unless it is padded to rows that are aligned, which is what one pads for."""
    sizes_of = [m, n, k]
    small = gemm(*sizes_of, DType.BF16)
    sizes_of[axis] += more
    large = gemm(*sizes_of, DType.BF16)
    padded = aligned(large) and not aligned(small)
    for hw in (A100, CPU, *([] if padded else [H100])):
        assert kernel_seconds(large, hw) >= kernel_seconds(small, hw) * (1 - 1e-12)


@given(
    batch=st.integers(1, 4), heads=st.integers(1, 64), seq=st.integers(1, 16384), more=st.integers(1, 4096),
    backward=st.booleans(),
)  # fmt: skip
@few
def test_a_longer_attention_is_never_faster(batch: int, heads: int, seq: int, more: int, backward: bool) -> None:
    small = kernel_seconds(flash(batch, heads, seq, 128, 128, backward), H100)
    assert kernel_seconds(flash(batch, heads, seq + more, 128, 128, backward), H100) >= small
    assert kernel_seconds(flash(batch, heads + 1, seq, 128, 128, backward), H100) >= small * (1 - 1e-12)


@given(
    flops=st.integers(0, 10**15), nbytes=st.integers(0, 10**11), df=st.integers(0, 10**15), db=st.integers(0, 10**11)
)
@few
def test_more_flops_or_bytes_are_never_faster(flops: int, nbytes: int, df: int, db: int) -> None:
    for kind in KernelKind:
        less = kernel_seconds(Kernel(kind, flops, nbytes, DType.BF16), H100)
        assert kernel_seconds(Kernel(kind, flops + df, nbytes + db, DType.BF16), H100) >= less > 0


@pytest.mark.parametrize("preset", presets())
def test_every_preset_prices_every_kind(preset: str) -> None:
    hw = load_hardware(preset)
    for dtype in (DType.FP64, DType.FP32, DType.BF16, DType.FP16):
        kernels = (
            gemm(64, 64, 64, dtype),
            grouped(2, 64, 64, 64, dtype),
            moves(4096, dtype=dtype),
            flash(1, 2, 64, 32, 32),
        )
        assert 0 < work_seconds(kernels, hw) < 1


def test_a_dtype_the_device_lacks_is_refused() -> None:
    with pytest.raises(PiperError, match="no fp8") as caught:
        kernel_seconds(gemm(64, 64, 64, DType.FP8), A100)
    assert caught.value.kind is ErrorKind.HARDWARE


@pytest.mark.parametrize("shape", [(64, 64), (0, 64, 64), (1, 2, 3, 4, 5)])
def test_a_shape_that_is_none_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="from 1 up"):
        kernel_seconds(Kernel(KernelKind.GEMM, 1, 1, DType.BF16, shape), H100)


def test_quantised_sums_are_exact_in_any_order() -> None:
    rng = random.Random(0)
    durations = [quantise(rng.random() * 10 ** rng.randint(-6, 0)) for _ in range(1000)]
    shuffled = rng.sample(durations, len(durations))
    assert sum(durations) == sum(shuffled) == math.fsum(durations)
    a, b, c = 0.1, 0.2, 0.3
    assert (a + b) + c != a + (b + c), "the negative control: unrounded sums do depend on order"


@given(st.floats(0, 8000, allow_nan=False))
@few
def test_quantising_moves_less_than_a_picosecond_and_is_idempotent(seconds: float) -> None:
    assert abs(quantise(seconds) - seconds) <= 2.0**-41
    assert quantise(quantise(seconds)) == quantise(seconds)


@pytest.mark.parametrize("bad", [-1e-9, math.nan, math.inf])
def test_quantise_refuses_what_is_no_duration(bad: float) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        quantise(bad)


@pytest.mark.parametrize("gpu", ["a100-sxm-80gb", "h100-sxm", "gb200-nvl72", "gb300-nvl72"])
@pytest.mark.parametrize("drops", [False, True])
def test_one_order_of_sums_slows_attentions_backward_and_leaves_what_dropout_adds(gpu: str, drops: bool) -> None:
    hw = load_hardware(gpu)
    shape = (2, 32, 16384, 16384, 128, 128)
    label = f"x{DROPOUT}" if drops else "x"

    def seconds(back: bool, fixed: bool, label: str = label) -> float:
        flops = 2 * 32 * 16384 * 16384 * 256 * (5 if back else 2) // 2
        kernel = Kernel(KernelKind.ATTENTION, flops, 0, DType.BF16, shape, label)
        return arithmetic_seconds(kernel, structs.replace(hw, deterministic=fixed))

    a = hw.attention
    other = drops and a.fixed_dropout is not None
    for back, left in ((False, 1.0), (True, a.fixed)):
        rate = a.fixed_dropout[back] if other and a.fixed_dropout else left
        added = seconds(back, False) - seconds(back, False, "x")
        assert seconds(back, True) == pytest.approx(seconds(back, False, "x") / rate + added)
        assert drops == (added > 0)
    assert gpu.startswith("g") == (a.fixed_dropout is not None)


def test_rows_that_begin_off_16_bytes_slow_a_product_down():
    """An odd vocabulary, in each of its three products; a gate of one feature is no matter of tensor cores."""
    h200 = load_hardware("h200-sxm").in_training()

    def seconds(n: int) -> list[float]:
        shapes = [((8192, n, 768), "lm_head"), ((8192, 768, n), "lm_head"), ((n, 768, 8192), f"lm_head{WEIGHT_GRAD}")]
        kernels = [Kernel(KernelKind.GEMM, 2 * math.prod(x), 0, DType.BF16, x, label) for x, label in shapes]
        return [kernel_seconds(k, h200) for k in kernels]

    for odd, even in zip(seconds(50257), seconds(50264), strict=True):
        assert odd == pytest.approx(even / h200.gemm.unaligned, rel=0.05)
    rows = Kernel(KernelKind.GEMM, 2 * 8191 * 768 * 768, 0, DType.BF16, (8191, 768, 768))
    gate = Kernel(KernelKind.GEMM, 2 * 8192 * 768, 0, DType.BF16, (8192, 1, 768))
    assert aligned(rows) and aligned(gate), "tokens are no rows' length"
