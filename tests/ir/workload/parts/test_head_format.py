"""A head in fp8: its products and casts counted by hand, its loss as before; where nothing is in fp8, it is refused."""

from dataclasses import replace

import pytest

from cost_models import kernel_seconds, load_hardware
from ir.core.work import CAST, DType, KernelKind
from ir.job import load_job
from ir.job.build import precision_of
from ir.workload import load_config, model_chunks
from ir.workload.part import PartLayout, PartWork
from ir.workload.setting import MicrobatchShape, ModelPrecision
from ir.workload.work import part_work
from piper_sim import predict
from tests.refusals import refusal

PLAIN = ModelPrecision.of(DType.FP8)
S, B = 64, 2


def of(precision: ModelPrecision, tp: int, tokens: int = S) -> PartWork:
    config = load_config("llama3-8b")
    chunk, part = next((c, p) for c in model_chunks(config) for p in c.parts if p.name == "head")
    layout = PartLayout(tp=tp, sequence_parallel=True)
    return part_work(config, chunk, part, layout, MicrobatchShape(B, tokens), precision)


@pytest.mark.parametrize("tp", [1, 2])
def test_products_are_narrow_and_what_they_read_is_cast(tp: int) -> None:
    wide, narrow = (of(x, tp) for x in (PLAIN, replace(PLAIN, head=DType.FP8)))
    c, n = load_config("llama3-8b"), S * B
    v, h = c.vocab // tp, c.hidden
    casts = {
        "forward": {"final.cast": n // tp * h * 3},  # each rank of sequence parallelism its own tokens
        "input_grad": {
            "lm_head.cast_grad": n * v * 6,
            "lm_head.transpose": n * h * 2,
            "lm_head.transpose_weight": v * h * 2,
        },
        "weight_grad": {},
    }
    moved = {"forward": (n * h + v * h) + 2 * n * v, "input_grad": (n * v + v * h) + 2 * n * h}
    moved["weight_grad"] = n * v + n * h + 8 * v * h
    for name, added in casts.items():
        before, after = getattr(wide, name), getattr(narrow, name)
        found = {k.label.removesuffix(CAST): k.bytes for k in after if k.label.endswith(CAST)}
        assert found == added
        (product,) = (k for k in after if k.kind is KernelKind.GEMM)
        assert (product.dtype, product.flops, product.bytes) == (DType.FP8, 2 * n * v * h, moved[name])
        assert [k for k in after if k.kind is KernelKind.MEMORY and not k.label.endswith(CAST)] == [
            k for k in before if k.kind is KernelKind.MEMORY
        ]
    assert (wide.saved, wide.out_bytes, wide.model_flops) == (narrow.saved, narrow.out_bytes, narrow.model_flops)
    assert narrow.stash_bytes < wide.stash_bytes  # the logits' gradient waits for W in fp8


def test_it_is_quicker_and_only_where_the_head_is() -> None:
    hw, narrow = load_hardware("gb300-nvl72"), replace(PLAIN, head=DType.FP8)
    for name in ("forward", "input_grad", "weight_grad"):
        works = (getattr(of(x, 1, 4096), name) for x in (PLAIN, narrow))
        wide, less = (sum(kernel_seconds(k, hw) for k in work if k.kind is KernelKind.GEMM) for work in works)
        assert 0.4 < less / wide < 0.7
    job = {
        "model": {"config": "deepseek-v3", "seq_len": 4096},
        "cluster": {"gpu": "gb300-nvl72", "nodes": 8},
        "parallel": {"pp": 2, "ep": 32},
        "schedule": {"name": "1f1b", "microbatches": 8},
        "precision": {"compute": "fp8"},
    }
    found = [predict(load_job(job, [f"precision.head={x}"])).breakdown["compute"] for x in ("bf16", "fp8")]
    assert found[0].iloc[0] == found[1].iloc[0] and found[0].iloc[-1] > 1.01 * found[1].iloc[-1]


def test_where_nothing_is_in_fp8_it_is_refused() -> None:
    job = {"model": {"config": "llama3-8b"}, "precision": {"head": "fp8"}}
    e = refusal(lambda: precision_of(load_job(job)), match="head in fp8 beside products in bf16")
    assert (e.key, e.suggestion) == ("precision.head", 'precision.head = "bf16"')
    fp8 = {**job, "precision": {"compute": "fp8", "head": "fp16"}}
    assert refusal(lambda: precision_of(load_job(fp8)), match="head in fp16").allowed == "bf16, fp8"
    own = load_job({**job, "precision": {"compute": "fp8", "head": "bf16"}})
    assert precision_of(own) == PLAIN and "head" not in repr(precision_of(own))
