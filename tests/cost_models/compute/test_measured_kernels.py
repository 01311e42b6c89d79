"""Kernels and collectives measured by themselves, a sample of the tables that the hardware files are fitted to."""

from statistics import median, quantiles

import pytest
from msgspec import structs

from cost_models import kernel_seconds, load_hardware
from cost_models.compute.optimizer import OptimizerPrecision, clip, grad_norm, update
from cost_models.compute.roofline import work_seconds
from cost_models.software import FrameworkCosts, load_software
from experiments.kernels import GPUS, attention, errors, experts, gemm, main, recurrence, seconds
from experiments.published.rows import DATA, lines
from ir.core.work import DType, Kernel, KernelKind

FOUND = errors(DATA / "kernels")
OTHER = {"a100": "h100", "h100": "b200", "h200": "b200", "b200": "h100", "gb200": "b200", "gb300": "gb200"}
SWAPPED = errors(DATA / "kernels", OTHER)
SHUFFLED = errors(DATA / "kernels", shuffle=True)


def sizes(found, kind, gpu, of):
    return [abs(e) for e in found[kind, gpu, of]]


@pytest.mark.parametrize("gpu", ["a100", "h100", "h200", "b200"])
def test_products_by_shape(gpu):
    found = sizes(FOUND, "gemm", gpu, "bf16")
    assert len(found) == 60
    assert median(found) < 0.05 and quantiles(found, n=10)[-1] < 0.16
    # Negative controls: another GPU's file, another product's time.
    assert median(sizes(SWAPPED, "gemm", gpu, "bf16")) > 0.25
    assert median(sizes(SHUFFLED, "gemm", gpu, "bf16")) > 0.5


@pytest.mark.parametrize("gpu, most", [("h100", 0.07), ("h200", 0.07), ("b200", 0.11)])
def test_products_in_fp8_with_the_casts_in_front(gpu, most):
    assert median(sizes(FOUND, "gemm", gpu, "fp8_block")) < most
    # Negative control: another GPU's file.
    assert median(sizes(SWAPPED, "gemm", gpu, "fp8_block")) > 0.25


def test_quicker_hbm_does_not_help_casts():
    rows = [x for x in lines(DATA / "kernels" / "gemm.csv") if x["gpu"] == "h200" and x["dtype"] == "fp8_block"]
    share = load_hardware("h100-sxm").cast_efficiency
    measured, control = (load_hardware("h200-sxm", over) for over in ({}, {"cast_efficiency": share}))
    assert median(abs(gemm(x, measured) / seconds(x, "gemm") - 1) for x in rows) < 0.07
    assert median(gemm(x, control) / seconds(x, "gemm") - 1 for x in rows) < -0.07


def test_updates_of_lists_of_tensors():
    """Ours: torch's fused AdamW and clip_grad_norm_ of 134 M parameters, all in one format."""
    ops = {"adamw_fused": (update,), "clip_grad_norm": (grad_norm, clip)}
    rows = [x for x in lines(DATA / "kernels" / "op_torch.csv") if x["op"] in ops and int(x["sizes"]) == 2**27]
    found, control = [], []
    for x in rows:
        of = DType(x["dtype"])
        work = tuple(make(2**27, OptimizerPrecision(params=of, grads=of, optimizer=of)) for make in ops[x["op"]])
        for errors_of, over in ((found, {}), (control, {"multi_tensor_efficiency": {"bf16": 1, "fp32": 1}})):
            took = work_seconds(work, load_hardware(f"{x['gpu']}-sxm", over))
            errors_of.append(took / (float(x["us"]) - float(x["timer_us"])) * 1e6 - 1)
    assert len(found) == 8 and max(map(abs, found)) < 0.11
    assert min(control) < -0.3


@pytest.mark.parametrize("gpu", ["a100", "h100", "b200"])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_collectives_of_a_node(gpu, kind):
    assert median(sizes(FOUND, "nccl", gpu, kind)) < 0.11
    assert median(sizes(SWAPPED, "nccl", gpu, kind)) > 0.15


@pytest.mark.parametrize("gpu", ["gb200", "gb300"])
def test_both_passes_of_attention(gpu):
    """As NVIDIA measured them, 2,048 to 32,768 tokens, grouped heads and latent ones."""
    passes = "forward", "backward"
    assert all(median(sizes(FOUND, "sdpa", gpu, of)) < 0.07 for of in passes)
    assert max(e for of in passes for e in sizes(FOUND, "sdpa", gpu, of)) < 0.2
    # Negative control: the GPU one generation older, whose attention was measured a year before.
    assert median(sizes(SWAPPED, "sdpa", gpu, "forward")) > 0.2


@pytest.mark.parametrize(
    "gpu, most", [("h200", 0.05), ("gb200", 0.05), ("gb200_graphs", 0.08), ("gb300", 0.06), ("b300", 0.03)]
)
@pytest.mark.parametrize("of", ["delta forward", "delta backward"])
def test_both_passes_of_the_gated_delta_rule(gpu, most, of):
    """As NVIDIA and Qwen measured flash-linear-attention's, 4 to 512 heads, 1,024 to 32,768 tokens; GB300 and B300 were
    not fitted. Few heads over many sequences come out a third too quick."""
    found = sizes(FOUND, "recurrence", gpu, of)
    assert median(found) < most and max(found) < (0.45 if gpu in ("h200", "gb200_graphs") else 0.12)


@pytest.mark.parametrize("gpu, most", [("gb200", 0.07), ("gb300", 0.07), ("h20", 0.04)])
def test_a_decay_for_each_feature_was_not_fitted(gpu, most):
    """Kimi delta attention by the bytes that its kernels move beside the gated delta rule's."""
    for of in ("kimi forward", "kimi backward")[: 1 if gpu == "h20" else 2]:
        assert median(sizes(FOUND, "recurrence", gpu, of)) < most and max(sizes(FOUND, "recurrence", gpu, of)) < 0.27
    # Negative control: one decay for each head.
    rows = [x for x in lines(DATA / "kernels" / "recurrence.csv") if (x["gpu"], x["kind"]) == (gpu, "kimi")]
    hw = load_hardware(GPUS[gpu])
    assert median(recurrence({**x, "kind": "delta"}, hw) / seconds(x, "recurrence") - 1 for x in rows) < -0.15


def test_mamba_s_scan_was_not_fitted():
    assert sizes(FOUND, "recurrence", "b200", "mamba forward")[0] < 0.11
    assert sizes(FOUND, "recurrence", "b200", "mamba backward")[0] < 0.02


def test_recurrences_reach_neither_the_rates_of_products_nor_all_at_once():
    """Negative controls: rates as if they were products and copies; chunks beside each other."""
    rows = [x for x in lines(DATA / "kernels" / "recurrence.csv") if x["gpu"] == "gb200"]
    for over, of, heads, most in (
        ({"backward": 1.0}, "backward", 64, -0.4),
        ({"product_ns": 0.0}, "forward", 16, -0.15),
    ):
        known = structs.asdict(load_hardware("gb200-nvl72").recurrence)
        hw = load_hardware("gb200-nvl72", {"recurrence": {**known, **over}})
        few = [x for x in rows if (x["kind"], x["pass"], int(x["heads"])) == ("delta", of, heads)]
        assert median(recurrence(x, hw) / seconds(x, "recurrence") - 1 for x in few) < most


@pytest.mark.parametrize("gpu", ["gb200", "gb300"])
@pytest.mark.parametrize("of", ["mxfp8 forward", "mxfp8 backward", "tensor forward", "tensor backward"])
def test_attention_in_fp8(gpu, of):
    """Latent heads, and those of 128 features, which gain less, the more so in short sequences."""
    rows = [
        x for x in lines(DATA / "kernels" / "sdpa_fp8.csv") if (x["gpu"], f"{x['fp8_recipe']} {x['pass']}") == (gpu, of)
    ]
    latent, narrow = ([x for x in rows if (x["qk_dim"] == "128") is narrow] for narrow in (False, True))
    hw = load_hardware(GPUS[gpu])
    found = [abs(attention(x, hw) / seconds(x, "sdpa") - 1) for x in latent]
    assert median(found) < 0.07 and max(found) < 0.21
    found = {int(x["seq_len"]): abs(attention(x, hw) / seconds(x, "sdpa") - 1) for x in narrow}
    assert all(error < (0.11 if seq_len in (4096, 8192) else 0.29) for seq_len, error in found.items())
    # Negative controls: the rates of 16 bits; one gain for all heads.
    of_bf16 = structs.replace(hw.attention, fp8={x: (1, 1) for x in ("mxfp8", "tensor")}, fp8_narrow={})
    control = structs.replace(hw, attention=of_bf16)
    assert min(attention(x, control) / seconds(x, "sdpa") - 1 for x in latent) > 0.1
    control = structs.replace(hw, attention=structs.replace(hw.attention, fp8_narrow={}))
    assert min(attention(x, control) / seconds(x, "sdpa") - 1 for x in narrow) < -0.14


def test_experts_fused_with_their_activation():
    """Newer ones make the backward activation, too (the two of 8,192 features): those come out long."""
    table = lines(DATA / "kernels" / "experts_fused.csv")
    rows = [x for x in table if x["hidden"] != "8192"]
    found = [experts(x, load_hardware(GPUS[x["gpu"]])) / seconds(x, "experts") - 1 for x in rows]
    assert len(rows) == 12 and median(map(abs, found)) < 0.05 and max(map(abs, found)) < 0.17
    newer = [experts(x, load_hardware(GPUS[x["gpu"]])) / seconds(x, "experts") - 1 for x in table if x not in rows]
    assert min(newer) > 0.1 and max(newer) < 0.43
    # Negative control: the products of experts that are not fused.
    plain = {g: load_hardware(GPUS[g]) for g in ("gb200", "gb300")}
    plain = {g: structs.replace(hw, gemm=structs.replace(hw.gemm, experts_fused=1.0)) for g, hw in plain.items()}
    assert median(experts(x, plain[x["gpu"]]) / seconds(x, "experts") - 1 for x in rows) > 0.1


def test_the_attention_of_hopper_in_training_is_below_that_of_bursts():
    """The file's is of a training profile: nothing of this table was fitted."""
    for of, most in (("forward", 0.13), ("backward", 0.17)):
        assert median(FOUND["sdpa", "h200", of]) > 0.0 and max(sizes(FOUND, "sdpa", "h200", of)) < most


def test_few_tiles_of_queries_wait_for_the_longest():
    """Of the 40 kinds of attention that we measured on Hopper, one was fitted to (512 tiles of 128 features)."""
    of = [(gpu, f"{backend} {way}") for gpu in ("h100", "h200") for backend in ("flash", "cudnn")
          for way in ("forward", "backward")]  # fmt: skip
    assert median(abs(e) for gpu, name in of for e in FOUND["sdpa", gpu, name]) < 0.10
    few = [x for x in lines(DATA / "kernels" / "sdpa_torch.csv") if x["heads"] == "8" and x["backend"] == "cudnn"]
    assert len(few) == 4 and max(abs(_sdpa(x, {}) / float(x["ms"]) - 1) for x in few) < 0.15
    control = {"attention": {"tail_waves": 0, "forward_efficiency": 0.62, "backward_efficiency": 0.48}}
    assert max(_sdpa(x, control) / float(x["ms"]) - 1 for x in few) < -0.35


def _sdpa(row: dict[str, str], over: dict[str, object]) -> float:
    """Milliseconds of a row of sdpa_torch.csv, by its GPU's file."""
    batch, heads, tokens, qk, v = (int(row[k]) for k in ("batch", "heads", "seq_len", "qk_dim", "v_dim"))
    flops = batch * heads * tokens**2 * (qk + v) * (5 if row["pass"] == "backward" else 2) // 2
    shape, label = (batch, heads, tokens, tokens, qk, v), f"attention_{row['pass']}"
    kernel = Kernel(KernelKind.ATTENTION, flops, 0, DType.BF16, shape, label)
    return 1e3 * kernel_seconds(kernel, load_hardware(GPUS[row["gpu"]], over))


@pytest.mark.parametrize("gpu", ["a100", "h200", "gb200", "gb300"])
def test_one_order_of_sums_costs_backward_what_was_measured(gpu):
    hardware = load_hardware(GPUS[gpu]).attention
    rows = [x for x in lines(DATA / "kernels" / "sdpa.csv") if x["gpu"] == gpu and x["ms_fixed"]]
    assert len(rows) >= 4
    assert median(float(x["ms"]) / float(x["ms_fixed"]) for x in rows) == pytest.approx(hardware.fixed, abs=0.02)


def test_one_order_of_sums_costs_flash_attention_2_more_than_kernels_made_for_hopper():
    attention = load_hardware("h200-sxm").attention
    assert attention.portable_fixed < attention.fixed - 0.2
    for gpu, near in (("h200", 0.02), ("h100", 0.05)):  # set by the former
        rows = [x for x in lines(DATA / "kernels" / "sdpa_torch.csv") if x["ms_fixed"] and x["gpu"] == gpu]
        assert len(rows) == 10
        lost = median(float(x["ms"]) / float(x["ms_fixed"]) for x in rows)
        assert lost == pytest.approx(attention.portable_fixed, abs=near)
    hw = structs.replace(load_hardware("h200-sxm"), software=FrameworkCosts(portable_attention=True))
    plain, fixed = (structs.replace(hw, deterministic=x) for x in (False, True))
    flash = Kernel(KernelKind.ATTENTION, 10**13, 0, DType.BF16, (1, 32, 4096, 4096, 128, 128), "attention_backward")
    assert kernel_seconds(flash, fixed) == pytest.approx(kernel_seconds(flash, plain) / 0.63, rel=0.01)
    own = structs.replace(fixed, software=FrameworkCosts())
    assert kernel_seconds(flash, own) < 0.5 * kernel_seconds(flash, fixed)


@pytest.mark.parametrize(("gpu", "short"), [("h200", -0.14), ("h100", -0.18)])
def test_products_of_a_cold_cache(gpu, short):
    """PyTorch's on one H200 and one H100, measured by ourselves; nothing was fitted to them."""
    for of, n in (("bf16_cold", 73), ("fp8_cold", 38)):
        found = FOUND["gemm", gpu, of]
        assert len(found) == n and short < median(found) < 0.0
        assert median(sizes(SWAPPED, "gemm", gpu, of)) > 0.25
    rows = [x for x in lines(DATA / "kernels" / "gemm_torch.csv") if x["gpu"] == gpu]
    large = [x for x in rows if x["dtype"] == "bf16_cold" and float(x["us"]) > 100]
    hw = load_hardware(f"{gpu}-sxm")
    assert len(large) > 15 and median(abs(gemm(x, hw) / seconds(x, "gemm") - 1) for x in large) < 0.11


def test_kernels_of_a_loss():
    """Bytes by count: as many reads as softmax takes, forward and backward, and the cast to fp32."""
    for of in ("cross_entropy", "cross_entropy_backward", "cross_entropy_fp32_backward"):
        assert median(sizes(FOUND, "op", "h200", of)) < 0.05
    assert median(FOUND["op", "h200", "cross_entropy_fp32"]) == pytest.approx(-0.16, abs=0.02)


def test_the_table_prints(capsys):
    assert main([]) == 0
    assert "gemm       h200  bf16                          60 median" in capsys.readouterr().out


def test_a_long_run_gets_what_training_is_given_of_a_burst():
    """Products and attention at the power limit for seconds: nothing was fitted to them."""
    rows = lines(DATA / "kernels" / "sustained.csv")
    off = {(x["op"], x["gpu"], x["dtype"], x["shape"]): _kept(x) / float(x["sustained_TFLOPs"]) - 1 for x in rows}
    assert len(off) == 9 and max(map(abs, off.values())) < 0.11
    assert median(abs(e) for (op, *_), e in off.items() if op == "gemm") < 0.03
    bursts = [_kept(x) / float(x["burst_TFLOPs"]) - 1 for x in rows if x["op"] == "gemm"]
    assert max(bursts) < -0.12, "and none of a burst's rate"


def _kept(row: dict[str, str]) -> float:
    """TFLOPs of a kernel in training."""
    shape = tuple(int(n) for n in row["shape"].split("x"))
    if row["op"] == "gemm":
        m, n, k = shape
        dtype, flops = DType(row["dtype"]), 2 * m * n * k
        kernel = Kernel(KernelKind.GEMM, flops, (m * k + k * n) * dtype.bytes + 2 * m * n, dtype, shape, "product")
    else:
        _, heads, q, kv, qk, v = shape
        flops = heads * q * kv * (qk + v) * (5 if row["op"] == "sdpa_backward" else 2) // 2
        label = row["op"].replace("sdpa", "attention")
        kernel = Kernel(KernelKind.ATTENTION, flops, 0, DType.BF16, shape, label)
    return flops / kernel_seconds(kernel, load_hardware(GPUS[row["gpu"]]).in_training()) / 1e12


def test_what_fsdp2_copies_takes_what_was_measured():
    said, hw = load_software("torchtitan"), load_hardware("h200-sxm")
    rows = lines(DATA / "kernels" / "fsdp_copies.csv")
    assert len(rows) == 4
    for x in rows:
        rate = said.copies if x["read_dtype"] == x["write_dtype"] else hw.cast_efficiency
        predicted = float(x["bytes"]) / (hw.hbm_bytes_per_s * hw.memory_efficiency) / rate
        assert 1e6 * predicted == pytest.approx(float(x["us"]), rel=0.05)
