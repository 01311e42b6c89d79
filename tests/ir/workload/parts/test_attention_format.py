"""Attention in fp8: kernels and casts counted by hand, nothing else another; where no kernel does it, it is refused."""

from dataclasses import replace

import pytest

from cost_models import kernel_seconds, load_hardware
from ir.core.errors import ErrorKind
from ir.core.work import CAST, DType, KernelKind, Work
from ir.job import load_job
from ir.job.build import precision_of, prepare
from ir.workload import load_config, model_chunks
from ir.workload.part import PartLayout, PartWork
from ir.workload.setting import MicrobatchShape, ModelPrecision
from ir.workload.work import part_work
from piper_sim import predict
from tests.refusals import refusal

PLAIN = ModelPrecision.of(DType.FP8)
NARROW = replace(PLAIN, attention=DType.FP8)
S, B = 64, 2
NEW = ("attention.cast", "attention.cast_grad")


def of(precision: ModelPrecision, model: str, tokens: int = S) -> PartWork:
    config = load_config(model)
    chunk, part = next((c, p) for c in model_chunks(config) for p in c.parts if p.name == "attn")
    return part_work(config, chunk, part, PartLayout(), MicrobatchShape(B, tokens), precision)


def told(work: Work) -> list[object]:
    """All but what the format changes."""
    out = [k for k in work if k.label.removesuffix(CAST) not in NEW]
    return [replace(k, dtype=DType.BF16, bytes=0) if k.kind is KernelKind.ATTENTION else k for k in out]


@pytest.mark.parametrize("model", ["llama3-8b", "deepseek-v3"])
def test_what_attention_reads_is_cast_and_the_rest_stays(model: str) -> None:
    c, (wide, narrow) = load_config(model), (of(x, model) for x in (PLAIN, NARROW))
    heads, few = c.heads, c.heads if c.mla else c.kv_heads
    read, out = heads * c.qk_dim + few * (c.qk_dim + c.v_dim), heads * c.v_dim
    sums, lse = 4 * heads * c.qk_dim, 4 * heads  # of gradients of queries, read and written; of each query's sum
    expected = {
        "forward": ("cast", read * (2 + 1), read * 1 + out * 2 + lse),
        "input_grad": ("cast_grad", 2 * out * (2 + 1), (read + out) * (1 + 2) + 2 * sums + lse),
    }
    for name, (cast, added, moved) in expected.items():
        before, after = getattr(wide, name), getattr(narrow, name)
        assert told(before) == told(after)
        (kernel,), (casts,) = (
            [k for k in after if k.kind is KernelKind.ATTENTION],
            [k for k in after if k.label == f"attention.{cast}{CAST}"],
        )
        assert (kernel.dtype, kernel.bytes, casts.bytes) == (DType.FP8, S * B * moved, S * B * added)
    assert (wide.saved, wide.weight_grad, wide.model_flops) == (narrow.saved, narrow.weight_grad, narrow.model_flops)


def job(config: str = "llama3-8b", gpu: str = "gb300-nvl72", **more: object) -> dict[str, dict[str, object]]:
    """Of a model in fp8, as [section] precision and model say besides."""
    told_of = {"compute": "fp8", "attention": "fp8", **{k: v for k, v in more.items() if k in ("compute", "attention")}}
    model = {"config": config, "seq_len": 4096, **{k: v for k, v in more.items() if k == "graph"}}
    return {"model": model, "precision": told_of, "cluster": {"gpu": gpu, "nodes": 1, "gpus_per_node": 8}}


def test_it_is_quicker_where_it_was_measured_to_be() -> None:
    """Latent heads; those of 128 features win in long sequences only, as backward and the casts take back the rest."""
    lengths = {
        ("deepseek-v2-lite", 16384): (0.9, 0.96),
        ("llama3-8b", 4096): (1.0, 1.02),
        ("llama3-8b", 65536): (0.9, 0.98),
    }
    for (config, seq_len), (least, most) in lengths.items():
        length = [f"model.seq_len={seq_len}"]
        fp8, bf16 = (predict(load_job(job(config, attention=x), length)).iteration_s for x in ("fp8", "bf16"))
        assert least < fp8 / bf16 < most
        assert predict(load_job(job(config, gpu="b200-sxm"), length)).iteration_s > fp8


def test_backward_in_fp8_works_on_what_a_window_hides() -> None:
    """cuDNN 9.26 (NVIDIA/cudnn-frontend, benchmark results of gpt_oss on GB300, 2026-07-24): two sequences of 4,096
    tokens, 128 heads of 64 features, a window of 128: 1.844 ms backward in MXFP8, 0.441 in bf16.
    """
    wide, narrow = (of(x, "gpt-oss-120b", 4096) for x in (PLAIN, NARROW))
    (forward,), (backward,) = (
        [k for k in work if k.kind is KernelKind.ATTENTION] for work in (narrow.forward, narrow.input_grad)
    )
    (seen,) = [k for k in wide.input_grad if k.kind is KernelKind.ATTENTION]
    pairs, heads = 4096**2, load_config("gpt-oss-120b").heads
    assert backward.flops == B * heads * pairs * (3 + 2) * 64
    assert seen.flops == B * heads * (2 * 128 * 4096 - 128**2) * 5 * 64 and forward.flops * 5 == seen.flops * 2
    doubled = replace(backward, flops=2 * backward.flops, bytes=2 * backward.bytes)  # heads: the preset has 64
    took = kernel_seconds(doubled, load_hardware("gb300-nvl72"))
    assert took == pytest.approx(1.844e-3, 0.15)


def test_what_no_kernel_is_known_to_do_is_refused() -> None:
    for table, sets in (
        (job(compute="bf16"), ()),
        (job(attention="fp16"), ()),
        (job(), ("model.attention=unfused",)),
    ):
        e = refusal(lambda: precision_of(load_job(table, sets)), match="precision.attention")  # noqa: B023
        assert (
            e.kind is ErrorKind.JOB and e.suggestion == 'precision.attention = "bf16"' and "bf16" in (e.allowed or "")
        )
    for config in ("deepseek-v3.2", "deepseek-v4-flash"):
        e = refusal(prepare, load_job(job(config)), match="picked or compressed")
        assert e.suggestion == "leave precision.attention out"
    e = refusal(predict, load_job(job(gpu="h100-sxm")), match="h100-sxm has no attention in fp8")
    assert e.kind is ErrorKind.HARDWARE and e.key == "precision.attention"
    e = refusal(predict, load_job({**job(), "cluster": {"gpu": "gb200-nvl72", "fp8_recipe": "blocks"}}))
    assert e.suggestion == 'cluster.fp8_recipe = "mxfp8"'


def test_the_same_as_activations_says_nothing() -> None:
    given = load_job(job(attention="bf16"))
    assert precision_of(given) == precision_of(load_job({**job(), "precision": {"compute": "fp8"}}))
    assert "attention" not in repr(precision_of(given)) and "attention" in repr(precision_of(load_job(job())))


def test_the_kernel_alone_takes_the_measured_share() -> None:
    hw = load_hardware("gb300-nvl72")
    for name, measured in zip(("forward", "input_grad"), hw.attention.fp8["mxfp8"], strict=True):
        works = (getattr(of(x, "deepseek-v3", 32768), name) for x in (PLAIN, NARROW))
        wide, narrow = (kernel_seconds(k, hw) for w in works for k in w if k.kind is KernelKind.ATTENTION)
        assert wide / narrow == pytest.approx(measured, 0.02)
