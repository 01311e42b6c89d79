"""Biases of experts: bytes by hand, of gpt-oss; other experts have none."""

from dataclasses import replace

from ir.core.work import Work
from ir.workload import load_config, model_chunks
from ir.workload.config.spec import ModelConfig
from ir.workload.part import PartLayout, PartWork
from ir.workload.setting import MicrobatchShape, ModelPrecision
from ir.workload.work import part_work

B, S, EP, ETP = 2, 64, 4, 2


def experts(config: ModelConfig) -> PartWork:
    chunk, part = next((c, p) for c in model_chunks(config) for p in c.parts if p.name == "experts")
    return part_work(config, chunk, part, PartLayout(ep=EP, etp=ETP), MicrobatchShape(B, S), ModelPrecision())


def bytes_of(work: Work) -> list[int]:
    return [x.bytes for x in work if x.label.startswith("experts.bias")]


def test_a_row_s_bias_is_added_and_summed_by_a_kernel_of_its_own() -> None:
    c = load_config("gpt-oss-20b")
    assert c.moe is not None
    rows = B * S * c.moe.top_k * ETP
    found = experts(c)
    assert bytes_of(found.forward) == [2 * rows * 2 * c.hidden]  # read and written, in bf16
    assert bytes_of(found.input_grad) == [2 * rows * (c.hidden + 2 * c.moe.ffn // ETP)]
    plain = experts(replace(c, form=replace(c.form, expert_bias=False)))
    for name in ("forward", "input_grad", "weight_grad"):
        before, after = getattr(plain, name), getattr(found, name)
        assert before == tuple(x for x in after if not x.label.startswith("experts.bias"))
    assert (found.saved, found.model_flops) == (plain.saved, plain.model_flops)
    assert not bytes_of(experts(load_config("mixtral-8x7b")).forward)
